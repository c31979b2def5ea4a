"""Whatever process of the real server is lost comes back, and streams beside it go on."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tritonclient.utils import InferenceServerException

from charonia.launch.server.repository import RepositoryOptions
from charonia.launch.server.run import prepared_server
from charonia.supervision.server.judge import SupervisionLimits
from support.e2e import (
    ONE_THREAD,
    generate,
    infer_grpc,
    one_torch_thread,
    request_inputs,
    scrape,
    wait_for,
    wait_idle,
)
from support.events import events
from support.faults import held_loads, paced
from support.leftovers import leftovers
from support.live_stream import LiveStream
from support.long import long
from support.many_streams import finish
from support.stopping import stop_process
from support.supervised import Supervised

LIMITS = SupervisionLimits(stopped_s=0.5, orphaned_calls_s=60.0, drain_s=1.0, backoff_s=0.1)
SETTINGS = (ONE_THREAD, "num_gpu_blocks_override=1025", "max_num_seqs=8")
STARTS_S = 240.0
ENDS_S = 50.0  # calls of a lost server: less than `orphaned_calls_s`, another reason to end
PROMPT = [5, 6, 7]
SAMPLING = {"temperature": 1.5, "seed": 3, "ignore_eos": True}
ENDLESS = 4000  # tokens: as good as endless, whatever a slow machine takes to mend a fault
NUM_TOKENS = 600
"""Of a stream whose end is waited for; nothing is compared beyond them."""
PROCESSES = {
    "engine": 1,
    "generate": 1,
    "postprocessor": 1,
    "scheduler": 1,
    "tokenizer": 2,
}
FAULTS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
KINDS = {"killed": "died", "stopped": "stopped"}


@pytest.fixture(scope="module")
def supervised(small_checkpoint: Path, faulty_repository: Path) -> Iterator[Supervised]:
    """A supervised server; each test leaves it serving."""
    options = RepositoryOptions(source=faulty_repository, model=small_checkpoint, settings=SETTINGS)
    with one_torch_thread(), prepared_server(options) as (server, _):
        with Supervised(server, LIMITS) as supervised:
            supervised.wait_serving(STARTS_S)
            yield supervised
        runtime_dir = server.runtime_dir
    assert supervised.error is None
    assert leftovers(runtime_dir) == []


@pytest.fixture(scope="module")
def undisturbed(supervised: Supervised) -> list[int]:
    """The tokens of a stream that nothing happens to."""
    stream = start_stream(supervised, "scheduler", NUM_TOKENS)
    (token_ids,) = finish(supervised.server.repository, [stream])
    return token_ids


class UnaryCall:
    """A call of `generate` under way; `error` is why it ended without an answer."""

    def __init__(self, supervised: Supervised) -> None:
        self.error: InferenceServerException | None = None
        self._server = supervised.server
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wait_over(self, timeout: float) -> None:
        """Wait for its end."""
        self._thread.join(timeout)
        assert not self._thread.is_alive(), "the call hangs"

    def _run(self) -> None:
        try:
            infer_grpc(self._server, request_inputs(PROMPT, SAMPLING | {"max_tokens": ENDLESS}))
        except InferenceServerException as error:
            self.error = error


def start_stream(supervised: Supervised, model: str, max_tokens: int = ENDLESS) -> LiveStream:
    """A long stream that has begun."""
    sampling = SAMPLING | {"max_tokens": max_tokens}
    stream = LiveStream(supervised.server.grpc_url, PROMPT, model=model, **sampling)
    stream.wait_tokens(3)
    return stream


def start_call(supervised: Supervised, num_streams: int) -> UnaryCall:
    """A long unary call that runs, beside so many streams."""
    call = UnaryCall(supervised)
    running = wait_for(
        lambda: scrape(supervised.server)["charonia_requests_running"], lambda n: n > num_streams
    )
    assert running > num_streams
    return call


def leave_undisturbed(
    supervised: Supervised, streams: list[LiveStream], undisturbed: list[int]
) -> None:
    """Assert that the streams still run and have the right tokens, and end them."""
    for stream in streams:
        stream.wait_tokens(len(stream.token_ids) + 1)
        assert not stream.is_over, stream.error or "it ended too early to tell"
    with paced(supervised.server.repository, 0):
        for stream in streams:
            stream.wait_tokens(NUM_TOKENS)
    for stream in streams:
        stream.leave()
        stream.wait_over()
        assert stream.token_ids[:NUM_TOKENS] == undisturbed


def strike(supervised: Supervised, model: str, fault: str) -> tuple[int, int]:
    """Kill or stop one process of a model; its pid, and how many lines were logged before."""
    num_lines = len(supervised.lines)
    pid = supervised.server.pids(model)[0]
    os.kill(pid, FAULTS[fault])
    return pid, num_lines


def check_every_door(supervised: Supervised) -> None:
    """Assert that all three ways in lead to an answer, and every model has its processes."""
    body = {"text_input": "a", "max_tokens": 2, "ignore_eos": True}
    for model in ("scheduler", "llm", "generate"):
        reply = generate(supervised.server, body, model)
        assert (model, reply.status_code) == (model, 200), reply.text
    assert wait_for(lambda: num_processes(supervised), PROCESSES.__eq__) == PROCESSES


def num_processes(supervised: Supervised) -> dict[str, int]:
    """How many processes each model has, those on their way out as well."""
    return {model: len(found) for model, found in supervised.server.stubs().items()}


@pytest.mark.parametrize(
    ("model", "fault"),
    [
        ("tokenizer", "stopped"),
        ("postprocessor", "killed"),
        ("generate", "killed"),
        pytest.param("tokenizer", "killed", marks=long),
        pytest.param("postprocessor", "stopped", marks=long),
        pytest.param("generate", "stopped", marks=long),
    ],
)
def test_a_lost_process_beside_the_scheduler_comes_back_alone(
    supervised: Supervised, undisturbed: list[int], model: str, fault: str
) -> None:
    num_restarts = supervised.supervisor.num_restarts
    streams = [start_stream(supervised, name) for name in ("scheduler", "llm")]
    pid, num_lines = strike(supervised, model, fault)
    wait_for(lambda: events(supervised.lines[num_lines:], "model_back"), bool)
    (lost,) = events(supervised.lines[num_lines:], "process_lost")
    assert lost == {"model": model, "kind": KINDS[fault], "pid": str(pid)}
    check_every_door(supervised)
    if model == "postprocessor":
        lost = streams.pop().wait_over().error
        assert lost == "in ensemble 'llm', Stub process 'postprocessor_0_0' is not healthy."
    leave_undisturbed(supervised, streams, undisturbed)
    with paced(supervised.server.repository, 0):
        wait_idle(supervised.server)  # the request of the stream that was lost runs to its end
    assert supervised.supervisor.num_restarts == num_restarts
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@long  # it waits for half a minute
def test_calls_in_a_lost_generate_end_once_no_other_request_is_disturbed(
    supervised: Supervised, undisturbed: list[int]
) -> None:
    stream = start_stream(supervised, "scheduler", NUM_TOKENS)
    call = start_call(supervised, 1)
    _, num_lines = strike(supervised, "generate", "killed")
    assert wait_for(lambda: events(supervised.lines[num_lines:], "calls_stranded"), bool)
    assert finish(supervised.server.repository, [stream]) == [undisturbed]
    call.wait_over(ENDS_S)
    assert call.error is not None
    supervised.wait_serving(STARTS_S)
    orphaned = events(supervised.lines[num_lines:], "calls_stranded")
    assert orphaned == [{"model": "generate", "calls": "1"}]
    check_every_door(supervised)


@pytest.mark.parametrize("fault", ["killed", pytest.param("stopped", marks=long)])
def test_a_lost_scheduler_ends_every_open_call_and_comes_back_with_the_server(
    supervised: Supervised, fault: str
) -> None:
    streams = [start_stream(supervised, name) for name in ("scheduler", "llm")]
    call = start_call(supervised, len(streams))
    pid, num_lines = strike(supervised, "scheduler", fault)
    struck = time.monotonic()
    call.wait_over(ENDS_S)
    for stream in streams:
        stream.wait_over(ENDS_S)
        assert stream.error is not None
    assert call.error is not None
    print(f"{fault}: all calls ended within {time.monotonic() - struck:.1f} s")
    supervised.wait_serving(STARTS_S)
    lost = events(supervised.lines[num_lines:], "process_lost")
    assert lost == [{"model": "scheduler", "kind": KINDS[fault], "pid": str(pid)}]
    check_every_door(supervised)


@long
def test_a_stopped_tritonserver_comes_back(supervised: Supervised) -> None:
    stream = start_stream(supervised, "scheduler")
    assert supervised.server.pid is not None
    stop_process(supervised.server.pid)
    stream.wait_over(ENDS_S)
    assert stream.error is not None
    supervised.wait_serving(STARTS_S)
    check_every_door(supervised)


@long
def test_a_lost_engine_is_left_to_the_scheduler(
    supervised: Supervised, undisturbed: list[int]
) -> None:
    stream = start_stream(supervised, "scheduler", NUM_TOKENS)
    _, num_lines = strike(supervised, "engine", "killed")
    assert finish(supervised.server.repository, [stream]) == [undisturbed]
    assert supervised.lines[num_lines:] == []
    check_every_door(supervised)


@long
def test_an_engine_that_is_lost_while_it_loads_comes_back_with_the_server(
    supervised: Supervised,
) -> None:
    stream = start_stream(supervised, "scheduler")
    with held_loads(supervised.server.repository):
        lost, num_lines = strike(supervised, "engine", "killed")
        (loading,) = wait_for(
            lambda: [pid for pid in supervised.server.pids("engine") if pid != lost], bool
        )
        stop_process(loading)
    stream.wait_over()
    assert stream.error is not None
    supervised.wait_serving(STARTS_S)
    reason = "tritonserver waits for a process of engine that does not run"
    assert any(reason in line for line in supervised.lines[num_lines:])
    check_every_door(supervised)
