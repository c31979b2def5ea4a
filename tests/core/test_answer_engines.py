"""Answers of an engine that dies, is replaced by another one, or accepts any drafts."""

from charonia.config import SpeculativeConfig
from core.answer_bench import OTHER_PROMPT, AnswerBench, alone, reload_
from support.echo import EchoExecutor


def test_an_engine_that_dies_is_recovered_from_for_all():
    bench = AnswerBench()
    bench.ask("a")
    bench.ask("b")
    bench.run(8)
    bench.executor.die_next = 1
    bench.run(2)
    bench.ask("c")
    bench.run()
    assert bench.executor.num_restarts == 1
    for key in "abc":
        assert bench.tokens(key) == alone()
    assert bench.num_generated == 20
    bench.ask("d")
    assert bench.cached("d") == "exact"


def test_answers_outlive_an_engine_of_the_same_model():
    bench = AnswerBench()
    bench.ask("a")
    bench.run()
    bench.executor.die_next = 1
    bench.ask("x", OTHER_PROMPT)
    bench.run()
    assert bench.executor.num_restarts == 1
    bench.ask("b")
    assert bench.cached("b") == "exact"


def test_the_answers_of_another_model_are_out_of_reach():
    bench = AnswerBench()
    bench.ask("a")
    bench.run()
    bench.ask("on its way")
    bench.executor.vocab_size = 200  # another model
    reload_(bench)
    bench.ask("b")
    bench.run()
    assert bench.cached("b") is None
    assert bench.tokens("b") == alone(vocab_size=200)
    bench.executor.vocab_size = 256
    reload_(bench)
    bench.ask("c")
    assert bench.cached("c") == "exact"
    assert bench.tokens("c") == alone()


def test_what_two_models_have_generated_together_is_kept_for_nobody():
    bench = AnswerBench()
    bench.ask("a", max_tokens=40)
    bench.run(12)
    assert bench.tokens("a")
    bench.executor.vocab_size = 255
    reload_(bench)
    bench.ask("b", max_tokens=40)
    bench.run()
    assert bench.cached("b") is None
    assert bench.tokens("b") == alone(max_tokens=40, vocab_size=255)
    assert bench.tokens("a") != bench.tokens("b")
    for vocab_size in (255, 256):
        bench.executor.vocab_size = vocab_size
        reload_(bench)
        bench.ask(f"c{vocab_size}", max_tokens=40)
        bench.run()
        assert bench.tokens(f"c{vocab_size}") == alone(max_tokens=40, vocab_size=vocab_size)


def test_while_there_is_no_engine_nothing_is_given_that_the_next_one_might_not():
    bench = AnswerBench()
    bench.ask("a")
    bench.run()
    bench.executor.unload()
    bench.step()
    assert not bench.core.is_up
    bench.ask("b")
    bench.ask("c")
    assert not bench.chunks["b"]
    bench.executor.load()
    bench.run()
    assert [bench.cached(key) for key in "bc"] == [None, "joined"]
    assert bench.tokens("c") == alone()


def test_where_drafts_are_accepted_whatever_they_are_no_answer_is_kept():
    config = SpeculativeConfig(model="echo-draft", synthetic_acceptance_rate=0.5)
    bench = AnswerBench(speculative_config=config)
    for key in ("a", "b"):
        bench.ask(key)
        bench.run()
    assert bench.misses == 0


def test_a_request_that_stops_the_engine_takes_all_with_it_that_joined():
    poison = alone()[5]
    bench = AnswerBench(EchoExecutor(poison=poison))
    for key in ("a", "b"):
        bench.ask(key)
    bench.run()
    assert [bench.error(key).kind for key in "ab"] == ["quarantined"] * 2
    assert bench.core.metrics.counters["charonia_requests_quarantined_total", ""] == 1


def test_closing_answers_all():
    bench = AnswerBench()
    bench.ask("a")
    bench.ask("b")
    bench.run(5)
    bench.core.close()
    assert [bench.error(key).kind for key in "ab"] == ["shutting_down"] * 2
