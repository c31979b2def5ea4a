"""Chunks are handed on as they are, and the scheduler hears what became of them."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from charonia.events import parse_event
from charonia.serving.hosts import postprocessor as postprocessor_host
from charonia.serving.hosts.postprocessor import PostprocessorHost
from support.pb_utils import PbUtils, request_of
from support.sockets import SchedulerEnd
from support.waiting import WAIT_S, Clock

KEY, OTHER = "0" * 32, "f" * 32


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[SchedulerEnd]:
    made = SchedulerEnd(tmp_path)
    yield made
    made.relay.close()


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def hand_on(pb_utils: PbUtils, tmp_path: Path, log: list[str]) -> Iterator[Callable[..., Any]]:
    """Hands one chunk of a request on and returns the outputs."""
    host = PostprocessorHost(pb_utils, "scheduler", tmp_path, log=log.append)
    numbers = itertools.count(1)

    def one(key: str, *, has_gone: bool = False, tenant: str = "") -> dict[str, Any]:
        chunk = np.array([b"a"], dtype=object)
        name = np.array([f"{key}.{next(numbers)}.{tenant}".encode()], dtype=object)
        request: Any = request_of(chunk_text_output=chunk, request_key=name)
        request.is_cancelled = lambda: has_gone
        request.request_id = lambda: "7"
        (response,) = host.execute([request])
        return {tensor.name(): tensor.as_numpy().tolist() for tensor in response.output_tensors()}

    yield one
    host.finalize()


def test_every_chunk_is_handed_on_and_reported(
    scheduler: SchedulerEnd, pb_utils: PbUtils, hand_on: Callable[..., Any]
) -> None:
    for number, key in enumerate((KEY, KEY, OTHER), start=1):
        assert hand_on(key) == {"text_output": [b"a"]}
        assert scheduler.delivered.get(timeout=WAIT_S) == (key, number)
    assert pb_utils.num_calls == 1, "one connection is enough"


def test_a_chunk_that_cannot_be_handed_on_is_in_the_log_under_the_name_of_its_request(
    pb_utils: PbUtils, tmp_path: Path, log: list[str]
) -> None:
    def fail() -> Any:
        raise OSError("no such thing")

    def go_on() -> Any:
        return [key]

    host = PostprocessorHost(pb_utils, "scheduler", tmp_path, log=log.append)
    (key,) = request_of(request_key=np.array([f"{KEY}.1.a.b\nc".encode()], dtype=object)).inputs()
    request: Any = request_of()
    request.request_id, request.is_cancelled = lambda: "7", fail
    for inputs in (fail, go_on):
        request.inputs = inputs
        (response,) = host.execute([request])
        assert "internal error" in response.error().message()
    found = [*filter(None, map(parse_event, log))]
    assert [name for name, _ in found] == ["request_failed"] * 2
    assert [fields.get("tenant") for _, fields in found] == [None, "a.b\nc"]
    assert [fields.get("key") for _, fields in found] == [None, KEY]
    for _, fields in found:
        assert fields["request_id"] == "7"
        assert "no such thing" in fields["traceback"]


def test_one_that_ends_in_order_has_lost_nothing(
    scheduler: SchedulerEnd, tmp_path: Path, pb_utils: PbUtils
) -> None:
    host = PostprocessorHost(pb_utils, "scheduler", tmp_path, log=print)
    name = np.array([f"{KEY}.1.".encode()], dtype=object)
    request: Any = request_of(request_key=name)
    request.is_cancelled = lambda: False
    host.execute([request])
    host.finalize()
    assert scheduler.lost.get(timeout=WAIT_S) is False


def test_a_client_that_has_gone_cancels_its_request_once(
    scheduler: SchedulerEnd, hand_on: Callable[..., Any]
) -> None:
    for _ in range(3):
        hand_on(KEY, has_gone=True)
    hand_on(OTHER)
    assert scheduler.delivered.get(timeout=WAIT_S) == (OTHER, 4)
    assert scheduler.cancelled.get(timeout=WAIT_S) == KEY
    assert scheduler.cancelled.empty()


def test_a_new_scheduler_is_found_at_once(
    scheduler: SchedulerEnd, tmp_path: Path, hand_on: Callable[..., Any], log: list[str]
) -> None:
    hand_on(KEY)
    scheduler.relay.close()
    new = SchedulerEnd(tmp_path)
    hand_on(KEY)
    assert new.delivered.get(timeout=WAIT_S) == (KEY, 2)
    assert log == []
    new.relay.close()


def test_without_a_scheduler_chunks_are_handed_on_and_not_each_asks_for_it(
    pb_utils: PbUtils,
    tmp_path: Path,
    hand_on: Callable[..., Any],
    log: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(postprocessor_host, "time", clock)
    pb_utils.refusal = "it is not ready"
    for _ in range(3):
        assert hand_on(KEY, has_gone=True, tenant="t") == {"text_output": [b"a"]}
    assert pb_utils.num_calls == 1
    (told,) = log
    assert parse_event(told) == (
        "chunk_not_reported",
        {
            "level": "warning",
            "key": KEY,
            "request_id": "7",
            "tenant": "t",
            "reason": "it is not ready",
        },
    )
    pb_utils.refusal = None
    clock.now += postprocessor_host._TRY_AGAIN_S + 1
    scheduler = SchedulerEnd(tmp_path)
    hand_on(KEY, has_gone=True)
    assert scheduler.cancelled.get(timeout=WAIT_S) == KEY
    scheduler.relay.close()
