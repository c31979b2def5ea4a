"""Chunks are handed on as they are, and the scheduler hears what became of them."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from charonia.serving import postprocessor_host
from charonia.serving.postprocessor_host import PostprocessorHost
from support.sockets import SchedulerEnd
from support.waiting import WAIT_S, Clock

KEY, OTHER = "0" * 32, "f" * 32


class Call:
    """A BLS call; `exec` raises, or brings an answer without outputs."""

    def __init__(self, error: Exception | None) -> None:
        self._error = error

    def exec(self, *, decoupled: bool) -> Iterator[Any]:
        if self._error is not None:
            raise self._error
        return iter(())


class Triton:
    """`pb_utils` with a scheduler that BLS reaches, unless there is a `refusal`."""

    class TritonModelException(Exception):
        pass

    def __init__(self, pb_utils: Any) -> None:
        self.Tensor = pb_utils.Tensor
        self.InferenceResponse = pb_utils.InferenceResponse
        self.refusal = ""
        self.num_calls = 0

    def InferenceRequest(self, **_: Any) -> Call:
        self.num_calls += 1
        return Call(self.TritonModelException(self.refusal) if self.refusal else None)


@pytest.fixture
def triton(pb_utils: Any) -> Triton:
    return Triton(pb_utils)


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[SchedulerEnd]:
    made = SchedulerEnd(tmp_path)
    yield made
    made.relay.close()


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def hand_on(
    triton: Triton, pb_utils: Any, tmp_path: Path, log: list[str]
) -> Iterator[Callable[..., Any]]:
    """Hands one chunk of a request on and returns the outputs."""
    host = PostprocessorHost(triton, "scheduler", tmp_path, log=log.append)
    numbers = itertools.count(1)

    def one(key: str, *, has_gone: bool = False) -> dict[str, Any]:
        chunk = pb_utils.Tensor("chunk_text_output", np.array([b"a"], dtype=object))
        name = pb_utils.Tensor(
            "request_key", np.array([f"{key}.{next(numbers)}".encode()], dtype=object)
        )
        request = pb_utils.Request([chunk, name])
        request.is_cancelled = lambda: has_gone
        (response,) = host.execute([request])
        return {tensor.name(): tensor.as_numpy().tolist() for tensor in response.output_tensors()}

    yield one
    host.finalize()


def test_every_chunk_is_handed_on_and_reported(
    scheduler: SchedulerEnd, triton: Triton, hand_on: Callable[..., Any]
) -> None:
    for number, key in enumerate((KEY, KEY, OTHER), start=1):
        assert hand_on(key) == {"text_output": [b"a"]}
        assert scheduler.delivered.get(timeout=WAIT_S) == (key, number)
    assert triton.num_calls == 1, "one connection is enough"


def test_one_that_ends_in_order_has_lost_nothing(
    scheduler: SchedulerEnd, tmp_path: Path, triton: Triton, pb_utils: Any
) -> None:
    host = PostprocessorHost(triton, "scheduler", tmp_path, log=print)
    name = pb_utils.Tensor("request_key", np.array([f"{KEY}.1".encode()], dtype=object))
    request = pb_utils.Request([name])
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
    triton: Triton,
    tmp_path: Path,
    hand_on: Callable[..., Any],
    log: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(postprocessor_host, "time", clock)
    triton.refusal = "it is not ready"
    for _ in range(3):
        assert hand_on(KEY, has_gone=True) == {"text_output": [b"a"]}
    assert triton.num_calls == 1
    assert log == ["the scheduler could not be told of a chunk: it is not ready"]
    triton.refusal = ""
    clock.now += postprocessor_host._TRY_AGAIN_S + 1
    scheduler = SchedulerEnd(tmp_path)
    hand_on(KEY, has_gone=True)
    assert scheduler.cancelled.get(timeout=WAIT_S) == KEY
    scheduler.relay.close()
