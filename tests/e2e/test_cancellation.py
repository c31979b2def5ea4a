"""A hundred clients go away at random moments, each way there is, and nothing of them remains."""

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from charonia.launch.server.run import running_server
from charonia.launch.server.tritonserver import TritonServer
from support.e2e import (
    ENDLESS,
    ENDLESS_BLOCKS,
    ONE_THREAD,
    Response,
    generate,
    infer_grpc,
    one_response,
    request_inputs,
    scrape,
    stream_grpc,
    wait_for,
    wait_idle,
)
from support.live_stream import LiveStream
from support.long import long

NUM_STREAMS = 100
NUM_RUNNING = 40
"""Of these it is certain that the server has them when their clients go away."""
NUM_AT_ONCE = 16
ROWS = "max_num_seqs=6"  # fewer than streams at once, so that some are cancelled while they wait
FREE_WITHIN_S = 60.0
REFERENCE = {"max_tokens": 120, "ignore_eos": True, "temperature": 0.0}
REFERENCE_PROMPT = list(range(40, 90))

Moment = Callable[[LiveStream], None]
"""Waits until a stream is to end."""


@pytest.fixture(scope="module")
def server(endless_checkpoint: Path) -> Iterator[TritonServer]:
    settings = (ONE_THREAD, ROWS, ENDLESS_BLOCKS)
    with running_server(model=endless_checkpoint, settings=settings) as server:
        yield server


@pytest.fixture(scope="module")
def reference(server: TritonServer) -> list[int]:
    """The tokens of a request that runs alone."""
    return follow(server)


def follow(server: TritonServer) -> list[int]:
    """The tokens of the request that must not be affected."""
    stream = LiveStream(server.grpc_url, REFERENCE_PROMPT, **REFERENCE).wait_over()
    assert stream.error is None
    assert len(stream.token_ids) == REFERENCE["max_tokens"]
    return stream.token_ids


def moments(draw: random.Random) -> Iterator[tuple[int, Moment]]:
    """For each stream, how many tokens it wants and when it shall end.

    A tenth at once, before the first token; a tenth when all tokens but one have come; the rest at
    random, half of them (`NUM_RUNNING`) running, the others waiting or running.
    """
    for index in range(NUM_STREAMS):
        if index % 10 == 0:
            yield ENDLESS, lambda stream: None
        elif index % 10 == 1:
            num_tokens = draw.randrange(2, 20)
            yield num_tokens, lambda stream, last=num_tokens - 1: stream.wait_tokens(last)
        else:
            num_tokens, seconds = index % 2, draw.uniform(0.0, 0.6)
            yield ENDLESS, lambda stream, *, n=num_tokens, s=seconds: later(stream, n, s)


def later(stream: LiveStream, num_tokens: int, seconds: float) -> None:
    """Wait until so many tokens came, and some time."""
    stream.wait_tokens(num_tokens)
    time.sleep(seconds)


def end_all(
    server: TritonServer,
    end: Callable[[LiveStream], None],
    *,
    protocol: str = "grpc",
    model: str = "scheduler",
) -> list[LiveStream]:
    """Start the streams, so many at once, and end each at its moment."""
    draw = random.Random(7)
    url = server.http_url if protocol == "http" else server.grpc_url

    def run_one(index: int, num_tokens: int, moment: Moment) -> LiveStream:
        stream = LiveStream(
            url,
            [1 + (index * 7 + position) % 300 for position in range(1 + index % 40)],
            protocol=protocol,
            model=model,
            request_id=f"stream-{index}",
            max_tokens=num_tokens,
            ignore_eos=True,
        )
        moment(stream)
        end(stream)
        return stream.wait_over()

    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        futures = [
            pool.submit(run_one, index, num_tokens, moment)
            for index, (num_tokens, moment) in enumerate(moments(draw))
        ]
        return [future.result() for future in futures]


def total(samples: dict[str, float], name: str) -> int:
    """The sum of a counter over all its labels."""
    return int(sum(value for key, value in samples.items() if key.partition("{")[0] == name))


def leave(stream: LiveStream) -> None:
    stream.leave()


@pytest.mark.parametrize(
    ("protocol", "model"),
    [
        ("grpc", "scheduler"),
        ("http", "llm"),
        pytest.param("http", "scheduler", marks=long),
        pytest.param("grpc", "llm", marks=long),
    ],
)
def test_clients_that_go_away_leave_nothing_behind(
    server: TritonServer, reference: list[int], protocol: str, model: str
) -> None:
    before = wait_idle(server)
    streams = end_all(server, leave, protocol=protocol, model=model)
    after = wait_idle(server, FREE_WITHIN_S)
    assert all(stream.error is None for stream in streams)
    num_ended = total(after, "charonia_finished_total") - total(before, "charonia_finished_total")
    num_cancelled = int(
        after["charonia_cancellations_total"] - before["charonia_cancellations_total"]
    )
    # gRPC may cancel a request before it has left the client, on a slow machine often.
    assert num_ended <= NUM_STREAMS
    assert num_cancelled >= NUM_RUNNING
    assert num_ended - num_cancelled <= NUM_STREAMS * 0.1
    assert follow(server) == reference


def test_cancel_requests_end_streams_by_their_id(
    server: TritonServer, reference: list[int]
) -> None:
    draw = random.Random(3)

    def cancel(stream: LiveStream) -> None:
        # One that comes before the request itself has nothing to cancel, so it is repeated.
        def ask() -> bool:
            model = draw.choice(("scheduler", "generate", "llm"))
            reply = generate(server, {"id": stream.request_id, "cancel": True}, model)
            assert reply.status_code == 200, reply.text
            return stream.is_over

        assert wait_for(ask, bool, FREE_WITHIN_S)

    before = wait_idle(server)
    streams = end_all(server, cancel)
    after = wait_idle(server, FREE_WITHIN_S)
    errors = [stream.error for stream in streams if stream.finish_reason is None]
    assert set(errors) == {"the request was cancelled [charonia:cancelled]"}
    assert len(errors) >= NUM_STREAMS * 0.8
    counted = after["charonia_cancellations_total"] - before["charonia_cancellations_total"]
    assert counted == len(errors)
    num_ended = total(after, "charonia_finished_total") - total(before, "charonia_finished_total")
    assert num_ended == NUM_STREAMS
    assert follow(server) == reference


@long
def test_a_neighbour_of_cancelled_streams_keeps_its_tokens(
    server: TritonServer, reference: list[int]
) -> None:
    with ThreadPoolExecutor(1) as pool:
        neighbours = pool.submit(lambda: [follow(server) for _ in range(3)])
        end_all(server, leave)
        assert neighbours.result() == [reference] * 3


def test_a_waiting_request_is_cancelled_before_it_ever_ran(server: TritonServer) -> None:
    wait_idle(server)
    endless = {"max_tokens": ENDLESS, "ignore_eos": True}
    with_rows = [LiveStream(server.grpc_url, [9, n], **endless) for n in range(6)]
    for stream in with_rows:
        stream.wait_tokens(1)
    waiting = LiveStream(server.grpc_url, [10], **endless)
    name = "charonia_requests_waiting"
    assert wait_for(lambda: scrape(server)[name], lambda number: number == 1) == 1
    waiting.leave()
    assert wait_for(lambda: scrape(server)[name], lambda number: number == 0) == 0
    assert waiting.wait_over().token_ids == []
    assert not any(stream.is_over for stream in with_rows)
    for stream in with_rows:
        stream.leave()
    wait_idle(server)


@pytest.mark.parametrize(
    "model", ["scheduler", *(pytest.param(model, marks=long) for model in ("generate", "llm"))]
)
def test_a_whole_answer_that_is_cancelled_has_what_there_is_of_it(
    server: TritonServer, model: str
) -> None:
    before = wait_idle(server)["charonia_generation_tokens_total"]
    prompt, sampling = [5, 6, 7], {"max_tokens": ENDLESS, "ignore_eos": True, "temperature": 0.0}
    wishes = {"return_cancelled_output": True, "exclude_input_in_output": True}
    wishes |= {"return_token_ids": True, "return_finish_reason": True}
    inputs = request_inputs(prompt, sampling, **wishes)

    def ask() -> Response:
        if model == "generate":
            return infer_grpc(server, inputs, request_id="91")
        return one_response(stream_grpc(server, inputs, model, request_id="91"))

    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask)
        wait_for(
            lambda: scrape(server)["charonia_generation_tokens_total"], lambda num: num > before + 8
        )
        assert generate(server, {"id": "91", "cancel": True}).status_code == 200
        cancelled = answer.result()
    assert cancelled.one("finish_reason") == "cancelled"
    token_ids = cancelled.outputs["output_ids"]
    assert 8 <= len(token_ids) < ENDLESS
    again = request_inputs(prompt, sampling | {"max_tokens": len(token_ids)}, return_token_ids=True)
    assert infer_grpc(server, again).outputs["output_ids"] == token_ids
    wait_idle(server)
