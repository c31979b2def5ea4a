"""The core on an engine that fails in every way: no request is lost, changed or left hanging."""

from collections import defaultdict

import pytest
from msgspec import structs
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from charonia.config import EngineArgs, SchedulerArgs, SpeculativeConfig
from charonia.engine.admission import GenerationRequest
from charonia.engine.core import EngineCore
from charonia.engine.metrics import FAILURES, MAX_UNDRAINED, PHASES, Metrics
from charonia.engine.outputs import Chunk
from charonia.engine.recovery import SILENT_START_S
from charonia.errors import (
    CharoniaError,
    InvalidRequestError,
    QueueFullError,
    UnavailableError,
)
from charonia.protocol import SamplingParams
from charonia.text.tokenizer import Tokenizer
from support.echo import EchoExecutor, echo_run

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_tokenizer() -> Tokenizer:
    """One token per byte, so that an echo engine's tokens are arbitrary, mostly broken UTF-8."""
    backend = Backend(models.BPE({char: i for i, char in enumerate(ALPHABET)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


FIXED = SpeculativeConfig(model="echo-draft", num_speculative_tokens=3, adaptive=False)


class Bench:
    """A core on an echo engine, with a clock of its own and the chunks by request."""

    def __init__(
        self, executor: EchoExecutor | None = None, speculative_config=None, **args
    ) -> None:
        self.now = 0.0
        self.lines: list[str] = []
        self.chunks: dict[str, list[Chunk]] = defaultdict(list)
        self.ended_at: dict[str, float] = {}
        self.executor = executor or EchoExecutor()
        self.executor.clock = lambda: self.now
        self.tokenizer = byte_tokenizer()
        self._engine_args = EngineArgs(model="echo", speculative_config=speculative_config)
        self._scheduler_args = SchedulerArgs(**args)
        self.restart_scheduler()
        self.core.step()
        assert self.core.is_up

    def restart_scheduler(self) -> None:
        """Begin anew on the engine that is there."""
        self.core = EngineCore(
            self.executor,
            self._engine_args,
            self._scheduler_args,
            self.tokenizer,
            deliver=self._take,
            clock=lambda: self.now,
            log=self.lines.append,
        )

    def _take(self, chunk: Chunk) -> None:
        self.chunks[chunk.key].append(chunk)
        if chunk.is_final:
            self.ended_at[chunk.key] = self.now

    def add(self, key: str, prompt: list[int] | None = None, timeout_s=None, **params) -> None:
        params = {"max_tokens": 20, "seed": 5} | params
        self.core.add(
            GenerationRequest(
                key=key,
                request_id=f"id-{key}",
                prompt_ids=prompt or [ord(key[0])] * 10,
                params=SamplingParams(**params),
                timeout_s=timeout_s,
            )
        )

    def run(self, num_steps: int = 10**6) -> None:
        while self.core.has_requests and num_steps:
            self.now += 0.01
            num_steps -= 1
            if not self.core.step() and not self.core.is_up:
                self.now += 60

    def step_and_wait(self) -> None:
        """A step, and seconds in which nothing happens."""
        self.core.step()
        self.now += 10

    def connects(self) -> bool:
        """Whether there is an engine after another look."""
        self.core.step()
        return self.core.is_up

    def tokens(self, key: str) -> list[int]:
        return [token_id for chunk in self.chunks[key] for token_id in chunk.token_ids]

    def text(self, key: str) -> str:
        return "".join(chunk.text for chunk in self.chunks[key])

    def error(self, key: str) -> CharoniaError | None:
        return self.chunks[key][-1].error


def expected(key: str, max_tokens: int = 20, seed: int = 5) -> list[int]:
    return echo_run([ord(key)] * 10, seed=seed, max_tokens=max_tokens, vocab_size=256)


def test_chunks_carry_all_tokens_and_text_and_one_end():
    bench = Bench()
    bench.add("a", max_tokens=200)
    bench.run()
    chunks = bench.chunks["a"]
    assert bench.tokens("a") == expected("a", 200)
    assert bench.text("a") == bench.tokenizer.decode(expected("a", 200))
    assert [chunk.is_final for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert all(chunk.text for chunk in chunks[:-1])
    assert all(chunk.token_ids for chunk in chunks)
    assert len(chunks) < 200, "nothing was held back although much of it is broken UTF-8"
    assert chunks[-1].finish_reason == "length"
    assert chunks[-1].timing["computed_tokens"] == 10


def test_a_stop_string_ends_the_text_and_its_surplus_tokens_do_not_count():
    bench = Bench()
    whole = expected("a", 60)
    text = bench.tokenizer.decode(whole)
    stop = text[25:28]
    bench.add("a", max_tokens=60, stop=(stop,))
    bench.add("b", max_tokens=60, stop=(stop,), include_stop_str_in_output=True, min_tokens=60)
    bench.run()
    assert bench.text("a") == text[: text.index(stop)]
    assert bench.chunks["a"][-1].finish_reason == "stop"
    assert bench.tokens("a") == whole[: len(bench.tokens("a"))]
    assert bench.chunks["b"][-1].finish_reason == "length"
    counted = bench.core.metrics.counters["charonia_generation_tokens_total", ""]
    assert counted == len(bench.tokens("a")) + 60


def test_a_stop_token_is_counted_but_not_shown():
    bench = Bench()
    whole = expected("a")
    bench.add("a", stop_token_ids=(whole[6],))
    bench.add("b", prompt=[ord("a")] * 10, stop_token_ids=(whole[6],), logprobs=0)
    bench.add(
        "c", prompt=[ord("a")] * 10, stop_token_ids=(whole[6],), include_stop_str_in_output=True
    )
    bench.run()
    assert bench.tokens("a") == whole[:7]
    assert bench.text("a") == bench.tokenizer.decode(whole[:6])
    assert bench.text("c") == bench.tokenizer.decode(whole[:7])
    assert bench.chunks["b"][-1].cumulative_logprob == pytest.approx(-0.5 * 7)


@pytest.mark.parametrize("fault", ["fail", "fail twice", "die", "die and not come back at once"])
def test_no_fault_changes_a_token(fault):
    bench = Bench()
    for key in "abc":
        bench.add(key)
    bench.run(5)
    bench.executor.fail_next = {"fail": 1, "fail twice": 2}.get(fault, 0)
    bench.executor.die_next = int("die" in fault)
    bench.run()
    for key in "abc":
        assert bench.tokens(key) == expected(key)
    assert bench.executor.num_restarts == int(fault != "fail")


@pytest.mark.parametrize(
    ("fault", "failures", "lines"),
    [
        ("fail", {"step_failed": 1}, ["step_failed"]),
        ("fail twice", {"step_failed": 2}, ["step_failed"] * 2 + ["engine_died", "engine_back"]),
        ("die", {"died": 1}, ["engine_died", "engine_back"]),
        ("hang", {"hung": 1}, ["engine_died", "engine_back"]),
        (
            "die and not come back at once",
            {"died": 1, "load_failed": 3},
            ["engine_died", *["engine_load_failed"] * 3, "engine_back"],
        ),
    ],
)
def test_every_failure_is_counted_once_and_has_its_line(fault, failures, lines):
    bench = Bench()
    for key in "abc":
        bench.add(key)
    bench.run(5)
    bench.executor.fail_next = {"fail": 1, "fail twice": 2}.get(fault, 0)
    bench.executor.die_next = int("die" in fault)
    bench.executor.hang_next = int(fault == "hang")
    bench.executor.refuse_restarts = 3 if "not come back" in fault else 0
    bench.lines.clear()
    bench.run()
    while not bench.core.is_up:
        bench.now += 1
        bench.connects()
    counters = bench.core.metrics.counters
    name = "charonia_engine_failures_total"
    assert {kind: counters[name, kind] for kind in FAILURES if counters[name, kind]} == failures
    names = [line.split()[0] for line in bench.lines]
    assert [name for name in names if name != "warning:"] == lines
    num_recoveries = int("engine_back" in lines)
    recoveries = bench.core.metrics.drain().get("charonia_recovery_seconds", [])
    assert len(recoveries) == num_recoveries
    num_recomputed = 0 if "load_failed" in failures else 3 * num_recoveries
    assert counters["charonia_requests_recomputed_total", ""] == num_recomputed
    if "load_failed" in failures:
        assert recoveries[0] >= 3, "the time without an engine counts, not the last try alone"


def test_an_engine_that_is_lost_while_nothing_runs_is_replaced_at_once():
    bench = Bench()
    bench.core.step()
    assert bench.executor.num_restarts == 0
    bench.executor.is_alive = False
    assert bench.core.step(), "nobody would see at once that another one is needed"
    assert bench.connects()
    assert bench.executor.num_restarts == 1
    bench.add("a")
    bench.run()
    assert bench.tokens("a") == expected("a")
    assert bench.chunks["a"][-1].timing["restarts"] == 0


def test_an_engine_that_was_lost_before_anybody_spoke_to_it_is_replaced():
    bench = Bench()
    bench.executor.is_alive = False
    bench.restart_scheduler()
    assert not bench.connects()
    bench.now += SILENT_START_S - 0.1
    assert not bench.connects()
    with pytest.raises(UnavailableError, match="not ready yet"):
        bench.core.check(GenerationRequest(key="a", prompt_ids=[1]))
    bench.now += 0.1
    assert not bench.connects()
    assert bench.connects()
    assert bench.executor.num_restarts == 1
    bench.add("a")
    bench.run()
    assert bench.tokens("a") == expected("a")


def test_an_engine_that_is_not_loaded_at_the_start_is_left_to_whoever_loads_it():
    bench = Bench()
    bench.executor.unload()
    bench.restart_scheduler()
    for _ in range(100):
        bench.now += SILENT_START_S
        assert not bench.connects()
    assert bench.executor.num_restarts == 0
    bench.executor.load()
    bench.now += SILENT_START_S
    assert bench.connects()


def test_a_request_that_kills_every_engine_fails_alone():
    bench = Bench(EchoExecutor(poison=255))
    bench.add("a")
    bench.add("x", prompt=[255] * 10)
    bench.add("b")
    bench.run()
    assert "each time" in str(bench.error("x"))
    for key in "ab":
        whole = expected(key)
        assert bench.tokens(key) == whole or 255 in whole
    counters = bench.core.metrics.counters
    assert counters["charonia_engine_restarts_total", ""] >= 3
    assert counters["charonia_requests_quarantined_total", ""] == 1
    assert "request_quarantined key=x request_id=id-x" in bench.lines


def test_an_engine_that_dies_while_it_is_loaded_is_loaded_again_and_nobody_suffers():
    bench = Bench()
    for key in "abc":
        bench.add(key)
    bench.run(4)
    bench.executor.die_next = 1
    bench.executor.refuse_restarts = 1
    bench.lines.clear()
    bench.run()
    for key in "abc":
        assert bench.tokens(key) == expected(key)
    assert "engine_load_failed retry_in=0 failed_requests=0" in bench.lines[1]
    bench.executor.die_next = 1
    bench.executor.refuse_restarts = 1
    bench.add("d")
    bench.run()
    assert bench.tokens("d") == expected("d"), "the next loss is another matter"


def test_while_the_engine_cannot_be_loaded_requests_fail_with_the_reason():
    bench = Bench()
    bench.add("a")
    bench.run(4)
    bench.executor.die_next = 1
    bench.executor.refuse_restarts = 3
    bench.run()
    assert isinstance(bench.error("a"), UnavailableError)
    assert "cannot be loaded" in str(bench.error("a"))
    with pytest.raises(UnavailableError, match="cannot be loaded"):
        bench.core.check(GenerationRequest(key="b", prompt_ids=[1]))
    bench.add("b")
    bench.core.step()
    assert isinstance(bench.error("b"), UnavailableError)
    assert bench.core.metrics.gauges["charonia_engine_up", ""] == 0
    assert not bench.connects(), "it tried again without waiting"
    bench.now += 1
    assert not bench.connects()
    bench.now += 2
    assert bench.connects()
    bench.add("c")
    bench.run()
    assert bench.tokens("c") == expected("c")


class Stubborn(EchoExecutor):
    """An engine whose every step hangs, for as long as `is_stubborn`."""

    is_stubborn = True

    def execute(self, plan):
        self.hang_next = int(self.is_stubborn)
        return super().execute(plan)


class Hanging(EchoExecutor):
    """An engine whose step of this number never ends; the others say what they took.

    Attributes:
        waited_s: how long the one that hangs was waited for, by the bench's clock.
    """

    def __init__(self, hanging_step: int, **values) -> None:
        super().__init__(**values)
        self.hanging_step = hanging_step
        self.asked_at: float | None = None
        self.waited_s = 0.0
        self.bench: Bench | None = None

    def submit(self, plan):
        step, number = super().submit(plan), self.num_submitted - 1
        return _HangingStep(self, step, is_hanging=number == self.hanging_step)


class _HangingStep:
    def __init__(self, engine: Hanging, step, is_hanging: bool) -> None:
        self.engine = engine
        self.step = step
        self.is_hanging = is_hanging

    def result(self, timeout):
        if self.is_hanging:
            engine, now = self.engine, self.engine.bench.now
            engine.asked_at = now if engine.asked_at is None else engine.asked_at
            engine.bench.now += timeout
            engine.waited_s = engine.bench.now - engine.asked_at
            raise TimeoutError
        num_tokens = sum(row.num_tokens for row in self.step.plan.rows)
        return structs.replace(self.step.result(timeout), seconds=3.2 if num_tokens > 1 else 1.0)


def hanging_bench(hanging_step: int, **values) -> Bench:
    """A bench whose engine is given up after 7 s at the earliest."""
    engine = Hanging(hanging_step, **values)
    engine.bench = Bench(engine, min_step_deadline_s=7.0)
    return engine.bench


@pytest.mark.parametrize(
    ("hanging_step", "seconds"),
    [
        (0, 7.0),  # a prompt, when nothing is known
        (2, 10 * 3.2),  # another one; and not 32 times what one token takes
        (3, 10 * 1.0),
    ],
)
def test_a_step_that_never_ends_counts_as_death_by_the_measure_of_steps_of_its_size(
    hanging_step, seconds
):
    bench = hanging_bench(hanging_step)
    for key in "ab":
        bench.add(key, prompt=[ord(key)] * 32, max_tokens=2)
        bench.run()
    assert bench.executor.num_restarts == 1
    assert bench.executor.waited_s == pytest.approx(seconds, abs=0.5)
    for key in "ab":
        assert bench.tokens(key) == echo_run([ord(key)] * 32, seed=5, max_tokens=2, vocab_size=256)


def test_while_a_step_hangs_others_time_runs_and_they_are_cancelled():
    bench = hanging_bench(3, max_num_seqs=2)
    bench.add("a")
    bench.add("b", deadline_ms=2000)
    bench.add("waits", timeout_s=1.0)
    while bench.executor.waited_s < 3:
        bench.core.step()
    assert str(bench.error("b")) == str(bench.error("waits")) == "Request timeout expired"
    bench.core.cancel("a")
    assert bench.error("a").code == "CANCELLED"
    assert bench.executor.num_restarts == 0
    bench.add("c")
    bench.run()
    assert bench.tokens("c") == expected("c")
    assert bench.executor.num_restarts == 1


def test_a_request_that_is_cancelled_as_it_hangs_the_engine_alone_takes_nobody_along():
    bench = Bench(Stubborn())
    for key in "ab":
        bench.add(key)
    while bench.executor.num_restarts < 2:
        bench.step_and_wait()
    bench.step_and_wait()
    assert bench.core.metrics.gauges["charonia_requests_running", ""] == 1
    bench.core.cancel("a")
    bench.executor.is_stubborn = False
    bench.run()
    assert bench.executor.num_restarts == 3
    assert bench.error("a").code == "CANCELLED"
    assert bench.tokens("b") == expected("b")
    assert bench.core.metrics.counters["charonia_requests_quarantined_total", ""] == 0


def test_a_new_scheduler_takes_over_a_living_engine():
    first = Bench()
    first.add("a")
    first.run(5)
    second = Bench(first.executor)
    second.add("a")
    second.run()
    assert second.tokens("a") == expected("a")
    first.run()  # its plans are refused at first; it opens a later epoch
    assert first.tokens("a") == expected("a")


def test_an_engine_with_other_blocks_after_a_restart_shares_no_wrong_prefix():
    """Keys of 16 tokens must not name blocks of 32: x and y differ in tokens 16 to 31."""
    bench = Bench()
    prompts = {key: [7] * 16 + [ord(key)] * 24 for key in "xy"}
    for key, prompt in prompts.items():
        bench.add(key, prompt=prompt)
    bench.run(2)
    bench.executor.die_next = 1
    bench.executor.block_size = 32
    bench.executor.max_num_seqs = 1  # y comes when x has published
    bench.run()
    for key, prompt in prompts.items():
        assert bench.tokens(key) == echo_run(prompt, seed=5, max_tokens=20, vocab_size=256)


def test_a_smaller_engine_after_a_restart_ends_what_no_longer_fits():
    bench = Bench()
    bench.add("a", max_tokens=200)
    bench.add("b", prompt=[3] * 100, max_tokens=100)
    bench.run(5)
    bench.executor.die_next = 1
    bench.executor.num_blocks = 5
    bench.run()
    assert "max_model_len 64" in str(bench.error("b"))
    assert any("max_model_len is lowered" in line for line in bench.lines)
    assert bench.chunks["a"][-1].finish_reason == "length"


def test_cancelling_frees_everything_and_leaves_the_others():
    bench = Bench(EchoExecutor(max_num_seqs=2))
    for key in "abcd":
        bench.add(key)
    bench.run(3)
    bench.core.cancel("a")
    bench.core.cancel("d")
    bench.core.cancel("unknown")
    bench.run()
    assert [type(bench.error(key)).__name__ for key in "ad"] == ["RequestCancelledError"] * 2
    assert bench.tokens("b") == expected("b")
    assert bench.tokens("c") == expected("c")
    gauges = bench.core.metrics.gauges
    assert gauges["charonia_kv_blocks", "used"] == 0
    assert gauges["charonia_requests_running", ""] == gauges["charonia_requests_waiting", ""] == 0


def test_a_timeout_in_the_queue_and_a_deadline_end_requests():
    bench = Bench(EchoExecutor(max_num_seqs=1))
    bench.add("a", max_tokens=100, deadline_ms=500)
    bench.add("b", timeout_s=0.2)
    bench.run()
    assert str(bench.error("a")) == str(bench.error("b")) == "Request timeout expired"
    assert bench.tokens("b") == []
    assert max(bench.core.metrics.drain()["charonia_queue_seconds"]) >= 0.2, "b is not seen"
    assert 30 < len(bench.tokens("a")) < 60


def test_a_full_queue_refuses_and_free_rows_do_not_queue():
    bench = Bench(EchoExecutor(max_num_seqs=2), max_queue_size=1)
    for num_live in range(3):
        bench.core.check_queue(num_live)
    full = r"Exceeds maximum queue size.*Maximum queue size of 1 is reached"
    with pytest.raises(QueueFullError, match=full):
        bench.core.check_queue(3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_ids": []}, "empty"),
        ({"prompt_ids": [256]}, "token id 256 at place 0; the vocabulary has ids 0 to 255"),
        ({"prompt_ids": [1, -1]}, "token id -1 at place 1"),
        ({"prompt_ids": [1] * 2000}, "2000 tokens; at most"),
        ({"params": SamplingParams(logit_bias={999: 1.0})}, "logit_bias has token id 999"),
        ({"params": SamplingParams(stop_token_ids=(-3,))}, "stop_token_ids has token id -3"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(changes, message):
    request = GenerationRequest(**({"key": "a", "prompt_ids": [1]} | changes))
    with pytest.raises(InvalidRequestError, match=message):
        Bench().core.check(request)


def test_seeds_of_64_bits_are_taken_as_they_are_and_missing_ones_are_drawn():
    bench = Bench()
    bench.add("a", seed=2**64 - 1)
    bench.add("b", prompt=[ord("a")] * 10, seed=-1)
    bench.add("c", prompt=[ord("a")] * 10, seed=None)
    bench.add("d", prompt=[ord("a")] * 10, seed=None)
    bench.run()
    assert bench.tokens("a") == bench.tokens("b") == expected("a", seed=2**64 - 1)
    assert bench.tokens("c") != bench.tokens("d")


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
    assert metrics.histograms["charonia_inter_token_seconds"].cumulative()[-1] == 18
    drained = metrics.drain()
    assert drained["request_generation_tokens"] == [10, 10]
    assert len(drained["charonia_time_to_first_token_seconds"]) == 2
    assert metrics.drain() == {}


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
    assert metrics.histograms["charonia_inter_token_seconds"].cumulative()[-1] == delivered - 8


def test_drafts_behind_a_token_that_ends_the_request_are_not_accepted():
    bench = Bench(EchoExecutor(max_draft_len=100), FIXED)
    bench.add("a", max_tokens=60, stop_token_ids=tuple(range(0, 256, 6)))
    bench.run()
    timing = bench.chunks["a"][-1].timing
    assert bench.chunks["a"][-1].finish_reason == "stop"
    rounds, accepted = timing["draft_rounds"], timing["accepted_tokens"]
    assert accepted + rounds <= len(bench.tokens("a")) <= accepted + rounds + 2


@pytest.mark.parametrize("max_draft_len", [0, 14])
def test_an_engine_that_comes_back_with_another_draft_model_goes_on(max_draft_len):
    bench = Bench(EchoExecutor(max_draft_len=100), FIXED)
    bench.add("a")
    bench.run(4)
    bench.executor.max_draft_len = max_draft_len
    bench.executor.die_next = 1
    bench.run()
    assert bench.tokens("a") == expected("a")
    assert bench.chunks["a"][-1].timing["restarts"] == 1


def test_chunks_merge_into_what_one_chunk_would_have_been():
    bench = Bench()
    bench.add("a", logprobs=0)
    bench.run()
    merged = Chunk.merge(bench.chunks["a"])
    assert merged.text == bench.text("a")
    assert list(merged.token_ids) == expected("a")
    assert len(merged.logprobs) == 20
    assert merged.cumulative_logprob == pytest.approx(-10)
    assert merged.is_final


@pytest.mark.parametrize("is_engine_alive", [True, False])
def test_an_abandoned_core_fails_its_requests_and_serves_new_ones(is_engine_alive):
    bench = Bench()
    bench.add("a")
    bench.run(3)
    bench.executor.is_alive = is_engine_alive
    bench.core.abandon(CharoniaError("internal error: KeyError"))
    assert "KeyError" in str(bench.error("a"))
    assert bench.connects() == is_engine_alive
    bench.now += 2
    assert bench.connects()
    bench.add("b")
    bench.run()
    assert bench.tokens("b") == expected("b")
    counters = bench.core.metrics.counters
    assert counters["charonia_prompt_tokens_total", "computed"] == 20, "it counts from 0 again"
    assert counters["charonia_engine_restarts_total", ""] == (0 if is_engine_alive else 1)


def test_a_scheduler_in_an_impossible_state_does_not_keep_its_requests_from_their_answer():
    bench = Bench()
    bench.add("a")
    bench.run(3)
    bench.core._replica._scheduler._running.clear()  # so nothing can be taken out of it any more
    with pytest.raises(ValueError, match="not in list"):
        bench.core.cancel("a")
    bench.core.abandon(CharoniaError("internal error: ValueError"))
    assert "ValueError" in str(bench.error("a"))


def test_limits_that_contradict_each_other_are_told_and_not_taken_for_a_slow_start():
    core = EngineCore(
        EchoExecutor(max_num_batched_tokens=8, max_model_len=64),
        EngineArgs(model="echo", enable_chunked_prefill=False),
        SchedulerArgs(),
        byte_tokenizer(),
        deliver=lambda chunk: None,
        clock=lambda: 0.0,
        log=lambda line: None,
    )
    core.step()
    assert not core.is_up
    with pytest.raises(UnavailableError, match="max_num_batched_tokens = 8 must be at least"):
        core.check(GenerationRequest(key="a", prompt_ids=[1]))


def test_after_an_error_that_is_no_engines_the_next_try_waits():
    bench = Bench()
    bench.executor.info = lambda: {}["a bug"]
    bench.core.abandon(CharoniaError("internal error"))
    with pytest.raises(KeyError):
        bench.connects()
    assert not bench.connects()


def test_observations_that_nobody_drains_do_not_pile_up():
    metrics = Metrics()
    for _ in range(MAX_UNDRAINED + 5):
        metrics.observe_request("charonia_queue_seconds", 0.1)
    assert len(metrics.drain()["charonia_queue_seconds"]) == MAX_UNDRAINED
