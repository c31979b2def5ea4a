"""The engine in this process: a lost runner is let go of before the next one is loaded."""

import weakref
from collections.abc import Callable
from functools import partial

import pytest

from charonia.config import EngineArgs, SchedulerArgs
from charonia.core.engine_core import EngineCore
from charonia.core.generation_request import GenerationRequest
from charonia.core.inline import InlineExecutor
from charonia.core.output.outputs import OutputStream
from charonia.core.request_events import RequestEvents
from charonia.errors import EngineDiedError
from charonia.protocol import EngineInfo, SamplingParams, StepPlan, StepResult
from core.bench import byte_tokenizer, expected
from support.echo import EchoExecutor


class EchoRunner:
    """An echo engine as a runner; the first one is lost in its fifth step."""

    def __init__(self, *, is_doomed: bool, num_stages: int) -> None:
        self._echo = EchoExecutor(num_stages=num_stages)
        self._num_left = 5 if is_doomed else 10**6

    def info(self) -> EngineInfo:
        return self._echo.info()

    def begin(self, plan: StepPlan) -> Callable[[], StepResult]:
        step = self._echo.submit(plan)

        def end() -> StepResult:
            self._num_left -= 1
            if self._num_left < 0:
                try:
                    raise OSError(f"a rank of {self} is lost")
                except OSError as error:
                    raise EngineDiedError(str(error)) from error
            return step.result(None)

        return end

    def close(self) -> None:
        pass


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_lost_runner_is_gone_when_the_next_one_is_loaded(num_stages: int) -> None:
    runners: list[weakref.ref[EchoRunner]] = []
    num_loads = 0

    def load() -> EchoRunner:
        nonlocal num_loads
        num_loads += 1
        assert [runner() for runner in runners] == [None] * len(runners)
        if num_loads in (2, 3):
            raise EngineDiedError("no memory, for once")
        runner = EchoRunner(is_doomed=not runners, num_stages=num_stages)
        runners.append(weakref.ref(runner))
        return runner

    now = 0.0
    tokens: dict[str, list[int]] = {"a": [], "b": []}
    errors = []

    class Client(RequestEvents):
        def on_chunk(self, chunk) -> None:
            tokens[chunk.key] += chunk.token_ids
            errors.append(chunk.error)

    core = EngineCore(
        InlineExecutor(load),
        EngineArgs(model="echo"),
        SchedulerArgs(),
        partial(OutputStream, tokenizer=byte_tokenizer()),
        clock=lambda: now,
        log=lambda line: None,
    )
    core.step()
    assert core.is_up

    def run(key: str) -> None:
        nonlocal now
        params = SamplingParams(max_tokens=20, seed=5)
        core.add(GenerationRequest(key=key, prompt_ids=[ord(key)] * 10, params=params), Client())
        while core.has_requests:
            now += 60
            core.step()

    run("a")
    assert "no memory, for once" in str(errors[-1])
    now += 60
    core.step()
    assert core.is_up
    run("b")
    assert tokens["b"] == expected("b")
    assert num_loads == 4
