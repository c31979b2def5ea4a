"""A real server tells a router what its prefix cache holds, whoever is its scheduler."""

import contextlib
import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tritonclient.grpc as grpc

from charonia.errors import LaunchError
from charonia.launch.server.run import running_server
from charonia.launch.server.tritonserver import TritonServer
from charonia_client import Client
from support.e2e import ONE_THREAD, one_torch_thread, wait_for
from support.kv_events import CLEARED, BlockStored, Reader, reading, replay
from support.long import long
from support.waiting import WAIT_S

PREFIX = [*range(100, 132)]


def config_of(endpoint: str, **values: object) -> str:
    values |= {"enable_kv_cache_events": True, "endpoint": endpoint}
    return f"kv_events_config={json.dumps(values)}"


@pytest.fixture
def taken() -> Iterator[socket.socket]:
    """An address that nobody else can have meanwhile."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        yield one


def ask(server: TritonServer, prompt: list[int]) -> None:
    with Client(server.grpc_url) as client:
        client.generate(prompt, max_tokens=2, ignore_eos=True)


def stored_by(reader: Reader, last_token: int, timeout_s: float = WAIT_S) -> list[BlockStored]:
    """The blocks that are stored until one that ends with this token."""
    found: list[BlockStored] = []
    while not found or found[-1].token_ids[-1] != last_token:
        found += [one for one in reader.read(timeout_s).events if isinstance(one, BlockStored)]
    return found


def join(reader: Reader, server: TritonServer) -> None:
    """Ask for other prefixes until the reader is told of one; it has read all that came then."""
    for token in range(1, 99):
        ask(server, [token] * 17)
        with contextlib.suppress(TimeoutError):
            stored_by(reader, token, timeout_s=2.0)
            return


def reload_scheduler(server: TritonServer) -> None:
    """Have Triton load the scheduler beside itself."""
    for path in (server.repository / "scheduler").glob("*/model.py"):
        path.touch()
    with grpc.InferenceServerClient(server.grpc_url) as client:
        client.load_model(server.control_name("scheduler"), headers=server.api_headers)


def test_a_router_sees_prefixes_also_of_a_scheduler_that_takes_anothers_place(
    small_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    endpoint = f"ipc://{tmp_path / 'events'}"
    again = f"ipc://{tmp_path / 'again'}"
    settings = (ONE_THREAD, config_of(endpoint, replay_endpoint=again))
    with (
        one_torch_thread(),
        reading(endpoint) as reader,
        running_server(model=small_checkpoint, settings=settings) as server,
    ):
        numbers = [number for number, _ in replay(again, 0)]
        assert numbers == [*range(len(numbers))]
        assert replay(again, 0)[0][1].events == [CLEARED]
        join(reader, server)
        ask(server, [*PREFIX, *range(200, 216), 1])
        first = stored_by(reader, 215)
        assert first[0].parent_block_hash is None
        assert [token for one in first for token in one.token_ids] == [*PREFIX, *range(200, 216)]
        hashes = [block_hash for one in first for block_hash in one.block_hashes]
        assert {one.block_size for one in first} == {16}
        assert len(set(hashes)) == 3
        ask(server, [*PREFIX, *range(300, 316), 1])
        (second,) = stored_by(reader, 315)
        assert (second.parent_block_hash, second.token_ids) == (hashes[1], [*range(300, 316)])
        pod, model = reader.topic.split("@")[1:]
        assert (pod, model) == (socket.gethostname(), "scheduler")

        reload_scheduler(server)
        ask(server, [*PREFIX, 1])
        while CLEARED not in reader.read().events:
            pass
        # A reader that connects anew may have missed the first batches of the new one.
        found = wait_for(lambda: replay(again, 0), lambda batches: len(batches) > 1)
        assert [number for number, _ in found] == [0, 1]
        assert found[0][1].events == [CLEARED]
        (stored,) = found[1][1].events
        assert (stored.parent_block_hash, stored.token_ids) == (None, PREFIX)


@long
def test_a_server_whose_endpoint_is_taken_does_not_start_and_says_why(
    small_checkpoint: Callable[..., Path], taken: socket.socket
) -> None:
    taken.listen()
    endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
    lines: list[str] = []
    with (
        one_torch_thread(),
        pytest.raises(LaunchError),
        running_server(
            model=small_checkpoint, settings=(ONE_THREAD, config_of(endpoint)), on_log=lines.append
        ),
    ):
        pytest.fail("it has started")
    text = f"kv_events_config: endpoint = '{endpoint}' cannot be bound: Address already in use"
    assert any(text in line for line in lines)
