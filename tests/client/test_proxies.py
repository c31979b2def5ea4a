"""The environment's proxy, which is not asked for servers on this machine."""

import asyncio

import pytest

from charonia.launch.server.tritonserver import TritonServer
from charonia_client import AsyncClient, Client
from charonia_client.proxies import is_local, mounts_of
from charonia_client.values import Protocol
from client.conftest import metrics_of, script, settings


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("127.0.0.1:8001", True),
        ("127.0.0.2", True),
        ("http://localhost:8000", True),
        ("[::1]:8001", True),
        ("https://[::1]:8000/v2", True),
        ("10.0.0.5:8001", False),
        ("http://triton:8000", False),
        ("localhost.example.com:8001", False),
        ("dns:///127.0.0.1:8001", False),
        ("", False),
    ],
)
def test_only_the_loopback_interface_is_local(url: str, expected: bool) -> None:
    assert is_local(url) is expected


def test_a_proxy_is_left_out_for_one_host_alone() -> None:
    assert mounts_of("http://127.0.0.1:8000") == {"all://127.0.0.1": None}
    assert mounts_of("http://[::1]:8000") == {"all://[::1]": None}
    assert mounts_of("http://triton:8000") == {}


@pytest.mark.usefixtures("behind_proxy")
def test_a_client_behind_a_proxy_reaches_this_machine(
    scripted: TritonServer, protocol: Protocol
) -> None:
    prompt = script(chunks=["one"], token_ids=[[1]], finish="length")
    with Client(**settings(scripted, protocol)) as client:
        assert client.generate(prompt).text == "one"
        metrics_of(client)

    async def ask() -> str:
        async with AsyncClient(**settings(scripted, protocol)) as client:
            await client.metrics()
            return (await client.generate(prompt)).text

    assert asyncio.run(ask()) == "one"
