"""Whoever leaves is cancelled in the scheduler, wherever the request is; nothing else ends."""

import asyncio
import contextlib
import json
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from charonia.events import Log
from charonia.gateway.errors import shutting_down
from charonia.gateway.observing import Metrics, Observed
from charonia.gateway.watching import PIECE_BYTES, CutOffError, Reply, StalledError
from charonia.launch.server.run import running_server
from charonia.launch.server.tritonserver import TritonServer
from support.e2e import (
    ENDLESS,
    ENDLESS_BLOCKS,
    ONE_THREAD,
    one_torch_thread,
    scrape,
    wait_for,
    wait_idle,
)
from support.gateway import Gateway, asking, posting, running_gateway, wait_metric
from support.long import long

CANCELLED = "charonia_cancellations_total"
GENERATED = "charonia_generation_tokens_total"
LEFT = 'charonia_gateway_requests_total{route="/v1/completions",status="499"}'
LEFT_BATCH = 'charonia_gateway_requests_total{route="/v1/batch",status="499"}'
RUNNING, WAITING = "charonia_requests_running", "charonia_requests_waiting"
USED = 'charonia_kv_blocks{state="used"}'
CANCELLED_S = 1.0
"""What is promised: so long after its client left, a request has gone from the scheduler."""
BUSY_S = 3.0
"""What is asked for while other tests run beside it."""
NUM_LEAVES = 5
"""How many times that is measured; the median counts, for others may hold the machine at a time."""
LONG_PROMPT = [5 + index % 200 for index in range(60_000)]
SHORT_STEPS = "max_num_batched_tokens=32"
"""So that a long prompt takes many steps."""


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[TritonServer]:
    """Two rows, steps of few tokens."""
    settings = (ONE_THREAD, ENDLESS_BLOCKS, "max_num_seqs=2", SHORT_STEPS)
    with one_torch_thread(), running_server(model=model, settings=settings) as server:
        yield server


@pytest.fixture(scope="module")
def gateway(server: TritonServer, model: Path) -> Iterator[Gateway]:
    with running_gateway([server.grpc_url], model) as gateway:
        yield gateway


@contextlib.contextmanager
def all_cancelled(
    server: TritonServer, gateway: Gateway, count: int = 1, *, metric: str = LEFT
) -> Iterator[None]:
    """What happens here ends so many requests in the scheduler, and one in the gateway.

    Args:
        metric: which requests of the gateway have ended.
    """
    before, left = wait_idle(server), gateway.metrics().get(metric, 0)
    yield
    after = wait_idle(server)
    assert after[CANCELLED] - before[CANCELLED] == count
    wait_for(lambda: gateway.metrics().get(metric, 0), lambda found: found == left + 1)
    assert gateway.metrics().get(metric, 0) == left + 1
    assert gateway.metrics()["charonia_gateway_requests_in_flight"] == 1, "the one that asks"


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_while_tokens_come_is_cancelled(
    server: TritonServer, gateway: Gateway, *, stream: bool
) -> None:
    with all_cancelled(server, gateway):
        with asking(gateway, prompt="x", stream=stream) as connection:
            before = scrape(server)[GENERATED]
            if stream:
                assert connection.recv(12) == b"HTTP/1.1 200"
            wait_for(lambda: scrape(server)[GENERATED], lambda number: number > before)
        wait_metric(server, RUNNING, 0)


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_in_the_queue_is_cancelled_and_the_others_go_on(
    server: TritonServer, gateway: Gateway, *, stream: bool
) -> None:
    before = wait_idle(server)[CANCELLED]
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(asking(gateway, prompt="y"))
        wait_metric(server, RUNNING, 2)
        with asking(gateway, prompt="z", stream=stream):
            wait_metric(server, WAITING, 1)
        wait_metric(server, WAITING, 0)
        after = scrape(server)
        assert (after[RUNNING], after[CANCELLED]) == (2, before + 1)
    wait_idle(server)


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_while_the_prompt_is_computed_is_cancelled(
    server: TritonServer, gateway: Gateway, *, stream: bool
) -> None:
    with (
        all_cancelled(server, gateway),
        asking(gateway, prompt=LONG_PROMPT, stream=stream, cache_salt=str(stream)),
    ):
        wait_metric(server, RUNNING, 1)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["queue", "prompt", "tokens"])
@pytest.mark.parametrize("bound_s", [BUSY_S, pytest.param(CANCELLED_S, marks=long)])
def test_who_leaves_is_cancelled_and_its_blocks_are_free_within_a_second(
    server: TritonServer, gateway: Gateway, bound_s: float, phase: str, *, stream: bool
) -> None:
    wait_idle(server)
    with contextlib.ExitStack() as stack:
        if phase == "queue":
            for _ in range(2):
                stack.enter_context(asking(gateway, prompt="y"))
            wait_metric(server, RUNNING, 2)
        times = [
            seconds_to_cancel(
                server, gateway, phase, stream=stream, salt=f"{bound_s} {stream} {number}"
            )
            for number in range(NUM_LEAVES)
        ]
    print(f"cancelled after {', '.join(f'{seconds:.3f}' for seconds in times)} s")
    assert median(times) <= bound_s, times
    wait_idle(server)


def seconds_to_cancel(
    server: TritonServer, gateway: Gateway, phase: str, *, stream: bool, salt: str
) -> float:
    """Send a request, leave it in a phase, and wait until nothing of it is left in the scheduler.

    Returns:
        Seconds from the close of its connection to a page of metrics that says so. The page is read
        every 50 ms, so the scheduler may have been earlier, but not later.
    """
    before = scrape(server)
    prompt: Any = LONG_PROMPT if phase == "prompt" else "x"
    with asking(gateway, prompt=prompt, stream=stream, cache_salt=salt) as connection:
        if phase == "queue":
            wait_metric(server, WAITING, 1)
        else:
            wait_metric(server, RUNNING, 1)
        if phase == "tokens":
            if stream:
                assert connection.recv(12) == b"HTTP/1.1 200"
            wait_for(lambda: scrape(server)[GENERATED], lambda found: found > before[GENERATED])
        left_at = time.monotonic()

    def has_gone(page: dict[str, float]) -> bool:
        names = [RUNNING, WAITING] if phase == "queue" else [RUNNING, WAITING, USED]
        is_free = all(page[name] == before[name] for name in names)
        return is_free and page[CANCELLED] == before[CANCELLED] + 1

    after = wait_for(lambda: scrape(server), has_gone)
    seconds = time.monotonic() - left_at
    assert has_gone(after), after
    if phase == "prompt":
        assert after[GENERATED] == before[GENERATED], "its prompt had been computed"
    return seconds


def test_who_leaves_several_prompts_leaves_nothing_behind(
    server: TritonServer, gateway: Gateway
) -> None:
    with all_cancelled(server, gateway, count=4):
        with asking(gateway, prompt=["a", "b", "c", "d"], stream=True) as connection:
            assert connection.recv(12) == b"HTTP/1.1 200"
            wait_metric(server, WAITING, 2)
        wait_metric(server, RUNNING, 0)


def test_who_leaves_a_batch_that_is_no_stream_leaves_nothing_behind(
    server: TritonServer, gateway: Gateway
) -> None:
    """Two entries run, and two wait."""
    entry = {"prompt": "x", "max_tokens": ENDLESS, "ignore_eos": True}
    with all_cancelled(server, gateway, count=4, metric=LEFT_BATCH):
        with posting(gateway, "/v1/batch", {"requests": [entry] * 4}):
            wait_metric(server, RUNNING, 2)
            wait_metric(server, WAITING, 2)
        wait_metric(server, RUNNING, 0)
        wait_metric(server, WAITING, 0)


def test_who_leaves_all_samples_leaves_nothing_behind(
    server: TritonServer, gateway: Gateway
) -> None:
    with (
        all_cancelled(server, gateway),
        asking(gateway, prompt="a", n=2, stream=True) as connection,
    ):
        assert connection.recv(12) == b"HTTP/1.1 200"


def test_who_leaves_before_the_body_has_come_leaves_nothing(
    server: TritonServer, gateway: Gateway
) -> None:
    before = scrape(server)
    host, _, port = gateway.url.removeprefix("http://").rpartition(":")
    left = gateway.metrics().get(LEFT, 0)
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\ncontent-length: 10\r\n\r\n{")
    assert wait_for(lambda: gateway.metrics().get(LEFT, 0), lambda found: found == left + 1)
    assert scrape(server)[CANCELLED] == before[CANCELLED]


def test_a_reader_that_stops_reading_is_cancelled_and_holds_nothing(
    server: TritonServer, model: Path
) -> None:
    with (
        running_gateway([server.grpc_url], model, "--stall-timeout", "0.5") as gateway,
        all_cancelled(server, gateway),
    ):
        options: dict[str, Any] = {"prompt": "x", "stream": True, "logprobs": 20, "n": 1}
        with asking(gateway, 4096, **options) as connection:
            assert connection.recv(12) == b"HTTP/1.1 200"
            gateway.wait_line("status=499", "the client reads nothing")
            wait_metric(server, RUNNING, 0)
            data = bytearray()
            while piece := connection.recv(2**16):  # what lay in the kernel
                data += piece
            assert b"[DONE]" not in data


def test_a_whole_answer_is_sent_in_pieces_and_waits_for_its_reader() -> None:
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) == 3:  # a head and two pieces
            await asyncio.Event().wait()

    async def main() -> None:
        with pytest.raises(StalledError):
            await Reply(send, 0.05).whole("x" * 3 * PIECE_BYTES)

    asyncio.run(main())
    assert [message["type"] for message in sent] == [
        "http.response.start",
        "http.response.body",
        "http.response.body",
    ]
    assert [len(message["body"]) for message in sent[1:]] == [PIECE_BYTES] * 2


def test_a_whole_answer_that_is_cut_off_ends_the_connection() -> None:
    """A second head cannot say what went wrong."""
    reply = Reply(take, 1.0)

    async def main() -> None:
        await reply._start(200, {})
        with pytest.raises(CutOffError):
            await reply.error(shutting_down())

    asyncio.run(main())


def test_a_plain_answer_that_nobody_takes_is_aborted() -> None:
    aborted: list[bool] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Any) -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        scope = {
            "type": "http",
            "method": "GET",
            "path": "/",
            "headers": [],
            "extensions": {"charonia.abort": lambda: aborted.append(True)},
        }
        observed = Observed(app, Metrics(), Log(print, lambda: "info"), frozenset(), 0.05)
        await observed(scope, take, send)

    asyncio.run(main())
    assert aborted == [True]


async def take(message: Any = None) -> Any:
    """Take a message, or have none."""


def test_a_reader_that_is_slow_gets_all(server: TritonServer, gateway: Gateway) -> None:
    """It is slower than the tokens come, but reads."""
    body: dict[str, Any] = {"prompt": "x", "stream": True, "logprobs": 20, "max_tokens": 600}
    with asking(gateway, 4096, **body) as connection:
        data = bytearray()
        while b"[DONE]" not in data:
            data += connection.recv(2**12)
    lines = [line for line in bytes(data).split(b"\n") if line.startswith(b"data: {")]
    tokens = [json.loads(line[6:])["choices"][0]["logprobs"]["tokens"] for line in lines]
    assert sum(map(len, tokens)) == 600
    wait_idle(server)


@pytest.mark.parametrize("num_waves", [10, pytest.param(250, marks=long)])
def test_many_who_leave_leave_no_descriptor_and_no_task_behind(
    server: TritonServer, gateway: Gateway, num_waves: int
) -> None:
    def descriptors() -> int:
        return len(list(Path(f"/proc/{gateway.process.pid}/fd").iterdir()))

    def tasks() -> float:
        return gateway.metrics()["charonia_gateway_tasks"]

    def leave(number: int) -> None:
        with contextlib.ExitStack() as stack:
            for index in range(number):
                connection = stack.enter_context(asking(gateway, prompt="x", stream=index % 2 == 0))
                if not index:
                    connection.recv(12)

    leave(8)
    wait_idle(server)
    before = wait_for(descriptors, lambda found: found < 40)
    num_tasks = tasks()
    for _ in range(num_waves):
        leave(8)
    wait_idle(server)
    assert wait_for(descriptors, lambda found: found <= before + 2) <= before + 2
    assert wait_for(tasks, lambda found: found <= num_tasks) <= num_tasks
    assert gateway.metrics()["charonia_gateway_requests_in_flight"] == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_runs_when_the_gateway_ends_is_told_so(
    server: TritonServer, model: Path, number: signal.Signals
) -> None:
    """SIGTERM waits for it first, but not for ever."""
    with running_gateway([server.grpc_url], model, "--drain-timeout", "0.5") as gateway:
        with asking(gateway, prompt="x", stream=True) as connection:
            assert connection.recv(12) == b"HTTP/1.1 200"
            gateway.process.send_signal(number)
            data = bytearray()
            while piece := connection.recv(2**16):
                data += piece
            assert b"shutting down" in data
            assert data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert gateway.wait() == 0
    wait_idle(server)


def test_sigterm_lets_streams_finish_and_takes_no_more(server: TritonServer, model: Path) -> None:
    with running_gateway([server.grpc_url], model, "--drain-timeout", "600") as gateway:
        with asking(gateway, prompt="x", stream=True, max_tokens=2000) as connection:
            assert connection.recv(12) == b"HTTP/1.1 200"
            gateway.process.send_signal(signal.SIGTERM)
            gateway.wait_line("gateway_draining", "requests=1")
            ready = gateway.http.get("/health/ready")
            assert (ready.status_code, ready.json()) == (503, {"status": "draining"})
            refused = gateway.http.post("/v1/completions", json={"prompt": "x"})
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert refused.json()["error"]["code"] == "shutting_down"
            data = bytearray()
            while piece := connection.recv(2**16):
                data += piece
        assert b"error" not in data
        assert b'"finish_reason":"length"' in data
        assert gateway.wait() == 0
    wait_idle(server)
