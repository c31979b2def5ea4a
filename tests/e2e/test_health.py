"""Whether a server serves: what Triton's readiness and `charonia health` say while things break."""

import contextlib
import json
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from charonia.launch.commands.cli import main
from charonia.launch.server.processes import ReservedPorts
from charonia.launch.server.run import running_server
from charonia.launch.server.tritonserver import TritonServer
from charonia.supervision.server.model_control import ModelControl
from support.e2e import (
    HTTP,
    ONE_THREAD,
    endless_request,
    infer_grpc,
    one_torch_thread,
    request_inputs,
    scrape,
    wait_for,
)
from support.events import events
from support.faults import held_loads, make_faulty_repository
from support.long import long

IMPATIENCE = """

from pathlib import Path
from charonia.supervision.models import probes

def _ask_few_times(self, _ask=probes.EngineProbe.ask, _num_looks=probes._NUM_LOOKS):
    is_deaf = (Path(__file__).parents[2] / f"deaf.{self._pid}").exists()
    probes._NUM_LOOKS = 2 if is_deaf else _num_looks
    _ask(self)

probes.EngineProbe.ask = _ask_few_times
"""
"""Appended to the scheduler model: an engine that is deaf on order is soon given up."""
PARTS = ["server", "scheduler", "engine", "inference", "llm", "generate", "metrics"]


class Target:
    """A server under test, its log, and the command that asks after it."""

    def __init__(
        self, server: TritonServer, log: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.server = server
        self.log = log
        self._capsys = capsys

    def health(self, *arguments: str) -> tuple[int, str, str]:
        """Run `charonia health`; its exit code, stdout and stderr."""
        metrics_url = self.server.metrics_url.removeprefix("http://").removesuffix("/metrics")
        urls = ("--url", self.server.http_url, "--metrics-url", metrics_url)
        code = main(["health", *urls, *arguments])
        return code, *self._capsys.readouterr()

    def engine_ready(self) -> int:
        """The status of the engine's readiness."""
        url = f"http://{self.server.http_url}/v2/models/engine/ready"
        return HTTP.get(url).status_code

    def lose_engine(self) -> int:
        """Kill it; returns how many times it had come back before."""
        (pid,) = self.server.pids("engine")
        num_back = self.num_back()
        os.kill(pid, signal.SIGKILL)
        return num_back

    def num_back(self) -> int:
        """How many times the engine came back."""
        return len(events(self.log, "engine_back"))


@pytest.fixture(scope="module")
def running(
    small_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[TritonServer, list[str]]]:
    """A server whose engine fails on order; each test leaves it healthy."""
    source = make_faulty_repository(tmp_path_factory.mktemp("faulty") / "model_repository")
    with (source / "scheduler" / "1" / "model.py").open("a", encoding="utf-8") as file:
        file.write(IMPATIENCE)
    log: list[str] = []
    with (
        one_torch_thread(),
        running_server(
            model=small_checkpoint, settings=(ONE_THREAD,), source=source, on_log=log.append
        ) as server,
    ):
        yield server, log


@pytest.fixture
def target(running: tuple[TritonServer, list[str]], capsys: pytest.CaptureFixture[str]) -> Target:
    return Target(*running, capsys)


def test_a_healthy_server_has_a_line_for_each_part_and_exit_code_0(target: Target) -> None:
    code, out, err = target.health("--wait", "60")
    lines = [line.split() for line in out.splitlines()]
    assert [line[:2] for line in lines] == [[part, "ok"] for part in PARTS]
    assert "engine_up=1" in lines[-1]
    assert (code, err) == (0, "")


def test_health_is_one_json_object_when_asked_for(target: Target) -> None:
    code, out, _ = target.health("--json", "--wait", "60")
    found = json.loads(out)
    assert (code, found["healthy"]) == (0, True)
    assert [part["name"] for part in found["parts"]] == PARTS
    assert all(part["is_healthy"] for part in found["parts"])


def test_while_the_engine_recovers_triton_never_calls_it_ready(target: Target) -> None:
    """Also with nobody to ask for it, and from the first look of the scheduler on."""
    seen: list[int] = []
    is_over = threading.Event()

    def poll() -> None:
        while not is_over.is_set():
            seen.append(target.engine_ready())

    def num_unready() -> int:
        return sum(status != 200 for status in seen)

    poller = threading.Thread(target=poll, daemon=True)
    with held_loads(target.server.repository):
        num_back = target.lose_engine()
        poller.start()
        assert wait_for(num_unready, lambda num: num >= 3) >= 3
    assert wait_for(lambda: target.num_back() > num_back, bool)
    is_over.set()
    poller.join()
    first = next(index for index, status in enumerate(seen) if status != 200)
    again = next((index for index in range(first, len(seen)) if seen[index] == 200), len(seen))
    assert again - first >= 3, "it was ready while none was loaded"
    assert all(status == 200 for status in seen[again:]), "it was ready before it was back"


def test_health_names_the_engine_while_it_recovers_and_waits_for_it_when_told_to(
    target: Target,
) -> None:
    with held_loads(target.server.repository):
        target.lose_engine()
        assert wait_for(target.engine_ready, lambda status: status != 200) != 200
        code, out, err = target.health()
    assert code == 1
    assert "engine     FAILED  not ready (HTTP 400)" in out
    assert err.startswith("charonia: not healthy: ")
    assert "engine" in err
    code, out, _ = target.health("--wait", "60")
    assert (code, "FAILED" in out) == (0, False)


@long
def test_an_engine_that_no_longer_answers_is_replaced_before_anybody_asks_for_it(
    target: Target,
) -> None:
    (pid,) = target.server.pids("engine")
    num_back, num_lines = target.num_back(), len(target.log)
    deaf = target.server.repository / f"deaf.{pid}"
    deaf.touch()
    assert wait_for(lambda: target.num_back() > num_back, bool)
    deaf.unlink()
    (died,) = events(target.log[num_lines:], "engine_died")
    assert died["kind"] == "hung"
    assert pid not in target.server.pids("engine")
    assert target.health("--wait", "60")[0] == 0


def rejections(samples: Mapping[str, float]) -> list[float]:
    return [count for name, count in samples.items() if name.startswith("charonia_rejections")]


@long
def test_a_busy_scheduler_is_healthy_and_no_client_pays_for_the_question(
    narrow_server: TritonServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server, waiting = narrow_server, "charonia_requests_waiting"
    inputs = request_inputs([5], {"max_tokens": 1})
    with ThreadPoolExecutor(2) as pool:
        with endless_request(server):
            calls = [pool.submit(infer_grpc, server, inputs) for _ in range(2)]
            before = wait_for(lambda: scrape(server), lambda samples: samples[waiting] == 2)
            code, out, _ = Target(server, [], capsys).health()
            after = scrape(server)
        for call in calls:
            call.result()
    assert code == 0
    assert "inference  ok" in out
    assert before[waiting] == after[waiting] == 2
    assert rejections(after) == rejections(before)


def test_a_dead_scheduler_is_seen_although_triton_calls_it_ready(
    small_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        one_torch_thread(),
        running_server(model=small_checkpoint, settings=(ONE_THREAD,)) as server,
    ):
        target = Target(server, [], capsys)
        (pid,) = server.pids("scheduler")
        os.kill(pid, signal.SIGKILL)
        code, out, err = target.health()
        server.kill()  # it would wait for its scheduler for as long as it may
    assert code == 1
    assert "scheduler  ok" in out
    assert "inference  FAILED  the scheduler's process is gone or stopped" in out
    assert err.startswith("charonia: not healthy: inference")


@pytest.mark.parametrize(("model", "door"), [("generate", "generate"), ("postprocessor", "llm")])
def test_a_dead_model_on_a_way_in_is_seen_although_triton_calls_it_ready(
    target: Target, model: str, door: str
) -> None:
    server = target.server
    (process,) = server.stubs()[model]
    process.kill()
    code, out, err = target.health()
    assert code == 1
    assert f"{door:<10} FAILED" in out
    assert err == f"charonia: not healthy: {door}\n"
    ModelControl(server, threading.Event()).reload(model, timeout_s=120)
    assert target.health("--wait", "60")[0] == 0


def test_a_server_that_is_not_there_is_not_healthy(capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.closing(ReservedPorts("127.0.0.1", 1)) as reserved:
        assert main(["health", "--url", f"127.0.0.1:{reserved.ports[0]}"]) == 1
    out, err = capsys.readouterr()
    assert "server     FAILED  cannot be reached" in out
    assert err.startswith("charonia: not healthy: server, scheduler, engine, inference")


@pytest.mark.parametrize("model", ["scheduler", "tokenizer", "engine", "postprocessor", "generate"])
def test_a_process_says_what_its_threads_are_doing_when_it_is_asked(
    server: TritonServer, server_log: list[str], model: str
) -> None:
    num_logged, pids = len(server_log), server.pids(model)
    os.kill(pids[0], signal.SIGUSR1)
    assert wait_for(lambda: "most recent call first" in "\n".join(server_log[num_logged:]), bool)
    assert infer_grpc(server, request_inputs("A request", {"max_tokens": 2}))
    assert server.pids(model) == pids
