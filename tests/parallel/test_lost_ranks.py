"""No rank is waited for in vain: whoever ends, stands still or errs, the others are told."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from charonia.data.model.paged import PagedModel
from charonia.errors import RankLostError
from parity.reference import random_prompt
from support.ranked_engine import (
    WAIT_S,
    RankedEngine,
    is_alive,
    rank_args,
    ranked_engine,
    wait_until,
)

Checkpoint = Callable[..., Path]
KERNELS = ["auto", "torch"]
PROMPT = random_prompt(20)
WHERE_IT_STANDS_S = 0.5
"""After so long a step waits for a rank that does not answer, most likely."""

STAND_STILL = {"rank_timeout_s": 2}

pytestmark = pytest.mark.parametrize("cpu_kernels", KERNELS)


def test_a_rank_that_is_killed_between_steps_is_noticed(
    checkpoint: Checkpoint, cpu_kernels: str
) -> None:
    with ranked_engine(rank_args(checkpoint(), cpu_kernels=cpu_kernels)) as engine:
        engine.step(PROMPT)
        assert engine.lost.empty()
        os.kill(engine.pids[1], signal.SIGKILL)
        assert "rank 1" in engine.lost.get(timeout=WAIT_S)
        with pytest.raises(RankLostError, match="rank 1"):
            engine.step(PROMPT)
        assert engine.lost.empty()


def test_a_rank_that_is_killed_in_mid_step_ends_the_step(
    checkpoint: Checkpoint, cpu_kernels: str
) -> None:
    # Nothing is found out by silence here.
    args = rank_args(checkpoint(), cpu_kernels=cpu_kernels, rank_timeout_s=WAIT_S)
    with ranked_engine(args) as engine:
        engine.step(PROMPT)
        os.kill(engine.pids[1], signal.SIGSTOP)
        step = Step(engine)
        time.sleep(WHERE_IT_STANDS_S)
        assert step.is_waiting
        os.kill(engine.pids[1], signal.SIGKILL)
        assert isinstance(step.error(), RankLostError)
        assert engine.lost.get(timeout=WAIT_S)


def test_a_rank_that_stands_still_is_noticed_between_steps(
    checkpoint: Checkpoint, cpu_kernels: str
) -> None:
    args = rank_args(checkpoint(), cpu_kernels=cpu_kernels, **STAND_STILL)
    with ranked_engine(args) as engine:
        os.kill(engine.pids[1], signal.SIGSTOP)
        assert "rank 1: nothing was heard of it" in engine.lost.get(timeout=WAIT_S)
        with pytest.raises(RankLostError, match="nothing was heard"):
            engine.step(PROMPT)
    wait_until(lambda: not is_alive(engine.pids[1]), "the rank that stood still has ended")


def test_a_rank_that_stands_still_ends_the_step_that_waits_for_it(
    checkpoint: Checkpoint, cpu_kernels: str
) -> None:
    args = rank_args(checkpoint(), cpu_kernels=cpu_kernels, **STAND_STILL)
    with ranked_engine(args) as engine:
        engine.step(PROMPT)
        os.kill(engine.pids[1], signal.SIGSTOP)
        step = Step(engine)
        assert "rank 1: nothing was heard of it" in engine.lost.get(timeout=WAIT_S)
        assert isinstance(step.error(), RankLostError)


def test_any_rank_of_a_pipeline_is_missed(checkpoint: Checkpoint, cpu_kernels: str) -> None:
    args = rank_args(checkpoint(), cpu_kernels=cpu_kernels, pipeline_parallel_size=2)
    with ranked_engine(args) as engine:
        engine.step(PROMPT)
        os.kill(engine.pids[3], signal.SIGKILL)
        assert "rank 3" in engine.lost.get(timeout=WAIT_S)
        with pytest.raises(RankLostError, match="rank 3"):
            engine.step(PROMPT)
    for pid in engine.pids[1:]:
        wait_until(lambda pid=pid: not is_alive(pid), "all ranks have ended")  # type: ignore[misc]


def test_an_engine_is_unloaded_also_while_a_step_waits_for_a_rank_that_stands_still(
    checkpoint: Checkpoint, cpu_kernels: str
) -> None:
    args = rank_args(
        checkpoint(),
        cpu_kernels=cpu_kernels,
        tensor_parallel_size=1,
        pipeline_parallel_size=2,
        rank_timeout_s=WAIT_S,  # nothing is found out by silence here
    )
    engine = RankedEngine(args)
    engine.step(PROMPT)
    os.kill(engine.pids[1], signal.SIGSTOP)
    step = Step(engine)
    time.sleep(WHERE_IT_STANDS_S)
    assert step.is_waiting
    with ThreadPoolExecutor(1) as threads:
        threads.submit(engine.runner.close).result(WAIT_S)
    assert isinstance(step.error(), RankLostError)
    assert engine.lost.empty()


def test_an_error_of_rank_0_alone_is_the_end_of_all_and_no_hang(
    checkpoint: Checkpoint, cpu_kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank is in the middle of the same pass, and would wait for this one for ever."""

    def forward(*args: object) -> None:
        raise MemoryError("none left")

    with ranked_engine(rank_args(checkpoint(), cpu_kernels=cpu_kernels)) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(PagedModel, "forward", forward)  # of this process, which is rank 0
            with pytest.raises(RankLostError, match="MemoryError: none left"):
                engine.step(PROMPT)
        assert "rank 0: MemoryError: none left" in engine.lost.get(timeout=WAIT_S)
        engine.start_over()
        with pytest.raises(RankLostError, match="MemoryError"):
            engine.step(PROMPT)
    wait_until(lambda: not is_alive(engine.pids[1]), "the other rank has ended")


@pytest.mark.parametrize("state", ["idle", "busy"])
def test_all_ranks_end_when_the_engines_process_is_killed(
    checkpoint: Checkpoint, cpu_kernels: str, state: str
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", ENGINE, str(checkpoint()), cpu_kernels, state],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    with process.stdout:
        pids = [int(text) for text in process.stdout.readline().split()]
        assert len(pids) == 2
        assert process.stdout.readline() == "a step is done\n"
        process.kill()
        process.wait()
        for pid in pids:
            wait_until(lambda pid=pid: not is_alive(pid), "all ranks have ended")  # type: ignore[misc]


ENGINE = """
import sys, time
from support.ranked_engine import RankedEngine, rank_args
model, cpu_kernels, state = sys.argv[1:]
engine = RankedEngine(rank_args(model, cpu_kernels=cpu_kernels))
print(*engine.pids, flush=True)
engine.step([5] * 20)
print("a step is done", flush=True)
while True:
    engine.step([5] * 20) if state == "busy" else time.sleep(1)
"""


class Step:
    """A step in a thread of its own."""

    def __init__(self, engine: RankedEngine) -> None:
        self._engine = engine
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def is_waiting(self) -> bool:
        return self._thread.is_alive()

    def error(self) -> BaseException | None:
        """Wait for what it raised."""
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "the step does not end"
        return self._error

    def _run(self) -> None:
        try:
            self._engine.step(PROMPT)
        except BaseException as error:
            self._error = error
