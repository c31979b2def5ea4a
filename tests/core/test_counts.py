"""What the core counts of tokens, drafts and time, for the server and for each request."""

from itertools import pairwise
from string import ascii_letters

import pytest

from charonia.metrics.metric_table import PHASES
from charonia.metrics.metrics import MAX_UNDRAINED, Metrics
from core.answer_bench import AnswerBench
from core.bench import FIXED, Bench, expected
from support.echo import EchoExecutor


def test_the_metrics_add_up():
    bench = Bench()
    for key in "ab":
        bench.add(key, prompt=list(range(40)), max_tokens=10)
        bench.run()
    metrics = bench.core.metrics
    assert metrics.counters["charonia_prompt_tokens_total", "computed"] == 40 + 8
    assert metrics.counters["charonia_prompt_tokens_total", "cached"] == 32
    assert metrics.counters["charonia_finished_total", "length"] == 2
    assert metrics.histograms["charonia_inter_token_seconds"].count == 18
    drained = metrics.drain()
    assert drained["request_generation_tokens"] == [10, 10]
    assert len(drained["charonia_time_to_first_token_seconds"]) == 2
    assert metrics.drain() == {}


@pytest.mark.parametrize("makes", [Bench, AnswerBench])
def test_a_request_for_several_samples_counts_with_their_number(makes):
    """`best_of` is not what a client gets, and the answer that is kept counts as the computed."""
    bench = makes(EchoExecutor(num_blocks=128))
    ask = bench.ask if makes is AnswerBench else bench.add
    for key in "ab":
        ask(key, n=3, max_tokens=4)
        bench.run()
    ask("c", n=2, best_of=4, max_tokens=4)
    bench.run()
    assert bench.core.metrics.drain()["request_params_n"] == [3, 3, 2]


def test_quick_steps_show_what_they_change_from_time_to_time_and_ends_at_once():
    bench = Bench(EchoExecutor(num_blocks=64, block_size=2))
    gauges = bench.core.metrics.gauges

    def step() -> float:
        bench.now += 0.001
        bench.core.step()
        return gauges["charonia_kv_blocks", "used"]

    bench.add("a", prompt=[1], max_tokens=60)
    used = [step() for _ in range(40)]
    assert used[0] == 1, "what begins is shown at once"
    assert 3 <= sum(one != other for one, other in pairwise(used)) <= 4
    bench.add("b", n=2, max_tokens=60)
    for _ in range(3):
        step()
    assert gauges["charonia_requests_running", ""] == 3
    bench.cancel_samples("b", [1])
    step()
    assert gauges["charonia_requests_running", ""] == 2
    bench.cancel("b")
    step()
    assert gauges["charonia_requests_running", ""] == 1
    while bench.core.has_requests:
        step()
    assert gauges["charonia_requests_running", ""] == gauges["charonia_kv_blocks", "used"] == 0


class TickingBench(Bench):
    """Each look at the clock takes a millisecond."""

    @property
    def now(self) -> float:
        self._now += 0.001
        return self._now

    @now.setter
    def now(self, value: float) -> None:
        self._now = value


def test_what_a_step_spends_beside_computing_is_counted_by_phase():
    bench = TickingBench(EchoExecutor(max_draft_len=100), FIXED)
    bench.add("a")
    bench.run()
    counters = bench.core.metrics.counters
    for phase in PHASES:
        assert counters["charonia_step_phase_seconds_total", phase] > 0.001, phase
    assert set(PHASES) == {
        phase for name, phase in counters if name == "charonia_step_phase_seconds_total"
    }


def test_drafts_are_counted_for_the_server_and_for_their_request():
    bench = Bench(EchoExecutor(max_draft_len=100), FIXED)
    bench.add("a", max_tokens=21)
    bench.add("b", max_tokens=21, speculation=False)
    bench.run()
    assert bench.tokens("a") == expected("a", max_tokens=21)
    assert bench.tokens("b") == expected("b", max_tokens=21)
    timing, other = (bench.chunks[key][-1].timing for key in "ab")
    counters = bench.core.metrics.counters
    assert counters["charonia_draft_tokens_total", ""] == timing["drafted_tokens"] > 0
    assert counters["charonia_accepted_tokens_total", ""] == timing["accepted_tokens"] > 0
    assert counters["charonia_draft_rounds_total", ""] == timing["draft_rounds"]
    # Each round commits one token beside those accepted, and so does the step without drafts.
    rounds, accepted = timing["draft_rounds"], timing["accepted_tokens"]
    assert 21 - accepted - rounds in (1, 2)
    by_position = [
        [counters[f"charonia_{what}_at_position_total", str(place)] for place in range(3)]
        for what in ("drafted", "accepted")
    ]
    assert by_position == [timing["drafted_at_position"], timing["accepted_at_position"]]
    assert sum(by_position[1]) == accepted
    assert timing["mean_draft_depth"] == timing["drafted_tokens"] / rounds
    assert timing["mean_accepted_length"] == accepted / rounds
    assert timing["draft_seconds"] == pytest.approx(0.0004 * rounds)
    assert timing["verify_seconds"] == pytest.approx(0.0006 * rounds)
    assert (other["drafted_tokens"], other["accepted_tokens"]) == (0, 0)
    assert "draft_rounds" not in other


def test_tokens_behind_a_stop_string_are_not_counted():
    bench = Bench(EchoExecutor(max_draft_len=100), FIXED)
    for key in "abcdefgh":
        bench.add(key, max_tokens=60, stop=("A", "E", "I", "O", "e", "i", "t", "n", "s", "r"))
    bench.run()
    delivered = sum(len(bench.tokens(key)) for key in "abcdefgh")
    assert delivered < 8 * 60
    metrics = bench.core.metrics
    assert metrics.counters["charonia_generation_tokens_total", ""] == delivered
    assert metrics.histograms["charonia_inter_token_seconds"].count == delivered - 8


def test_drafts_behind_a_token_that_ends_the_request_are_not_accepted():
    bench = Bench(EchoExecutor(max_draft_len=100), FIXED)
    bench.add("a", max_tokens=60, stop_token_ids=tuple(range(0, 256, 6)))
    bench.run()
    timing = bench.chunks["a"][-1].timing
    assert bench.chunks["a"][-1].finish_reason == "stop"
    rounds, accepted = timing["draft_rounds"], timing["accepted_tokens"]
    assert accepted + rounds <= len(bench.tokens("a")) <= accepted + rounds + 2


def test_observations_that_nobody_drains_do_not_pile_up():
    metrics = Metrics()
    for _ in range(MAX_UNDRAINED + 5):
        metrics.observe_request("charonia_queue_seconds", 0.1)
    assert len(metrics.drain()["charonia_queue_seconds"]) == MAX_UNDRAINED


class SnapshotBench(Bench):
    """Keeps what was counted at the moment of each request's last chunk."""

    def on_chunk(self, chunk):
        super().on_chunk(chunk)
        if chunk.is_final:
            metrics = self.core.metrics
            self.at_end = {
                "counters": dict(metrics.counters),
                "steps": metrics.histograms["charonia_step_seconds"].count,
                "gaps": metrics.histograms["charonia_inter_token_seconds"].count,
                "observed": {name: len(values) for name, values in metrics.observations.items()},
            }


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({}, "length"),
        ({"stop": tuple(ascii_letters), "min_tokens": 20}, "stop"),
        ({"stop_token_ids": tuple(range(0, 256, 6))}, "stop"),
        ({"deadline_ms": 105}, "timeout"),
        (None, "cancelled"),
    ],
)
@pytest.mark.parametrize("max_draft_len", [0, 100])
def test_a_request_is_counted_before_its_last_chunk_is_delivered(params, reason, max_draft_len):
    speculation = FIXED if max_draft_len else None
    bench = SnapshotBench(EchoExecutor(max_draft_len=max_draft_len), speculation)
    bench.add("a", **{"max_tokens": 60} | (params or {}))
    bench.run(4)
    if params is None:
        bench.cancel("a")
    bench.run()
    then, metrics = bench.at_end, bench.core.metrics
    # Seconds may be counted after it: those of delivering it, for one.
    counted = {series: n for series, n in metrics.counters.items() if "seconds" not in series[0]}
    assert then["counters"].items() >= counted.items()
    assert counted["charonia_finished_total", reason] == 1
    assert counted["charonia_prompt_tokens_total", "computed"] == 10
    assert counted["charonia_generation_tokens_total", ""] == len(bench.tokens("a")) > 0
    assert (counted["charonia_accepted_tokens_total", ""] > 0) == bool(max_draft_len)
    assert then["gaps"] == metrics.histograms["charonia_inter_token_seconds"].count
    assert then["observed"] == {name: len(values) for name, values in metrics.observations.items()}
    assert then["observed"]["charonia_request_seconds"] == 1
