"""What breaks while eight streams run, and that every one of them comes to its right end."""

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from charonia.launch.server.processes import find_by_argument
from charonia.launch.server.repository import RepositoryOptions, prepare_repository
from charonia.launch.server.run import running_server
from charonia.launch.server.runtime_dir import REPOSITORY, RuntimeDir
from charonia.launch.server.tritonserver import TritonServer
from charonia.supervision.server.probes import Probe
from charonia.supervision.server.supervisor import wait_serving
from support.behind_proxy import BEHIND_PROXY
from support.e2e import HTTP, ONE_THREAD, error_of, infer_grpc, scrape, wait_for, wait_idle
from support.events import events
from support.faults import held_loads, order_fault, paced
from support.leftovers import leftovers
from support.live_stream import LiveStream
from support.long import long
from support.many_streams import NUM_TOKENS, POISON, check_complete, finish, start_streams
from support.serving import Serving

STEP_DEADLINE_S = 30
SETTINGS = (
    ONE_THREAD,
    "max_num_seqs=16",
    "max_num_batched_tokens=256",
    "num_gpu_blocks_override=900",
    f"scheduler.min_step_deadline_s={STEP_DEADLINE_S}",
)
SERVES_AGAIN_S = 60.0
KINDS = ("step_failed", "died", "hung", "load_failed")


def check_failed(server: TritonServer, streams: list[LiveStream], reason: str) -> None:
    """Assert that the streams ended for this reason, and new requests are refused for it."""
    for stream in streams:
        stream.wait_over()
        assert reason in (stream.error or ""), stream.error
        assert str(server.repository) not in (stream.error or "")
        assert stream.finish_reason is None
    refusal = error_of(lambda: infer_grpc(server, {"input_ids": [1]}))
    assert reason in refusal.message()
    assert refusal.status() == "StatusCode.UNAVAILABLE"


@dataclass(frozen=True)
class EngineState:
    """What the metrics page, the process list and the log say of the engine.

    Attributes:
        failures: by kind. num_lines: of the log, so far.
    """

    num_restarts: int
    pids: list[int]
    failures: dict[str, int]
    num_quarantined: int
    num_recomputed: int
    num_recoveries: int
    num_lines: int


class Target:
    """A server under test, and the files that order faults."""

    def __init__(self, server: TritonServer, log: list[str]) -> None:
        self.server = server
        self.log = log
        self.repository = server.repository
        self.urls = {"grpc": server.grpc_url, "http": server.http_url}

    def order(self, fault: str, value: int) -> None:
        """Order a fault of `faulty_steps`."""
        order_fault(self.repository, fault, value)

    def settle(self) -> EngineState:
        """The state of the engine once nothing is live any more and no block is used."""
        samples = wait_idle(self.server)
        assert samples["charonia_engine_up"] == 1
        pids = self.server.pids("engine")
        assert len(pids) == 1, "an engine beside the engine"
        name = 'charonia_engine_failures_total{{kind="{}"}}'
        return EngineState(
            num_restarts=int(samples["charonia_engine_restarts_total"]),
            pids=pids,
            failures={kind: int(samples[name.format(kind)]) for kind in KINDS},
            num_quarantined=int(samples["charonia_requests_quarantined_total"]),
            num_recomputed=int(samples["charonia_requests_recomputed_total"]),
            num_recoveries=int(samples["charonia_recovery_seconds_count"]),
            num_lines=len(self.log),
        )

    def events_since(self, before: EngineState, name: str) -> list[dict[str, str]]:
        """The events of this name that were logged since then."""
        return events(self.log[before.num_lines :], name)

    def is_engine_ready(self) -> bool:
        url = f"http://{self.server.http_url}/v2/models/engine/ready"
        return HTTP.get(url).status_code == 200

    def run(self, prompt: list[int], **sampling: object) -> LiveStream:
        """A request that does not end by itself before its last token."""
        return LiveStream(self.server.grpc_url, prompt, ignore_eos=True, **sampling)

    def ask(self) -> LiveStream:
        """A short request, the same each time."""
        return LiveStream(self.server.grpc_url, [7, 8, 9], temperature=0.0)

    def generate(self) -> LiveStream:
        """The short request, over."""
        with paced(self.repository, 0):
            return self.ask().wait_over()


@pytest.fixture(scope="module")
def target(small_checkpoint: Path, faulty_repository: Path) -> Iterator[Target]:
    """A server whose engine fails on order; all tests share it, and each leaves it healthy."""
    log: list[str] = []
    with running_server(
        model=small_checkpoint, settings=SETTINGS, source=faulty_repository, on_log=log.append
    ) as server:
        yield Target(server, log)
    assert leftovers(server.runtime_dir) == []


@pytest.fixture(scope="module")
def undisturbed(target: Target) -> list[list[int]]:
    """The tokens of each stream when nothing happens."""
    found = finish(target.repository, start_streams(target.urls))
    for token_ids in found:
        assert len(token_ids) == NUM_TOKENS
        assert len(set(token_ids)) > 50, "a loop of tokens would hide a wrong recovery"
    return found


def rises(before: EngineState, after: EngineState) -> dict[str, int]:
    """By how much the failures of each kind rose; kinds that did not are left out."""
    risen = {kind: after.failures[kind] - before.failures[kind] for kind in KINDS}
    return {kind: rise for kind, rise in risen.items() if rise}


def check_recovered(
    target: Target,
    streams: list[LiveStream],
    undisturbed: list[list[int]],
    before: EngineState,
    failures: dict[str, int],
) -> None:
    """Assert that all streams survived one death of the engine, which was replaced by one.

    Args:
        failures: that are counted for it; the last kind is the one that is logged.
    """
    assert finish(target.repository, streams) == undisturbed
    assert [stream.timing["restarts"] for stream in streams] == [1] * len(streams)
    after = target.settle()
    assert after.num_restarts == before.num_restarts + 1
    assert after.pids != before.pids
    assert not is_alive(before.pids[0]), "the old engine lives on beside the new one"
    assert rises(before, after) == failures
    num_live = len(streams)
    assert after.num_recomputed == before.num_recomputed + num_live
    assert after.num_recoveries == before.num_recoveries + 1
    assert after.num_quarantined == before.num_quarantined
    (died,) = target.events_since(before, "engine_died")
    assert (died["kind"], died["live"]) == (list(failures)[-1], str(num_live))
    (back,) = target.events_since(before, "engine_back")
    assert back["recomputed"] == str(num_live)
    assert 0 < float(back["seconds"]) < 60


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        pytest.param(signal.SIGKILL, "died", id="kill"),
        pytest.param(signal.SIGSTOP, "hung", id="stop", marks=long),
    ],
)
def test_every_stream_survives_a_dead_or_stopped_engine(
    target: Target, undisturbed: list[list[int]], fault: signal.Signals, kind: str
) -> None:
    before = target.settle()
    streams = start_streams(target.urls)
    os.kill(before.pids[0], fault)
    check_recovered(target, streams, undisturbed, before, {kind: 1})
    pause = max(stream.longest_pause_s for stream in streams)
    print(f"{fault.name}: at most {pause:.1f} s without a token")


@long
def test_every_stream_survives_a_step_that_never_ends(
    target: Target, undisturbed: list[list[int]]
) -> None:
    before = target.settle()
    streams = start_streams(target.urls)
    target.order("hang-in-step", 1)
    check_recovered(target, streams, undisturbed, before, {"hung": 1})
    assert max(stream.longest_pause_s for stream in streams) >= STEP_DEADLINE_S


def test_every_stream_survives_two_steps_in_a_row_that_raise(
    target: Target, undisturbed: list[list[int]]
) -> None:
    before = target.settle()
    streams = start_streams(target.urls)
    target.order("raise-in-step", 2)
    check_recovered(target, streams, undisturbed, before, {"step_failed": 2})


def test_a_step_that_raises_once_costs_no_engine(
    target: Target, undisturbed: list[list[int]]
) -> None:
    before = target.settle()
    streams = start_streams(target.urls)
    target.order("raise-in-step", 1)
    assert finish(target.repository, streams) == undisturbed
    after = target.settle()
    assert (after.num_restarts, after.pids) == (before.num_restarts, before.pids)
    assert rises(before, after) == {"step_failed": 1}
    by_engine, by_scheduler = target.events_since(before, "step_failed")
    assert by_engine == {"reason": "RuntimeError: a test ordered this step to raise"}
    assert by_scheduler == {"reason": "RuntimeError in a step of the engine", "live": "8"}


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        pytest.param(signal.SIGKILL, "died", id="kill"),
        pytest.param(signal.SIGSTOP, "hung", id="stop", marks=long),
    ],
)
def test_an_engine_that_is_lost_while_nothing_runs_is_replaced_before_anybody_asks_for_it(
    target: Target, fault: signal.Signals, kind: str
) -> None:
    right = target.generate()
    before = target.settle()
    os.kill(before.pids[0], fault)
    assert wait_for(lambda: target.events_since(before, "engine_back"), bool)
    after = target.settle()
    assert after.num_restarts == before.num_restarts + 1
    assert rises(before, after) == {kind: 1}
    assert (after.num_recomputed, after.num_recoveries) == (
        before.num_recomputed,
        before.num_recoveries + 1,
    )
    assert not is_alive(before.pids[0])
    stream = target.generate()
    check_complete(stream, right.token_ids)
    assert stream.timing["restarts"] == 0


def test_a_client_that_goes_away_leaves_a_line_and_no_blocks(target: Target) -> None:
    before = target.settle()
    stream = LiveStream(
        target.server.grpc_url, [4, 5, 6], request_id='a "name"', max_tokens=3000, ignore_eos=True
    )
    stream.wait_tokens(3)
    stream.leave()
    stream.wait_over()
    after = target.settle()
    (cancelled,) = wait_for(lambda: target.events_since(before, "request_cancelled"), bool)
    assert cancelled["request_id"] == 'a "name"'
    assert int(cancelled["tokens"]) >= 3
    assert rises(before, after) == {}


def test_a_request_that_finds_a_dead_engine_waits_for_the_next_one(target: Target) -> None:
    right = target.generate()
    before = target.settle()
    with held_loads(target.repository):
        os.kill(before.pids[0], signal.SIGKILL)
        early = target.ask()  # the scheduler may not have noticed yet
        assert wait_for(lambda: target.events_since(before, "engine_died"), bool)
        late = target.ask()
        waiting = "charonia_requests_waiting"
        assert wait_for(lambda: scrape(target.server)[waiting], lambda num: num == 2) == 2
    for stream in (early, late):
        check_complete(stream, right.token_ids)
    assert early.timing["restarts"] in (0, 1)
    assert late.timing["restarts"] == 0
    assert target.settle().num_restarts == before.num_restarts + 1


@long
def test_while_an_engine_is_loaded_time_runs_and_requests_are_cancelled(target: Target) -> None:
    before = target.settle()
    with held_loads(target.repository):
        waiting = target.run([1, 2, 3], max_tokens=50)
        late = target.run([4, 5, 6], max_tokens=4000, deadline_ms=2000)
        leaving = target.run([7, 8, 9], max_tokens=4000)
        for stream in (waiting, late, leaving):
            stream.wait_tokens(3)
        os.kill(before.pids[0], signal.SIGKILL)
        assert wait_for(lambda: target.events_since(before, "engine_died"), bool)
        leaving.leave()
        queued = error_of(lambda: infer_grpc(target.server, {"input_ids": [5]}, timeout=300_000))
        assert queued.message().startswith("Request timeout expired")
        assert "deadline_ms has passed" in (late.wait_over().error or "")
        assert wait_for(lambda: target.events_since(before, "request_cancelled"), bool)
        assert not target.events_since(before, "engine_back"), "the engine was there too soon"
    check_complete(waiting, waiting.token_ids)
    assert target.settle().num_restarts == before.num_restarts + 1


def test_a_request_that_kills_the_engine_each_time_fails_alone(
    target: Target, undisturbed: list[list[int]]
) -> None:
    before = target.settle()
    target.order("poison", POISON)
    streams = start_streams(target.urls)
    poisoned = error_of(lambda: infer_grpc(target.server, {"input_ids": [5, POISON, 7]}))
    assert poisoned.message() == (
        "the request stops the engine each time it runs [charonia:quarantined]"
    )
    assert poisoned.status() == "StatusCode.INTERNAL"
    assert finish(target.repository, streams) == undisturbed
    after = target.settle()
    assert after.num_restarts == before.num_restarts + 3  # twice with the others, once alone
    assert rises(before, after) == {"died": 3}
    assert after.num_quarantined == before.num_quarantined + 1
    assert after.num_recomputed == before.num_recomputed + 9 + 9 + 8
    assert len(target.events_since(before, "request_quarantined")) == 1
    (target.repository / "poison").unlink()


@long
def test_an_engine_that_cannot_be_loaded_fails_requests_with_the_reason_until_it_can(
    target: Target, undisturbed: list[list[int]]
) -> None:
    before = target.settle()
    model_json = target.repository / "engine" / "1" / "model.json"
    right = model_json.read_text(encoding="utf-8")
    streams = start_streams(target.urls)
    model_json.write_text(right.replace("max_num_seqs", "max_sequences"), encoding="utf-8")
    try:
        os.kill(before.pids[0], signal.SIGKILL)
        reason = "the engine is down and cannot be loaded: unknown engine argument 'max_sequences'"
        check_failed(target.server, streams, reason)
        # Each try to load it is a moment in which Triton has it.
        assert not wait_for(target.is_engine_ready, lambda is_ready: not is_ready)
        is_up = wait_for(lambda: scrape(target.server)["charonia_engine_up"], lambda up: not up)
        assert is_up == 0
    finally:
        model_json.write_text(right, encoding="utf-8")
    assert wait_for(lambda: scrape(target.server)["charonia_engine_up"], bool) == 1
    assert finish(target.repository, start_streams(target.urls)) == undisturbed
    after = target.settle()
    assert after.num_restarts == before.num_restarts + 1
    tries = target.events_since(before, "engine_load_failed")
    assert rises(before, after) == {"died": 1, "load_failed": len(tries)}
    # An engine that is killed while it is loaded costs nobody anything, so the first is no failure.
    assert [one["failed_requests"] for one in tries[:2]] == ["0", "8"]
    assert all("unknown engine argument 'max_sequences'" in one["reason"] for one in tries)
    assert after.num_recomputed == before.num_recomputed
    assert after.num_recoveries == before.num_recoveries + 1


class WithoutModelControl(TritonServer):
    """A tritonserver as an operator may start it, in its default mode."""

    def _command(self) -> list[str]:
        options = [option for option in super()._command() if option != "--load-model=*"]
        options.remove("--model-control-mode=explicit")
        return options


@long
def test_without_explicit_model_control_recovery_is_off_and_says_so(
    small_checkpoint: Path, faulty_repository: Path
) -> None:
    log: list[str] = []
    runtime = RuntimeDir()
    options = RepositoryOptions(source=faulty_repository, model=small_checkpoint, settings=SETTINGS)
    prepared = prepare_repository(runtime.path / REPOSITORY, options)
    server = WithoutModelControl(prepared.path, runtime=runtime, on_log=log.append)
    with server, contextlib.closing(Probe(server.http_url, "scheduler")) as probe:
        wait_serving(server, probe, 120)
        reason = "recovery is off: tritonserver was not started with --model-control-mode=explicit"
        assert events(log, "recovery_off") == [{"reason": reason}]
        urls = {"grpc": server.grpc_url, "http": server.http_url}
        streams = start_streams(urls)
        (pid,) = server.pids("engine")
        os.kill(pid, signal.SIGKILL)
        check_failed(server, streams, reason)
    assert leftovers(server.runtime_dir) == []


# ---------------------------------------------------------------------- charonia serve


class Served:
    """`charonia serve`, its addresses and its model repository."""

    def __init__(self, small_checkpoint: Path, source: Path) -> None:
        settings = [part for setting in SETTINGS for part in ("--set", setting)]
        options = ("--model", small_checkpoint, "--model-repository", source)
        self.command = Serving(*options, *settings, variables=BEHIND_PROXY)
        announcement = self.command.wait_announced()
        (grpc_url,) = re.findall(r"gRPC +(\S+)", announcement)
        (http_url,) = re.findall(r"HTTP +http://(\S+)", announcement)
        self.urls = {"grpc": grpc_url, "http": http_url}
        self.repository = self.command.runtime_dir / REPOSITORY

    def model_pid(self, model: str) -> int:
        children = self.command.server().children()
        (process,) = find_by_argument(children, f"/{model}/1/model.py")
        return int(process.pid)

    def is_answering(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            reply = httpx.post(
                f"http://{self.urls['http']}/v2/models/generate/generate",
                json={"text_input": "a", "max_tokens": 1},
                timeout=10,
            )
            return reply.status_code == 200
        return False


@pytest.fixture
def served(small_checkpoint: Path, faulty_repository: Path) -> Iterator[Served]:
    served = Served(small_checkpoint, faulty_repository)
    with served.command.process:
        yield served
        served.command.process.kill()


@long
def test_serve_leaves_a_recovering_engine_alone_and_restarts_a_dead_scheduler(
    served: Served,
) -> None:
    tritonserver = served.command.server().pid
    engine, scheduler = map(served.model_pid, ("engine", "scheduler"))
    streams = start_streams(served.urls)
    os.kill(engine, signal.SIGKILL)
    finish(served.repository, streams)
    assert [stream.timing["restarts"] for stream in streams] == [1] * len(streams)
    assert served.command.server().pid == tritonserver

    streams = start_streams(served.urls)
    killed = time.monotonic()
    os.kill(scheduler, signal.SIGKILL)
    for stream in streams:
        assert stream.wait_over(SERVES_AGAIN_S).error is not None
        assert stream.finish_reason is None
    assert wait_for(served.is_answering, bool, SERVES_AGAIN_S)
    seconds = time.monotonic() - killed
    print(f"answered again {seconds:.1f} s after the scheduler's death")
    assert seconds < SERVES_AGAIN_S
    assert served.command.server().pid != tritonserver
    assert not is_alive(tritonserver)


@long
def test_serve_ends_in_time_in_mid_stream(served: Served) -> None:
    streams = start_streams(served.urls)
    runtime_dir = served.command.runtime_dir
    seconds, stderr = served.command.end(signal.SIGINT)
    print(f"ended after {seconds:.1f} s")
    assert seconds < 10
    assert served.command.process.returncode == 0
    assert leftovers(runtime_dir) == []
    assert "Traceback" not in stderr
    for stream in streams:
        # An answer that is complete within the grace that tritonserver gives is no error.
        is_complete = stream.wait_over().finish_reason == "length"
        assert is_complete == (stream.error is None)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that waits to be reaped does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
