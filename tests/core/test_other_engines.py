"""Requests that meet another engine than the one they began with: after a failed step, an unload,
or with a smaller vocabulary.
"""

from itertools import count, pairwise

import pytest
from msgspec import structs

from charonia.config import EngineArgs, SpeculativeConfig
from charonia.core.generation_request import GenerationRequest
from charonia.core.replica.recovery import UNLOADED_WAIT_S
from charonia.errors import ConfigError, UnavailableError
from charonia.metrics.metric_table import FAILURES
from core.bench import FIXED, expected
from core.reload_bench import Reloading
from support.echo import EchoExecutor, echo_run


@pytest.mark.parametrize("fits", [True, False])
def test_after_a_failed_step_there_may_be_another_engine(fits):
    bench = Reloading(executor=EchoExecutor(num_blocks=64))
    bench.add("a", max_tokens=60)
    bench.run(5)
    bench.executor.fail_next = 1
    info = bench.executor.info

    def meet_another_engine():
        bench.executor.info = info
        if not fits:
            bench.core._replica._read_args = refuse_args
        bench.executor.pids = [1]
        bench.executor.num_blocks = 8
        bench.executor.max_num_seqs = 1
        bench.executor._boot()
        return info()

    def refuse_args() -> EngineArgs:
        raise ConfigError("model.json is wrong")

    bench.executor.info = meet_another_engine
    bench.run(2)
    if fits:
        bench.run()
        assert bench.tokens("a") == expected("a", 60)
        assert bench.core.info.max_num_seqs == 1
    else:
        assert "model.json is wrong" in str(bench.error("a"))
        bench.core._replica._read_args = lambda: bench.args
        bench.now += 60
        assert bench.connects()
        bench.add("b")
        bench.run()
        assert bench.tokens("b") == expected("b")


@pytest.mark.parametrize("is_wrong", [True, False])
def test_after_a_failed_step_the_same_engine_has_the_same_arguments(is_wrong):
    def refuse_args() -> EngineArgs:
        raise ConfigError("model.json is wrong")

    bench = Reloading()
    bench.add("a")
    bench.run(5)
    bench.args = structs.replace(bench.args, enable_prefix_caching=False)
    if is_wrong:
        bench.core._replica._read_args = refuse_args
    bench.executor.fail_next = 1
    bench.run()
    assert bench.tokens("a") == expected("a")
    assert bench.core.engine_args.enable_prefix_caching
    assert bench.executor.num_restarts == 0


def test_a_smaller_vocabulary_ends_what_no_longer_fits():
    bench = Reloading()
    bench.add("a", prompt=[200] * 10)
    bench.add("b", prompt=[3] * 10, max_tokens=3, seed=1, logit_bias={4: 1.0})
    bench.run(1)
    bench.executor.vocab_size = 150
    bench.reload(seed=1)
    assert "a vocabulary of 150 tokens; the request has token id" in str(bench.error("a"))


def test_allowed_tokens_that_a_new_vocabulary_lacks_end_their_request():
    bench = Reloading()
    bench.add("a", allowed_token_ids=(5, 255))
    bench.run(1)
    bench.executor.vocab_size = 255
    bench.reload(seed=1)
    assert "a vocabulary of 255 tokens; the request has token id 255" in str(bench.error("a"))


def test_a_guess_is_forgotten_with_its_engine():
    bench = Reloading(speculative_config=FIXED)
    drafted: list[list[int]] = []
    submit = bench.executor.submit

    def watched(plan):
        drafted.extend(row.draft_ids for row in plan.rows if row.draft_ids)
        return submit(plan)

    bench.executor.submit = watched  # type: ignore[method-assign]
    guess = echo_run([3] * 10, seed=5, max_tokens=20, vocab_size=256)
    bench.add("a", prompt=[3] * 10, draft_ids=[*guess[:12], 255])
    bench.run(1)
    before = list(drafted)
    assert before[0] == guess[:3]
    bench.executor.vocab_size = 255
    bench.reload(speculative_config=FIXED, seed=1)
    bench.run()
    assert drafted == before
    assert bench.error("a") is None


def test_responses_are_forgotten_with_the_engine_that_gave_them():
    """The next request comes to a token that only one unknown to its engine has followed so far."""
    suffix = SpeculativeConfig(method="suffix", adaptive=False, num_speculative_tokens=3)
    bench = Reloading(speculative_config=suffix)
    bench.add("a", prompt=[3] * 10, max_tokens=40, seed=5)
    bench.run()
    followed = {first for first, then in pairwise(bench.tokens("a")) if first < 150 <= then}
    bench.executor.vocab_size = 150
    bench.reload(speculative_config=suffix)
    answers = (echo_run([1], seed=seed, max_tokens=5, vocab_size=150) for seed in count())
    seed, answer = next(one for one in enumerate(answers) if one[1][0] in followed)
    bench.add("b", prompt=[1], max_tokens=5, seed=seed)
    bench.run()
    assert bench.tokens("b") == answer


def test_an_unloaded_engine_is_waited_for_and_nobody_is_blamed():
    bench = Reloading()
    bench.add("a")
    bench.add("b", deadline_ms=500)
    bench.run(5)
    bench.executor.unload()
    bench.core.step()
    assert not bench.core.is_up
    bench.add("c")
    bench.now += 1
    assert not bench.connects()
    assert str(bench.error("b")) == "deadline_ms has passed"
    bench.executor.load()
    bench.now += 1
    bench.run()
    for key in "ac":
        assert bench.tokens(key) == expected(key)
    counters = bench.core.metrics.counters
    assert counters["charonia_engine_reloads_total", ""] == 1
    assert not any(counters["charonia_engine_failures_total", kind] for kind in FAILURES)
    assert bench.executor.num_restarts == 0


def test_an_unloaded_engine_is_not_waited_for_for_ever_but_taken_whenever_it_comes():
    bench = Reloading()
    bench.add("a")
    bench.run(5)
    bench.executor.unload()
    bench.core.step()
    bench.now += UNLOADED_WAIT_S + 1
    assert not bench.connects()
    assert "the engine was unloaded" in str(bench.error("a"))
    with pytest.raises(UnavailableError, match="the engine was unloaded"):
        bench.core.check(GenerationRequest(key="b", prompt_ids=[1]))
    bench.executor.load()
    bench.now += 1
    assert bench.connects()
    bench.add("c")
    bench.run()
    assert bench.tokens("c") == expected("c")
    assert bench.executor.num_restarts == 0


def test_an_engine_that_dies_as_soon_as_it_was_loaded_again_is_replaced():
    bench = Reloading()
    bench.add("a")
    bench.run(5)
    bench.executor.unload()
    bench.core.step()
    bench.now += 1
    assert not bench.connects()
    bench.executor.load()
    bench.executor.is_alive = False
    bench.now += 1
    assert not bench.connects()
    assert bench.core.down_reason is None
    assert bench.connects()
    bench.run()
    assert bench.tokens("a") == expected("a")
    counters = bench.core.metrics.counters
    assert counters["charonia_engine_failures_total", "died"] == 1
    assert counters["charonia_engine_restarts_total", ""] == 1
    assert counters["charonia_engine_reloads_total", ""] == 0
