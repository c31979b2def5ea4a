"""The engine takes plans from the scheduler alone, and gives nothing away."""

import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from charonia.config import EngineArgs
from charonia.errors import CheckpointError, ConfigError, PlanRefusedError, UnavailableError
from charonia.protocol import (
    EngineInfo,
    Hello,
    StepFailure,
    StepPlan,
    StepResult,
    encode,
)
from charonia.serving.hosts import engine as engine_host
from charonia.serving.hosts.engine import NOT_ENDED, EngineHost
from charonia.serving.messages.executor import STEPS_SOCKET
from charonia.sockets.local import connect
from charonia.supervision.models.repairs import LOAD_MARK
from charonia.supervision.process_table import start_time
from support.sockets import INFO, StepsClient
from support.waiting import WAIT_S


class Runner:
    """Executes any plan with the epoch that the test says, or raises."""

    def __init__(self, args: EngineArgs) -> None:
        self.num_plans = 0

    def info(self) -> EngineInfo:
        return INFO

    def begin(self, plan: StepPlan) -> Callable[[], StepResult]:
        self.num_plans += 1
        if plan.epoch == 13:
            raise PlanRefusedError("epoch is 13, expected 1")
        if plan.epoch == 14:
            raise RuntimeError("out of memory in /usr/lib/secret/path.py")
        result = StepResult(epoch=plan.epoch, step_id=plan.step_id, rows=[], seconds=0.1)
        return lambda: result

    def close(self) -> None:
        pass


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def make_host(tmp_path: Path, log: list[str]) -> Callable[..., EngineHost]:
    def make(
        kind: str = "MODEL", make_runner: Callable[[EngineArgs], Any] = Runner, **values: Any
    ) -> EngineHost:
        (tmp_path / "model.json").write_text(json.dumps({"model": "m"} | values), encoding="utf-8")
        return EngineHost(make_runner, tmp_path, kind, log=log.append)

    return make


@pytest.fixture
def ask(tmp_path: Path, make_host: Callable[..., EngineHost]) -> Iterator[Callable[..., Any]]:
    """Sends a message of the scheduler through the socket of a host, and returns the reply."""
    host = make_host()
    host.serve_steps()
    client = StepsClient(tmp_path)
    yield client.ask
    client.close()
    host.finalize()


def test_the_scheduler_gets_answers(ask: Callable[..., Any]) -> None:
    assert ask(Hello()) == INFO
    for step_id in range(2):
        result = ask(StepPlan(epoch=1, step_id=step_id))
        assert isinstance(result, StepResult)
        assert (result.epoch, result.step_id) == (1, step_id)


def test_a_directory_that_takes_no_socket_is_named(
    tmp_path: Path, make_host: Callable[..., EngineHost]
) -> None:
    host = make_host()
    (tmp_path / STEPS_SOCKET).mkdir()
    with pytest.raises(ConfigError, match=r"must take a socket, steps\.socket: "):
        host.serve_steps()


NESTED = b"\x82\xa4type\xa5Hello\xa1z" + b"\x91" * 5000 + b"\xc0"


@pytest.mark.parametrize("data", [b"", b"\xc1", b"{}", NESTED, encode(StepFailure("x"))])
def test_what_cannot_be_read_ends_its_connection_and_leaves_one_short_line(
    tmp_path: Path, make_host: Callable[..., EngineHost], log: list[str], data: bytes
) -> None:
    host = make_host()
    host.serve_steps()
    broken = connect(tmp_path / STEPS_SOCKET)
    broken.send(data)
    assert broken.receive(WAIT_S) is None
    broken.close()
    (line,) = log
    assert line.startswith("error: a message could not be read: ")
    assert len(line) < 80
    client = StepsClient(tmp_path)
    assert client.ask(Hello()) == INFO
    client.close()
    host.finalize()


def test_a_step_does_not_ask_the_runner_what_it_is(
    tmp_path: Path, make_host: Callable[..., EngineHost]
) -> None:
    class Asked(Runner):
        num_asked = 0

        def info(self) -> EngineInfo:
            self.num_asked += 1
            return super().info()

    runner = Asked(EngineArgs(model="m"))
    host = make_host(make_runner=lambda _: runner)
    host.serve_steps()
    client = StepsClient(tmp_path)
    client.ask(StepPlan(epoch=1, step_id=0, reset=True))
    num_asked = runner.num_asked
    client.ask(StepPlan(epoch=1, step_id=1))
    client.close()
    host.finalize()
    assert runner.num_asked == num_asked


class Pipeline(Runner):
    """Has two steps in flight; those of epoch 1 end when the test says."""

    def __init__(self, args: EngineArgs) -> None:
        super().__init__(args)
        self.begun = threading.Semaphore(0)
        self.may_end = threading.Event()
        self.done: list[str] = []

    def info(self) -> EngineInfo:
        return msgspec.structs.replace(INFO, num_stages=2)

    def begin(self, plan: StepPlan) -> Callable[[], StepResult]:
        end = super().begin(plan)
        self.done.append(f"begin {plan.epoch}")
        self.begun.release()

        def wait_and_end() -> StepResult:
            assert plan.epoch > 1 or self.may_end.wait(WAIT_S)
            self.done.append(f"end {plan.epoch}")
            return end()

        return wait_and_end


@pytest.fixture
def pipeline(
    tmp_path: Path, make_host: Callable[..., EngineHost]
) -> Iterator[tuple[Pipeline, StepsClient]]:
    """A runner with a step under way whose connection has ended, and another connection."""
    runner = Pipeline(EngineArgs(model="m"))
    host = make_host(make_runner=lambda _: runner)
    host.serve_steps()
    first = StepsClient(tmp_path)
    first.send(StepPlan(epoch=1, step_id=0, reset=True))
    assert runner.begun.acquire(timeout=WAIT_S)
    first.close()
    second = StepsClient(tmp_path)
    yield runner, second
    runner.may_end.set()
    second.close()
    host.finalize()


def test_a_new_epoch_begins_when_the_steps_that_were_given_up_have_ended(
    pipeline: tuple[Pipeline, StepsClient],
) -> None:
    runner, client = pipeline
    client.send(StepPlan(epoch=2, step_id=0, reset=True))
    assert not runner.begun.acquire(timeout=0.2)
    runner.may_end.set()
    assert isinstance(client.receive(), StepResult)
    assert runner.done == ["begin 1", "end 1", "begin 2", "end 2"]


def test_a_hello_does_not_wait_for_a_step(pipeline: tuple[Pipeline, StepsClient]) -> None:
    _, client = pipeline
    client.send(StepPlan(epoch=2, step_id=0, reset=True))  # waits for the step of the other one
    assert client.ask_beside(Hello()) == msgspec.structs.replace(INFO, num_stages=2)


def test_steps_that_do_not_end_fail_the_plan_that_waits_for_them(
    pipeline: tuple[Pipeline, StepsClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, client = pipeline
    monkeypatch.setattr(engine_host, "_ENDING_TIMEOUT_S", 0.05)
    plan = StepPlan(epoch=2, step_id=0, reset=True)
    assert client.ask(plan) == StepFailure(NOT_ENDED)
    runner.may_end.set()
    monkeypatch.setattr(engine_host, "_ENDING_TIMEOUT_S", 20)
    assert isinstance(client.ask(plan), StepResult)


def test_a_plan_out_of_range_is_refused_in_the_runners_words(
    ask: Callable[..., Any], log: list[str]
) -> None:
    refusal = StepFailure("the plan was refused: epoch is 13, expected 1")
    assert ask(StepPlan(epoch=13, step_id=0)) == refusal
    assert len(log) == 1
    assert ask(Hello()) == INFO


def test_a_step_that_raises_tells_the_scheduler_no_paths(
    ask: Callable[..., Any], log: list[str]
) -> None:
    failure = ask(StepPlan(epoch=14, step_id=0))
    assert failure == StepFailure("RuntimeError in a step of the engine")
    assert "out of memory in /usr/lib/secret/path.py" in log[-1]


@pytest.mark.parametrize("name", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_one_instance_per_gpu_is_refused_with_several_ranks(
    make_host: Callable[..., EngineHost], name: str
) -> None:
    with pytest.raises(ConfigError, match=f"{name} is 2, .* please specify KIND_MODEL"):
        make_host(kind="GPU", **{name: 2})
    make_host(kind="GPU", **{name: 1})


@pytest.mark.parametrize("content", [b'{"model": "\xff"}', b'{"model":' + b"[" * 10**5, b""])
def test_a_model_file_that_cannot_be_read_is_named_as_such(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.json"):
        EngineHost(Runner, tmp_path, "MODEL", log=print)


def test_an_unknown_key_is_named(make_host: Callable[..., EngineHost]) -> None:
    with pytest.raises(ConfigError, match="'max_modle_len'"):
        make_host(max_modle_len=5)


def test_a_load_that_fails_says_so_to_whoever_loads(make_host: Callable[..., EngineHost]) -> None:
    def make_runner(args: EngineArgs) -> Runner:
        raise CheckpointError("no weights")

    with pytest.raises(CheckpointError):
        make_host(make_runner=make_runner)


@pytest.mark.parametrize(
    ("error", "raised", "reason"),
    [
        (CheckpointError("no weights"), CheckpointError, "no weights"),
        (RuntimeError("nobody at 10.1.2.3:29500"), UnavailableError, "RuntimeError"),
    ],
)
def test_a_reload_that_fails_tells_clients_its_reason_or_kind_and_the_log_all(
    tmp_path: Path,
    make_host: Callable[..., EngineHost],
    log: list[str],
    error: Exception,
    raised: type[Exception],
    reason: str,
) -> None:
    def make_runner(args: EngineArgs) -> Runner:
        raise error

    own_pid = os.getpid()
    (tmp_path / LOAD_MARK).write_text(f"{own_pid} {start_time(own_pid)}", encoding="ascii")
    with pytest.raises(raised, match=f"^{reason}$"):
        make_host(make_runner=make_runner)
    assert log[0] == f'load_failed level=error reason="{type(error).__name__}: {error}"'
