"""An engine of several ranks on the real server: what befalls one of them befalls no stream."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from charonia.launch.commands.cli import main
from charonia.launch.server.run import running_server
from charonia.launch.server.tritonserver import TritonServer
from support.e2e import scrape, wait_for, wait_idle
from support.events import events
from support.leftovers import leftovers
from support.long import long
from support.many_streams import PROMPTS, finish, start_streams

NUM_RANKS = 2
WORKER = "charonia.parallel.worker"
SETTINGS = (
    "dtype=float32",
    "max_num_seqs=16",
    "max_num_batched_tokens=256",
    "num_gpu_blocks_override=900",
    "cpu_threads=1",
    f"tensor_parallel_size={NUM_RANKS}",
    "rank_timeout_s=30",
    "scheduler.min_step_deadline_s=120",  # or the scheduler would be the first to miss a rank
)


class Target:
    """A server under test, and its undisturbed answers."""

    def __init__(self, server: TritonServer, log: list[str]) -> None:
        self.server = server
        self.log = log
        self.urls = {"grpc": server.grpc_url, "http": server.http_url}
        self.undisturbed = self.run()

    def run(self, disturb: Callable[[], object] = lambda: None) -> list[list[int]]:
        """The tokens of eight streams, during which something happens."""
        streams = start_streams(self.urls)
        disturb()
        found = finish(self.server.repository, streams)
        wait_idle(self.server)
        return found

    @property
    def others(self) -> list[psutil.Process]:
        """The ranks beside the engine's own process."""
        (engine,) = self.server.pids("engine")
        children = psutil.Process(engine).children(recursive=True)
        return [child for child in children if WORKER in child.cmdline()]

    def pid(self, who: str) -> int:
        """Of the rank beside the first, or of the engine's own process."""
        (another,) = self.others
        (first,) = self.server.pids("engine")
        return {"another": another.pid, "first": first}[who]

    def reload(self, *settings: str) -> None:
        """`charonia reload` with these settings."""
        arguments = [word for setting in settings for word in ("--set", setting)]
        assert main(["reload", "--url", self.server.grpc_url, *arguments]) == 0


@pytest.fixture(scope="module")
def target(small_checkpoint: Path, faulty_repository: Path) -> Iterator[Target]:
    """An engine that takes its time, so that all streams run when something happens."""
    log: list[str] = []
    with running_server(
        model=small_checkpoint, settings=SETTINGS, source=faulty_repository, on_log=log.append
    ) as server:
        yield Target(server, log)
    assert leftovers(server.runtime_dir) == []


@long
def test_ranks_exchange_and_say_how_much(target: Target) -> None:
    metrics = wait_for(
        lambda: scrape(target.server),
        lambda found: found.get('charonia_collective_calls_total{operation="all_reduce"}', 0) > 0,
    )
    for what in ("calls", "bytes", "seconds"):
        for operation in ("all_reduce", "broadcast"):
            name = f'charonia_collective_{what}_total{{operation="{operation}"}}'
            assert metrics[name] > 0, sorted(metrics)


@pytest.mark.parametrize(
    ("who", "number"),
    [
        ("another", signal.SIGKILL),
        pytest.param("another", signal.SIGSTOP, marks=long),
        pytest.param("first", signal.SIGKILL, marks=long),
    ],
)
def test_streams_outlive_a_rank(target: Target, who: str, number: signal.Signals) -> None:
    before = scrape(target.server)
    num_lines = len(events(target.log, "rank_lost"))
    lost = target.others
    pid = target.pid(who)
    assert target.run(lambda: os.kill(pid, number)) == target.undisturbed
    after = scrape(target.server)
    for name, count in (("engine_restarts", 1), ("requests_recomputed", len(PROMPTS))):
        assert after[f"charonia_{name}_total"] - before[f"charonia_{name}_total"] == count
    assert len(target.others) == NUM_RANKS - 1
    _, alive = psutil.wait_procs(lost, timeout=60)
    assert not alive, "a rank of the lost engine lives on"
    assert len(events(target.log, "rank_lost")) - num_lines == (who == "another")


@long
@pytest.mark.parametrize(
    "settings",
    [
        ("tensor_parallel_size=1",),
        ("tensor_parallel_size=2", "pipeline_parallel_size=2"),
        ("pipeline_parallel_size=1",),
    ],
)
def test_streams_go_on_with_another_number_of_ranks(
    target: Target, settings: tuple[str, ...]
) -> None:
    assert target.run(lambda: target.reload(*settings)) == target.undisturbed
    assert target.run() == target.undisturbed
