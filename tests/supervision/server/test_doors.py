"""The questions to the models beside the scheduler: what their answers, and silence, say."""

import threading
from pathlib import Path

import pytest

from charonia.launch.server.fronts import FACADES
from charonia.launch.server.repository import RepositoryOptions, prepare_repository
from charonia.supervision.server import doors
from charonia.supervision.server.doors import Asked, Inquiry, Reply, models_with_questions
from support.e2e import wait_for

DEAD = Asked(Reply.ERROR, "Stub process 'tokenizer_0_1' is not healthy.")


class Door:
    """A model that answers a question when it is told to."""

    def __init__(self) -> None:
        self.num_asked = 0
        self._answers: list[Asked] = []
        self._may_answer = threading.Semaphore(0)

    def answer(self, asked: Asked) -> None:
        self._answers.append(asked)
        self._may_answer.release()

    def ask(self, *_: object) -> Asked:
        self.num_asked += 1
        assert self._may_answer.acquire(timeout=30)
        return self._answers.pop(0)


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Door:
    door = Door()
    monkeypatch.setattr(doors, "ask", door.ask)
    return door


@pytest.fixture
def inquiry(door: Door) -> Inquiry:
    """Asks at 100 s for the first time; all times here are far from the real clock's."""
    inquiry = Inquiry("nowhere:1", "tokenizer", interval_s=10, timeout_s=10, hang_s=60)
    inquiry.forget(90.0)
    assert inquiry.look(100.0) is None
    assert wait_for(lambda: door.num_asked, lambda num: num == 1) == 1
    return inquiry


def test_an_answer_that_names_a_dead_process_is_a_loss(door: Door, inquiry: Inquiry) -> None:
    door.answer(DEAD)
    assert wait_for(lambda: inquiry.look(101.0), bool) == "died"


def test_an_answer_to_a_question_to_processes_before_is_none_of_these(
    door: Door, inquiry: Inquiry
) -> None:
    asked = inquiry._asked
    assert asked is not None
    inquiry.forget(101.0)  # others are in their place
    door.answer(DEAD)
    assert asked.result(timeout=30) is DEAD
    assert inquiry.look(102.0) is None
    assert door.num_asked == 1
    assert inquiry.look(111.0) is None
    assert wait_for(lambda: door.num_asked, lambda num: num == 2) == 2, "it is asked again"
    door.answer(DEAD)
    assert wait_for(lambda: inquiry.look(112.0), bool) == "died"


def test_no_answer_for_long_is_a_hang_counted_from_the_processes_beginning(
    door: Door, inquiry: Inquiry
) -> None:
    inquiry.forget(140.0)
    door.answer(Asked(Reply.NOTHING))
    assert inquiry.look(200.0) is None
    assert inquiry.look(201.0) == "hung"


def test_every_model_that_passes_requests_on_is_asked(tmp_path: Path) -> None:
    options = RepositoryOptions(served_model_names=["second"])
    path = prepare_repository(tmp_path / "prepared", options).path
    (path / "generate").rename(path / "unary")
    assert models_with_questions(path) == ["postprocessor", "second", "tokenizer", "unary"]


def test_the_models_of_a_facade_are_asked_but_none_that_only_has_such_a_name(
    tmp_path: Path,
) -> None:
    options = RepositoryOptions(facades=["tensorrt-llm"])
    path = prepare_repository(tmp_path / "prepared", options).path
    models = set(models_with_questions(path))
    assert set(FACADES["tensorrt-llm"]) <= models
    config = path / "ensemble" / "config.pbtxt"
    config.write_text('platform: "ensemble"\n', encoding="utf-8")
    assert set(models_with_questions(path)) == models - {"ensemble"}
