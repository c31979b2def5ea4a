"""A gateway as its users have it: a process of its own, called over HTTP and by OpenAI's client.

Owns that process and what it logs. Must not know charonia's insides.
"""

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI

from charonia.launch.server.tritonserver import TritonServer
from support.e2e import ENDLESS, samples_of, scrape, wait_for
from support.waiting import WAIT_S

_SERVING = re.compile(r"gateway_serving url=\"?(http://[^\s\"]+)")


class Gateway:
    """A running one.

    Attributes:
        url: where it listens. lines: what it has logged so far.
    """

    def __init__(self, servers: Sequence[str], tokenizer: Path, *arguments: str) -> None:
        self.lines: list[str] = []
        self._is_serving = threading.Event()
        command = [sys.executable, "-m", "charonia.launch.commands.cli", "gateway", "--port", "0"]
        command += [f"--server={server}" for server in servers]
        command += [f"--tokenizer={tokenizer}", *arguments]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._is_serving.wait(WAIT_S), self.lines
        found = [match[1] for line in self.lines if (match := _SERVING.search(line))]
        assert found, self.lines
        (self.url,) = found
        self.http = httpx.Client(base_url=self.url, timeout=WAIT_S)
        self.openai = OpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S
        )

    def metrics(self) -> dict[str, float]:
        """Read its own metrics."""
        return samples_of(self.http.get("/metrics").text)

    def wait_line(self, *parts: str) -> str:
        """The first line of the log that has all of these parts, once it is there."""

        def find() -> list[str]:
            return [line for line in list(self.lines) if all(part in line for part in parts)]

        found = wait_for(find, bool)
        assert found, (parts, self.lines)
        return found[0]

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal, and wait; the exit code."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        """Wait for its end; the exit code."""
        code = self.process.wait(WAIT_S)
        self._reader.join()
        return code

    def close(self) -> None:
        """Kill it, if it runs."""
        self.http.close()
        self.openai.close()
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))
            if _SERVING.search(line):
                self._is_serving.set()
        self._is_serving.set()


@contextlib.contextmanager
def running_gateway(servers: Sequence[str], tokenizer: Path, *arguments: str) -> Iterator[Gateway]:
    """A gateway in front of servers, by their gRPC endpoints; further arguments as of the command.

    No line of its log may have told of a fault of its own at the end.
    """
    with contextlib.closing(Gateway(servers, tokenizer, *arguments)) as gateway:
        yield gateway
    wrong = [line for line in gateway.lines if "Traceback" in line or " fault " in line]
    assert not wrong, wrong


@contextlib.contextmanager
def asking(
    gateway: Gateway, receive_bytes: int | None = None, **body: Any
) -> Iterator[socket.socket]:
    """A connection on which a request for an endless completion was sent; closed at the end.

    Args:
        receive_bytes: that the kernel takes for who does not read. body: what the request says.
    """
    asked = {"max_tokens": ENDLESS, "ignore_eos": True, **body}
    with posting(gateway, "/v1/completions", asked, receive_bytes) as connection:
        yield connection


@contextlib.contextmanager
def posting(
    gateway: Gateway, path: str, body: dict[str, Any], receive_bytes: int | None = None
) -> Iterator[socket.socket]:
    """A connection on which a request was sent; closed at the end.

    Args:
        receive_bytes: see `asking`.
    """
    host, _, port = gateway.url.removeprefix("http://").rpartition(":")
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
    with socket.socket() as connection:
        if receive_bytes is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        connection.settimeout(WAIT_S)
        connection.connect((host, int(port)))
        connection.sendall(head.encode() + content)
        yield connection


def wait_metric(server: TritonServer, name: str, value: float) -> None:
    """Wait until a gauge of the server's has a value."""
    assert wait_for(lambda: scrape(server)[name], lambda found: found == value) == value
