"""Servers that fall silent without closing a connection, and those that are only slow."""

import asyncio
import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from charonia.launch.server.discovery import find_tritonserver
from charonia.launch.server.tritonserver import TritonServer
from charonia_client import (
    AsyncClient,
    Client,
    ConnectionLost,
    RetryPolicy,
    grpc_transport,
)
from client.conftest import REPOSITORY, endless, script, settings
from support.held_back import held_back
from support.long import long
from support.two_hosts import NotPermittedError, TwoHosts
from support.waiting import WAIT_S

MIN_INTERVAL = "grpc-http2-min-recv-ping-interval-without-data"
ONCE = RetryPolicy(max_attempts=1)

READ_TO_THE_END = """
import sys
from charonia_client import CharoniaClientError, Client, RetryPolicy, grpc_transport

url, prompt, has_requests, grpc_transport.PING_S, grpc_transport.PING_TIMEOUT_S = (
    sys.argv[1], sys.argv[2], sys.argv[3] == "True", *map(float, sys.argv[4:])
)
with Client(url, model="scripted", retry=RetryPolicy(max_attempts=1)) as client:
    with client.stream(prompt) as stream:
        next(stream)
        print("begun", flush=True)
        sys.stdin.readline()
        try:
            if has_requests:
                client.health()
            for _ in stream:
                pass
        except CharoniaClientError as error:
            print(type(error).__name__, flush=True)
"""


def default_min_interval_s() -> float:
    """Pings may come so often, as tritonserver's help says."""
    installation = find_tritonserver()
    command = [str(installation.binary), "--help"]
    run = subprocess.run(command, env=installation.environment(), capture_output=True, text=True)
    found = re.search(rf"--{MIN_INTERVAL} .*?Default is (\d+)", run.stderr + run.stdout, re.S)
    assert found is not None
    return int(found[1]) / 1000


def test_pings_are_not_more_frequent_than_tritonserver_permits() -> None:
    assert default_min_interval_s() == 300
    assert 1.05 * default_min_interval_s() < grpc_transport.PING_S


def test_a_server_that_answers_no_ping_loses_its_streams(
    scripted: TritonServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_transport, "PING_S", 5)
    monkeypatch.setattr(grpc_transport, "PING_TIMEOUT_S", 5)

    async def main() -> None:
        async with held_back(scripted.grpc_url) as (url, passes), asyncio.timeout(WAIT_S):
            passes.set()
            async with (
                AsyncClient(url, model="scripted", retry=ONCE) as client,
                client.stream(endless()) as stream,
            ):
                await anext(stream)
                passes.clear()
                with pytest.raises(ConnectionLost):
                    async for _ in stream:
                        pass

    asyncio.run(main())


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    try:
        made = TwoHosts()
    except NotPermittedError as error:
        pytest.skip(f"network namespaces cannot be made here: {error}")
    with made as hosts:
        yield hosts


@long
def test_a_host_that_vanishes_loses_its_streams(hosts: TwoHosts) -> None:
    """By the next request, which it does not acknowledge, long before a ping; or by a ping."""
    with hosts.b.entered(), TritonServer(REPOSITORY, address=hosts.b.address) as server:
        server.wait_ready()
        with contextlib.ExitStack() as stack:
            readers = []
            for has_requests, ping_s in ((True, 1e5), (False, 1)):
                arguments = [server.grpc_url, endless(), str(has_requests), str(ping_s), "1"]
                with hosts.a.entered():
                    reader = subprocess.Popen(
                        [sys.executable, "-c", READ_TO_THE_END, *arguments],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        text=True,
                    )
                stack.callback(reader.kill)
                assert reader.stdout is not None
                assert reader.stdout.readline() == "begun\n"
                readers.append(reader)
            hosts.cut()
            said = [reader.communicate("cut\n", timeout=WAIT_S)[0] for reader in readers]
        assert said == 2 * ["ConnectionLost\n"]


@long
@pytest.mark.parametrize(("share", "lives"), [(1.0, True), (0.1, False)])
def test_an_idle_stream_outlives_its_pings(
    monkeypatch: pytest.MonkeyPatch, share: float, *, lives: bool
) -> None:
    """All times are a thirtieth of the real ones. Pings that are too frequent are punished."""
    interval_s = default_min_interval_s() / 30
    ping_s = share * grpc_transport.PING_S / 30
    monkeypatch.setattr(grpc_transport, "PING_S", ping_s)
    options = [f"--{MIN_INTERVAL}={int(1000 * interval_s)}"]
    with TritonServer(REPOSITORY, further_options=options) as server:
        server.wait_ready()
        with Client(**settings(server, "grpc"), retry=ONCE) as client:
            stream = client.stream(script(chunks=["a", "b"], delays_s=[0, 5.5 * ping_s]))
            if lives:
                assert "".join(chunk.text for chunk in stream) == "ab"
            else:
                with pytest.raises(ConnectionLost, match="Too many pings"):
                    list(stream)
