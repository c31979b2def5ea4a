"""Endpoint probes of the models beside the scheduler: what an answer says, and what none."""

import threading
from pathlib import Path

import pytest

from charonia.launch.server.proxy_models import FACADES
from charonia.launch.server.repository import RepositoryOptions, prepare_repository
from charonia.supervision.server import judge
from charonia.supervision.server.judge import EndpointWatch, SupervisionLimits
from charonia.supervision.server.probes import EndpointResult, Reply, probed_endpoints
from support.e2e import wait_for

DEAD = EndpointResult(Reply.ERROR, "Stub process 'tokenizer_0_1' is not healthy.")
LIMITS = SupervisionLimits(probe_interval_s=10, probe_timeout_s=10, model_hang_s=60)


class Endpoint:
    """A model that answers a question when it is told to."""

    def __init__(self) -> None:
        self.num_asked = 0
        self._answers: list[EndpointResult] = []
        self._may_answer = threading.Semaphore(0)

    def answer(self, result: EndpointResult) -> None:
        self._answers.append(result)
        self._may_answer.release()

    def probe(self, *_: object) -> EndpointResult:
        self.num_asked += 1
        assert self._may_answer.acquire(timeout=30)
        return self._answers.pop(0)


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Endpoint:
    endpoint = Endpoint()
    monkeypatch.setattr(judge, "probe_endpoint", endpoint.probe)
    return endpoint


@pytest.fixture
def watch(endpoint: Endpoint) -> EndpointWatch:
    """Asks at 100 s for the first time; all times here are far from the real clock's."""
    watch = EndpointWatch("nowhere:1", "tokenizer", LIMITS)
    watch.forget(90.0)
    assert watch.look(100.0) is None
    assert wait_for(lambda: endpoint.num_asked, lambda num: num == 1) == 1
    return watch


def test_an_answer_that_names_a_dead_process_is_a_loss(
    endpoint: Endpoint, watch: EndpointWatch
) -> None:
    endpoint.answer(DEAD)
    assert wait_for(lambda: watch.look(101.0), bool) == "died"


def test_an_answer_to_a_question_to_processes_before_is_none_of_these(
    endpoint: Endpoint, watch: EndpointWatch
) -> None:
    probed = watch._probed
    assert probed is not None
    watch.forget(101.0)  # others are in their place
    endpoint.answer(DEAD)
    assert probed.result(timeout=30) is DEAD
    assert watch.look(102.0) is None
    assert endpoint.num_asked == 1
    assert watch.look(111.0) is None
    assert wait_for(lambda: endpoint.num_asked, lambda num: num == 2) == 2, "it is asked again"
    endpoint.answer(DEAD)
    assert wait_for(lambda: watch.look(112.0), bool) == "died"


def test_no_answer_for_long_is_a_hang_counted_from_the_processes_beginning(
    endpoint: Endpoint, watch: EndpointWatch
) -> None:
    watch.forget(140.0)
    endpoint.answer(EndpointResult(Reply.NOTHING))
    assert watch.look(200.0) is None
    assert watch.look(201.0) == "hung"


def test_every_model_that_passes_requests_on_is_asked(tmp_path: Path) -> None:
    options = RepositoryOptions(served_model_names=["second"])
    path = prepare_repository(tmp_path / "prepared", options).path
    (path / "generate").rename(path / "unary")
    assert probed_endpoints(path) == ["postprocessor", "second", "tokenizer", "unary"]


def test_the_models_of_a_facade_are_asked_but_none_that_only_has_such_a_name(
    tmp_path: Path,
) -> None:
    options = RepositoryOptions(facades=["tensorrt-llm"])
    path = prepare_repository(tmp_path / "prepared", options).path
    models = set(probed_endpoints(path))
    assert set(FACADES["tensorrt-llm"]) <= models
    config = path / "ensemble" / "config.pbtxt"
    config.write_text('platform: "ensemble"\n', encoding="utf-8")
    assert set(probed_endpoints(path)) == models - {"ensemble"}
