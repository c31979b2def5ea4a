"""A test's hold on whoever watches a server: the watch's clock, and what it asks the models.

So a test shows what happens after an hour of silence without waiting for one, and on a machine that
itself stands still for seconds at times. Must not know what a test expects.
"""

import time
from collections import Counter

import pytest

from charonia.supervision.server import judge, repairs, supervisor
from charonia.supervision.server.probes import EndpointResult, Probe, ProbeResult
from support.e2e import wait_for
from support.supervised import ALLOWED_S

SCHEDULER = "scheduler"


class Clock:
    """Fake `time` module of the watch; a test sets it forward."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._ahead_s = 0.0
        for module in (supervisor, judge, repairs):
            patch.setattr(module, "time", self)

    def monotonic(self) -> float:
        return time.monotonic() + self._ahead_s

    def set_forward(self, seconds: float) -> None:
        self._ahead_s += seconds


class Questions:
    """Counts of the questions to each model: `num_asked`, by name.

    The watch asks a model again only when it has judged the outcome of the question before.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.num_asked: Counter[str] = Counter()
        check, probe_endpoint = Probe.check, judge.probe_endpoint

        def count_and_check(probe: Probe, *args: object) -> ProbeResult:
            self.num_asked[SCHEDULER] += 1
            return check(probe, *args)

        def count_and_ask(http_url: str, model: str, timeout_s: float) -> EndpointResult:
            self.num_asked[model] += 1
            return probe_endpoint(http_url, model, timeout_s)

        patch.setattr(Probe, "check", count_and_check)
        patch.setattr(judge, "probe_endpoint", count_and_ask)

    def wait_asked(self, model: str, times: int = 1) -> None:
        """Wait until a model was asked so many times more.

        After once, all that was asked before this call is judged; after twice, so is a question
        that was asked after it.
        """
        num = self.num_asked[model] + times
        asked = wait_for(lambda: self.num_asked[model], lambda asked: asked >= num, ALLOWED_S)
        assert asked >= num
