"""The Python API: its shapes, and that it can be used on after whatever happened."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from charonia import LLM, SamplingParams
from charonia.config import DEMO_DRAFT_CHECKPOINT
from charonia.core.replica import recovery
from charonia.errors import ConfigError, EngineDiedError, InvalidRequestError, UnavailableError
from support.parity import ONE_THREAD

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
ARGS = {"device": "cpu", "num_gpu_blocks_override": 40, **ONE_THREAD}


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path]) -> str:
    return str(checkpoint("LlamaForCausalLM"))


@pytest.fixture(scope="module")
def llm(model: str) -> Iterator[LLM]:
    with LLM(model, **ARGS) as llm:
        yield llm


def num_used_blocks(llm: LLM) -> float:
    llm.generate([5], SamplingParams(max_tokens=1), use_tqdm=False)
    return llm.metrics.gauges["charonia_kv_blocks", "used"]


def test_outputs_come_in_order_with_text_ids_and_reason(llm: LLM) -> None:
    prompts = ["one prompt", [7, 8, 9]]
    params = [GREEDY, SamplingParams(max_tokens=3, seed=1, logprobs=2, ignore_eos=True)]
    first, second = llm.generate(prompts, params, use_tqdm=False)
    assert (first.prompt, second.prompt) == ("one prompt", None)
    assert second.prompt_token_ids == [7, 8, 9]
    assert len(first.outputs[0].token_ids) == 8
    assert first.outputs[0].text == llm.tokenizer.decode(first.outputs[0].token_ids)
    assert first.outputs[0].finish_reason == "length"
    assert first.outputs[0].logprobs is None
    assert first.outputs[0].cumulative_logprob is None
    entries = second.outputs[0].logprobs
    assert entries is not None
    chosen = zip(entries, second.outputs[0].token_ids, strict=True)
    total = sum(entry[token_id].logprob for entry, token_id in chosen)
    assert second.outputs[0].cumulative_logprob == pytest.approx(total)


def test_one_prompt_is_not_taken_for_many(llm: LLM) -> None:
    assert [len(llm.generate(p, GREEDY, use_tqdm=False)) for p in ("ab", [5, 6])] == [1, 1]
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_a_stream_gives_what_generate_gives_and_closing_it_cancels(llm: LLM) -> None:
    [whole] = llm.generate("a prompt", GREEDY, use_tqdm=False)
    assert "".join(chunk.text for chunk in llm.stream("a prompt", GREEDY)) == whole.outputs[0].text
    stream = llm.stream([5, 6], SamplingParams(max_tokens=200, ignore_eos=True))
    next(stream)
    stream.close()
    assert num_used_blocks(llm) == 0


def test_nothing_runs_when_one_prompt_cannot_be_served(llm: LLM) -> None:
    num_steps = llm.metrics.histograms["charonia_step_seconds"].count
    for prompts in ([[5], []], [[5], [10**6]]):
        with pytest.raises(InvalidRequestError):
            llm.generate(prompts, GREEDY, use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="1 sampling_params for 2 prompts"):
        llm.generate([[5], [6]], [GREEDY], use_tqdm=False)
    with pytest.raises(InvalidRequestError):
        llm.stream([], GREEDY)
    assert llm.metrics.histograms["charonia_step_seconds"].count == num_steps


def test_after_an_interrupt_in_a_step_it_serves_as_before(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    [expected] = llm.generate([[7, 8, 9]], GREEDY, use_tqdm=False)
    runner = llm._core._replica._executor._runner  # type: ignore[attr-defined]

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(runner._target, "begin", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[7, 8, 9], [5]], GREEDY, use_tqdm=False)
    [again] = llm.generate([[7, 8, 9]], GREEDY, use_tqdm=False)
    assert again.outputs == expected.outputs
    assert num_used_blocks(llm) == 0


def test_a_lost_engine_that_could_not_be_replaced_is_replaced_by_a_later_call(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*args: Any) -> None:
        raise EngineDiedError("a rank is lost")

    monkeypatch.setattr(recovery, "BACKOFF_S", (0.0,))
    with LLM(model, **ARGS) as llm:
        [expected] = llm.generate([[7, 8, 9]], GREEDY, use_tqdm=False)
        executor = llm._core._replica._executor
        with monkeypatch.context() as patch:
            patch.setattr(executor, "_load", die)
            patch.setattr(executor._runner._target, "begin", die)  # type: ignore[attr-defined]
            with pytest.raises(UnavailableError, match="a rank is lost"):
                llm.generate([[7, 8, 9]], GREEDY, use_tqdm=False)
        [again] = llm.generate([[7, 8, 9]], GREEDY, use_tqdm=False)
        assert again.outputs == expected.outputs
        assert list(llm.stream([7, 8, 9], GREEDY))[-1].finish_reason == "length"


@pytest.mark.parametrize("dtype", [np.int32, np.uint16, np.int64])
def test_token_ids_may_be_numpys_and_become_pythons(llm: LLM, dtype: type) -> None:
    array = np.array([7, 8, 9], dtype=dtype)
    expected = llm.generate([7, 8, 9], GREEDY, use_tqdm=False)[0].outputs
    for prompts in (array, list(array), [array], array[None]):
        (output,) = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert output.outputs == expected
        assert [*map(type, output.prompt_token_ids)] == [int] * 3


@pytest.mark.parametrize("prompt", [[1.5], ["a"], None, b"ab", {"prompt": "a"}, [[7]]])
def test_a_prompt_that_is_neither_text_nor_token_ids_is_refused(llm: LLM, prompt: Any) -> None:
    with pytest.raises(InvalidRequestError, match="a prompt must be a text or a list of token ids"):
        llm.generate(["ab", prompt], GREEDY, use_tqdm=False)


@pytest.mark.parametrize("prompt", [b"ab", {"prompt": "a"}])
def test_neither_bytes_nor_a_mapping_is_a_list_of_prompts(llm: LLM, prompt: Any) -> None:
    with pytest.raises(InvalidRequestError, match="a prompt must be a text or a list of token ids"):
        llm.generate(prompt, GREEDY, use_tqdm=False)


def test_arguments_that_contradict_each_other_are_refused_at_once(model: str) -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens = 16 must be at least"):
        LLM(model, enable_chunked_prefill=False, max_num_batched_tokens=16, **ARGS)


def test_kv_events_are_refused_because_no_router_sends_requests_here(model: str) -> None:
    with pytest.raises(ConfigError, match="kv_events_config is for servers"):
        LLM(model, kv_events_config={"enable_kv_cache_events": True}, **ARGS)


def test_an_engines_seed_gives_requests_without_one_the_same_tokens(model: str) -> None:
    def answers(seed: int | None) -> list[list[int]]:
        params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=2.0)
        with LLM(model, seed=seed, **ARGS) as llm:
            outputs = llm.generate(["ab", "ab"], params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    first, second = answers(7)
    assert first != second
    assert answers(7) == [first, second]
    assert answers(8) != [first, second]
    assert answers(None) != answers(None)


def test_without_sampling_parameters_the_checkpoints_defaults_count(
    model: str, tmp_path: Path
) -> None:
    checkpoint = shutil.copytree(model, tmp_path / "checkpoint")
    (checkpoint / "generation_config.json").write_text('{"temperature": 0, "max_new_tokens": 5}')
    with LLM(str(checkpoint), **ARGS) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0, max_tokens=5)
        (output,) = llm.generate("ab", use_tqdm=False)
        (given,) = llm.generate("ab", SamplingParams(temperature=0, max_tokens=9), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 5
    assert len(given.outputs[0].token_ids) == 9


def test_a_draft_model_of_another_tokenizer_is_refused_at_once(model: str) -> None:
    with pytest.raises(ConfigError, match="the draft model has another tokenizer: token "):
        LLM(model, speculative_config={"model": str(DEMO_DRAFT_CHECKPOINT)}, **ARGS)
