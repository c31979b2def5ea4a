"""No rank is waited for in vain: whoever ends, stands still or errs, the others are told."""

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import msgspec
import pytest

from charonia.config import EngineArgs
from charonia.data.model.paged import PagedModel
from charonia.errors import RankLostError
from charonia.parallel import peer, worker_group
from charonia.parallel.messages import Refusal
from charonia.parallel.worker_group import WorkerGroup
from parity.reference import random_prompt
from support.long import long
from support.ranked_engine import RankedEngine, is_alive, rank_args, ranked_engine
from support.stopping import stop_process
from support.waiting import WAIT_S, Clock, eventually

Checkpoint = Callable[..., Path]
KERNELS = ["auto", "torch"]
PROMPT = random_prompt(20)
WHERE_IT_STANDS_S = 0.5
"""After so long a step waits for a rank that does not answer, most likely."""

both_kernels = pytest.mark.parametrize("cpu_kernels", KERNELS)
torch_at_length = pytest.mark.parametrize(
    "cpu_kernels", ["auto", pytest.param("torch", marks=long)]
)
"""What they do is alike; some tests show for both that it is done."""


@pytest.fixture
def quick_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that stands still is waited for in vain when its engine ends."""
    monkeypatch.setattr(worker_group, "_END_TIMEOUT_S", 0.1)
    monkeypatch.setattr(worker_group, "_LAST_WORDS_S", 0.1)


def stand_still(engine: RankedEngine) -> None:
    """Stop the other rank."""
    stop_process(engine.pids[1])


def notice_silence(engine: RankedEngine) -> None:
    """Have the time that a rank may say nothing be over soon. The one that it has otherwise is for
    ranks that load, or compute, on a machine that may be slow.
    """
    rank = group_of(engine)._ranks[1]
    assert rank._timeout == WAIT_S
    rank._timeout = 0.1


def group_of(engine: RankedEngine) -> WorkerGroup:
    found = engine.runner._group
    assert isinstance(found, WorkerGroup)
    return found


@torch_at_length
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


@torch_at_length
def test_a_rank_that_is_killed_in_mid_step_ends_the_step(
    checkpoint: Checkpoint, cpu_kernels: str
) -> None:
    with ranked_engine(rank_args(checkpoint(), cpu_kernels=cpu_kernels)) as engine:
        engine.step(PROMPT)
        stand_still(engine)
        step = Step(engine)
        time.sleep(WHERE_IT_STANDS_S)
        assert step.is_waiting
        os.kill(engine.pids[1], signal.SIGKILL)
        assert isinstance(step.error(), RankLostError)
        assert engine.lost.get(timeout=WAIT_S)


@torch_at_length
@pytest.mark.usefixtures("quick_ends")
def test_a_rank_that_stands_still_is_noticed_between_steps(
    checkpoint: Checkpoint, cpu_kernels: str
) -> None:
    with ranked_engine(rank_args(checkpoint(), cpu_kernels=cpu_kernels)) as engine:
        stand_still(engine)
        notice_silence(engine)
        assert "rank 1: no message or heartbeat came in time" in engine.lost.get(timeout=WAIT_S)
        with pytest.raises(RankLostError, match="no message or heartbeat"):
            engine.step(PROMPT)
    eventually(lambda: not is_alive(engine.pids[1]), "the rank that stood still has ended")


@torch_at_length
@pytest.mark.usefixtures("quick_ends")
def test_a_rank_that_stands_still_ends_the_step_that_waits_for_it(
    checkpoint: Checkpoint, cpu_kernels: str
) -> None:
    with ranked_engine(rank_args(checkpoint(), cpu_kernels=cpu_kernels)) as engine:
        engine.step(PROMPT)
        stand_still(engine)
        step = Step(engine)
        time.sleep(WHERE_IT_STANDS_S)
        assert step.is_waiting
        notice_silence(engine)
        assert "rank 1: no message or heartbeat came in time" in engine.lost.get(timeout=WAIT_S)
        assert isinstance(step.error(), RankLostError)


@torch_at_length
@pytest.mark.usefixtures("quick_ends")
def test_a_rank_that_stands_still_ends_the_sending_to_it(
    checkpoint: Checkpoint, cpu_kernels: str
) -> None:
    more_than_waits_in_sockets = Refusal("", "x" * 2**26)
    with (
        ThreadPoolExecutor(1) as threads,
        ranked_engine(rank_args(checkpoint(), cpu_kernels=cpu_kernels)) as engine,
    ):
        engine.step(PROMPT)
        stand_still(engine)
        told = threads.submit(group_of(engine).tell, more_than_waits_in_sockets, [1])
        time.sleep(WHERE_IT_STANDS_S)
        assert not told.done()
        notice_silence(engine)
        with pytest.raises(RankLostError, match="no message or heartbeat"):
            told.result(WAIT_S)


@torch_at_length
def test_any_rank_of_a_pipeline_is_missed(checkpoint: Checkpoint, cpu_kernels: str) -> None:
    args = rank_args(checkpoint(), cpu_kernels=cpu_kernels, pipeline_parallel_size=2)
    with ranked_engine(args) as engine:
        engine.step(PROMPT)
        os.kill(engine.pids[3], signal.SIGKILL)
        assert "rank 3" in engine.lost.get(timeout=WAIT_S)
        with pytest.raises(RankLostError, match="rank 3"):
            engine.step(PROMPT)
    for pid in engine.pids[1:]:
        eventually(lambda pid=pid: not is_alive(pid), "all ranks have ended")  # type: ignore[misc]


@torch_at_length
@pytest.mark.usefixtures("quick_ends")
def test_an_engine_is_unloaded_also_while_a_step_waits_for_a_rank_that_stands_still(
    checkpoint: Checkpoint, cpu_kernels: str
) -> None:
    args = rank_args(
        checkpoint(),
        cpu_kernels=cpu_kernels,
        tensor_parallel_size=1,
        pipeline_parallel_size=2,
    )
    engine = RankedEngine(args)
    engine.step(PROMPT)
    stand_still(engine)
    step = Step(engine)
    time.sleep(WHERE_IT_STANDS_S)
    assert step.is_waiting
    with ThreadPoolExecutor(1) as threads:
        threads.submit(engine.runner.close).result(WAIT_S)
    assert isinstance(step.error(), RankLostError)
    assert engine.lost.empty()


@torch_at_length
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
    eventually(lambda: not is_alive(engine.pids[1]), "the other rank has ended")


@pytest.mark.parametrize("num_further_steps", [pytest.param(0, marks=long), 10**6])
@torch_at_length
def test_all_ranks_end_when_the_engines_process_is_killed(
    checkpoint: Checkpoint, cpu_kernels: str, num_further_steps: int
) -> None:
    with other_engine(rank_args(checkpoint(), cpu_kernels=cpu_kernels)) as engine:
        assert engine.steps(1)
        engine.ask(num_further_steps)
        engine.process.kill()
        engine.process.wait()
        for pid in engine.pids:
            eventually(lambda pid=pid: not is_alive(pid), "all ranks have ended")  # type: ignore[misc]


@long
def test_a_process_that_stood_still_takes_no_other_for_silent_that_did_as_well(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container that is frozen; which of its processes goes on first is chance."""
    clock = Clock()
    for module in (worker_group, peer):
        monkeypatch.setattr(module, "time", clock)
    later_polls: list[int] = []
    is_frozen = threading.Event()

    def new_poll() -> SimpleNamespace:
        poll = select.poll()

        def wait(milliseconds: float) -> list[tuple[int, int]]:
            ready = poll.poll(milliseconds)
            if is_frozen.is_set():
                later_polls.append(len(ready))
            elif not ready:
                clock.now += 3600
                is_frozen.set()
            return ready

        return SimpleNamespace(register=poll.register, poll=wait)

    with ranked_engine(rank_args(checkpoint())) as engine:
        engine.step(PROMPT)
        stand_still(engine)
        monkeypatch.setattr(
            worker_group, "select", SimpleNamespace(poll=new_poll, POLLIN=select.POLLIN)
        )
        eventually(lambda: later_polls, "the watcher has gone on")
        os.kill(engine.pids[1], signal.SIGCONT)
        engine.step(PROMPT)
        assert engine.lost.empty()


@long
@both_kernels
def test_processes_that_stood_still_together_have_lost_nobody(
    checkpoint: Checkpoint, cpu_kernels: str
) -> None:
    args = rank_args(checkpoint(), cpu_kernels=cpu_kernels, rank_timeout_s=10.0)
    with other_engine(args) as engine:
        assert engine.steps(1)
        for pid in engine.pids:
            stop_process(pid)
        time.sleep(11.0)
        for pid in engine.pids:
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.3)
        assert engine.steps(1)


class OtherEngine(NamedTuple):
    """An engine whose first rank is another process than this."""

    process: subprocess.Popen[str]
    pids: list[int]

    def ask(self, num_steps: int) -> None:
        """Have it make steps."""
        assert self.process.stdin is not None
        print(num_steps, file=self.process.stdin, flush=True)

    def steps(self, num_steps: int) -> bool:
        """Have it make steps; return whether it made them."""
        assert self.process.stdout is not None
        self.ask(num_steps)
        return self.process.stdout.readline() == "done\n"


@contextmanager
def other_engine(args: EngineArgs) -> Iterator[OtherEngine]:
    """Start an engine in another process."""
    with subprocess.Popen(
        [sys.executable, "-c", ENGINE, msgspec.json.encode(args).decode()],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            pids = [int(text) for text in process.stdout.readline().split()]
            assert len(pids) == 2
            yield OtherEngine(process, pids)
        finally:
            process.kill()


ENGINE = """
import json, sys
from charonia.config import EngineArgs
from support.ranked_engine import RankedEngine
engine = RankedEngine(EngineArgs.from_dict(json.loads(sys.argv[1])))
print(*engine.pids, flush=True)
for line in sys.stdin:
    for _ in range(int(line)):
        engine.step([5] * 20)
    print("done", flush=True)
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
