"""The driver's end and the worker's end of the protocol, with an engine that only counts."""

import sys
from pathlib import Path

import pytest

from sides import WORKERS, SideError, WorkerSide

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

    def complete(self, wave, prompts, max_tokens, sampling):
        if max_tokens > 100:
            sys.exit("counted too far")
        for token in range(max_tokens):
            for index, prompt in enumerate(prompts):
                wave.add(index, [prompt[-1] + token + 1])

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
        waves = side.run([[[1], [10]], [[100]]], max_tokens=3)
    finally:
        side.close()
    assert [[request.tokens for request in wave.requests] for wave in waves] == [
        [[2, 3, 4], [11, 12, 13]],
        [[101, 102, 103]],
    ]
    for wave in waves:
        assert wave.seconds == max(request.arrivals[-1] for request in wave.requests)
        assert all(request.counts == [1, 1, 1] for request in wave.requests)


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
            side.run([[[1]]], max_tokens=101)
    finally:
        side.close()
