"""The driver's end and the worker's end of the protocol, with an engine that only counts."""

import sys
from pathlib import Path

import pytest

from paths import WORKERS
from systems_under_test import BASE, SPECS, Request, SideError, WorkerSide

COUNTING = f"""
import sys
sys.path.append({str(WORKERS)!r})
from worker import serve_engine

class Counting:
    versions, notes = {{"counting": "1"}}, []

    def __init__(self, settings):
        print("what an engine prints is no answer")
        if settings["fail"]:
            raise ValueError("there is nothing to count")

    def complete(self, wave, requests, sampling):
        if any(request.max_tokens > 100 for request in requests):
            sys.exit("counted too far")
        for token in range(max(request.max_tokens for request in requests)):
            for index, request in enumerate(requests):
                if token < request.max_tokens:
                    wave.add(index, [request.prompt[-1] + token + 1])

serve_engine(Counting)
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "counting_worker.py"
    path.write_text(COUNTING)
    return str(path)


def start(script: str, *, fail: bool = False) -> WorkerSide:
    return WorkerSide("counting", Path(sys.executable), script, {"fail": fail})


def test_waves_come_back_as_traces_also_after_a_pause(script):
    side = start(script)
    try:
        side.pause()
        side.resume()
        waves = side.run([[Request([1], 3), Request([9, 10], 1)], [Request([100], 2)]])
    finally:
        side.close()
    assert [[request.tokens for request in wave.requests] for wave in waves] == [
        [[2, 3, 4], [11]],
        [[101, 102]],
    ]
    for wave in waves:
        assert wave.seconds == max(request.arrivals[-1] for request in wave.requests)
        for request in wave.requests:
            assert request.counts == [1] * len(request.tokens)


def test_a_paused_side_can_be_closed(script):
    side = start(script)
    side.pause()
    side.close()
    assert side.processes() == []


def test_a_side_that_cannot_start_says_why(script):
    with pytest.raises(SideError, match="counting: ValueError: there is nothing to count"):
        start(script, fail=True)


def test_a_side_that_ends_is_quoted(script):
    side = start(script)
    try:
        with pytest.raises(SideError, match=r"its process ended(.|\n)*counted too far"):
            side.run([[Request([1], 101)]])
    finally:
        side.close()


def start_real(name: str, model: Path) -> WorkerSide:
    spec = SPECS[name]
    settings = {"model": str(model), "dtype": "float32", "max_model_len": 64, **spec.settings}
    return WorkerSide(name, spec.python, spec.script, settings)


UNLIKE = [Request([5, 6, 7], 4), Request([8] * 20, 1), Request([9], 9)]


def test_charonia_gives_each_request_of_a_wave_as_many_tokens_as_it_asks_for(checkpoint):
    side = start_real(BASE, checkpoint())
    try:
        together, *alone = side.run([UNLIKE, *([request] for request in UNLIKE)])
    finally:
        side.close()
    assert [sum(request.counts) for request in together.requests] == [4, 1, 9]
    assert [request.tokens for request in together.requests] == [
        wave.requests[0].tokens for wave in alone
    ]


def test_transformers_takes_no_batch_of_unlike_requests(checkpoint):
    side = start_real("transformers", checkpoint())
    try:
        (wave,) = side.run([[Request([5, 6, 7], 4), Request([8, 9, 7], 4)]])
        assert [sum(request.counts) for request in wave.requests] == [4, 4]
        with pytest.raises(SideError, match="requests must be equally long"):
            side.run([UNLIKE])
    finally:
        side.close()
