"""Attacks of bytes: what comes before there is a request.

Owns noise on ports and sockets, requests that are sent in part, and bodies that only look like
requests. Must not know models.
"""

import contextlib
import random
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from charonia.sockets.channel import MAX_BYTES
from support.e2e import HTTP, generate
from support.hostile.target import CALL_TIMEOUT_S, CONNECT_TIMEOUT_S, Target, reset

NUM_CONNECTIONS = 100
NOISE_BYTES = 2**16
LISTEN_S = 0.02
TRICKLES, TRICKLE_S = 3, 0.2

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = bytes.fromhex("000000040000000000")
_HEAD = b"POST /v2/models/scheduler/generate HTTP/1.1\r\nHost: charonia\r\n"


def noise_on_ports(target: Target, strength: int) -> None:
    """Random bytes on every port."""
    draw = random.Random(1)
    for port in (target.http_port, target.grpc_port, target.metrics_port):
        for _ in range(10 * strength):
            with target.connect(port) as connection:
                _send_and_look(connection, draw.randbytes(NOISE_BYTES))


def noise_on_sockets(target: Target, strength: int) -> None:
    """Random bytes, framed and bare, on every Unix socket; lengths without messages; silence."""
    draw = random.Random(2)
    assert target.sockets, "there are no sockets"
    with contextlib.ExitStack() as held:
        for path in target.sockets:
            for _ in range(10 * strength):
                for data in _framed(draw):
                    with contextlib.suppress(OSError), _connect(path) as connection:
                        _send_and_look(connection, data)
            for data in (MAX_BYTES.to_bytes(4, "little"), b"\1", b"") * (10 * strength):
                with contextlib.suppress(OSError):
                    connection = held.enter_context(_connect(path))
                    connection.sendall(data)
        time.sleep(1.0)


def half_of_http(target: Target, strength: int) -> None:
    """Heads and bodies that do not end, on hundreds of connections at once."""
    beginnings = [
        b"POST",
        _HEAD,
        _HEAD + b"X-Header: ",
        _HEAD + b"Content-Length: 1000000\r\n\r\n" + b'{"text_input": "',
        _HEAD + b"Transfer-Encoding: chunked\r\n\r\nFFFFF\r\n{",
        b"GET /metrics HTTP/1.1\r\n",
    ]
    _hold(target, target.http_port, beginnings, b"x", strength)
    _hold(target, target.metrics_port, beginnings, b"x", strength)


def half_of_grpc(target: Target, strength: int) -> None:
    """HTTP/2 that stops in the middle of a frame, or is none after its preface."""
    announced = bytes.fromhex("00000d000100000001") + bytes.fromhex("00ffffffff")  # a message
    beginnings = [
        PREFACE[:7],
        PREFACE,
        PREFACE + SETTINGS,
        PREFACE + SETTINGS + bytes.fromhex("00004001040000"),
        PREFACE + SETTINGS + announced,
        PREFACE + bytes.fromhex("ffffff04ffffffffff") + b"\xff" * 100,
        b"GET / HTTP/1.1\r\n\r\n",
    ]
    _hold(target, target.grpc_port, beginnings, b"\0", strength)


def bodies_that_exhaust_stacks(target: Target, strength: int) -> None:
    """Deep JSON, a long text and a body in many chunks, which end a server with small stacks."""
    for _ in range(strength):
        assert generate(target, b"[" * 200_000).status_code in (400, 500)
        body = b'{"text_input": "' + b"x" * 40 * 10**6 + b'"}'
        assert generate(target, body).status_code in (400, 413)
        assert _post_chunks(target, 10**6).startswith((b"HTTP/1.1 4", b"HTTP/1.1 5"))


def heads_of_every_kind(target: Target, strength: int) -> None:
    """Heads that are too long, too many, contradictory or for nothing."""
    heads = [
        b"X: " + b"x" * 2**20 + b"\r\n",
        b"X: x\r\n" * 10**4,
        b"Content-Length: -1\r\n",
        b"Content-Length: 99999999999999999999\r\n",
        b"Content-Length: 5\r\nContent-Length: 6\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n",
        b"Inference-Header-Content-Length: 4294967296\r\nContent-Length: 2\r\n",
        b"Content-Encoding: gzip\r\nContent-Length: 2\r\n",
        b"Expect: 100-continue\r\nContent-Length: 1000\r\n",
        b"\0\r\n",
    ]
    for head in heads * strength:
        for line in (_HEAD, b"PUT /%00%ff/" + b"x" * 9000 + b" HTTP/9.9\r\n", b"\r\n"):
            with target.connect(target.http_port) as connection:
                _send_and_look(connection, line + head + b"\r\n{}")


def _send_and_look(connection: socket.socket, data: bytes) -> None:
    """Send what the other end takes, and wait a moment for what it says."""
    with contextlib.suppress(OSError):
        connection.sendall(data)
        connection.settimeout(LISTEN_S)
        connection.recv(2**16)


def _connect(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(CONNECT_TIMEOUT_S)
    connection.connect(str(path))
    return connection


def _framed(draw: random.Random) -> Iterator[bytes]:
    data = draw.randbytes(draw.randrange(1, 4096))
    deep = b"\x91" * 100_000  # lists in lists, in MessagePack
    yield data
    for message in (data, deep, b"\x81\xa4type" + data, b"\xdd\xff\xff\xff\xff", b""):
        yield len(message).to_bytes(4, "little") + message


def _hold(
    target: Target, port: int, beginnings: Iterable[bytes], more: bytes, strength: int
) -> None:
    """Begin on many connections, and go on byte by byte; meanwhile others are served."""
    kinds = list(beginnings)
    held = []
    try:
        for index in range(NUM_CONNECTIONS * strength):
            connection = target.connect(port)
            held.append(connection)
            connection.sendall(kinds[index % len(kinds)])
        for _ in range(TRICKLES):
            time.sleep(TRICKLE_S)
            for connection in held:
                with contextlib.suppress(OSError):
                    connection.send(more)
        ready = f"http://{target.http_url}/v2/health/ready"
        assert HTTP.get(ready).status_code == 200
    finally:
        for index, connection in enumerate(held):
            close: Callable[[socket.socket], None] = reset if index % 2 else socket.socket.close
            close(connection)


def _post_chunks(target: Target, num_chunks: int) -> bytes:
    """POST a body of so many chunks of one byte; the beginning of the answer."""
    at_once = 10_000
    with target.connect(target.http_port) as connection:
        connection.settimeout(CALL_TIMEOUT_S)
        connection.sendall(_HEAD + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n")
        for _ in range(num_chunks // at_once):
            connection.sendall(b"1\r\n \r\n" * at_once)
        connection.sendall(b"0\r\n\r\n")
        return connection.recv(4096)
