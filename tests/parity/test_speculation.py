"""Speculation changes no token: every drafter against transformers' `generate` and against itself.

The bundled demo pair in float32, 200 prompts of Python source: half of them greedy, which must give
what `generate` gives, half sampled with a seed, which must give what the same engine gives without
drafts. In batches of any size, with few blocks, in chunks and with a warm prefix cache.
"""

import inspect
import itertools
import json
import shutil
import typing
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from charonia import LLM, SamplingParams
from charonia.config import DEMO_CHECKPOINT, DEMO_DRAFT_CHECKPOINT
from charonia.llm import RequestOutput
from charonia.text.tokenizer import Tokenizer
from parity.reference import greedy, random_prompt
from support.checkpoints import ARCHITECTURES
from support.devices import DEVICES
from support.long import long, one_in
from support.parity import ONE_THREAD, assert_equal_to, counter
from support.waiting import WAIT_S

NUM_PROMPTS, NUM_NEW = 200, 20
FIXED = {"adaptive": False, "num_speculative_tokens": 4}
DRAFT_MODEL = {"model": str(DEMO_DRAFT_CHECKPOINT)}
DRAFTERS: dict[str, dict[str, Any]] = {
    "draft_model": {**DRAFT_MODEL, **FIXED},
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, **FIXED},
    "suffix": {"method": "suffix", **FIXED},
    "adaptive draft_model": DRAFT_MODEL,
    "adaptive suffix": {"method": "suffix"},
}
FIXED_DRAFTERS = tuple(DRAFTERS)[:3]
FEW_BLOCKS = {"max_num_seqs": 8, "num_gpu_blocks_override": 30}
SIZES: list[dict[str, Any]] = [
    {"max_num_seqs": 1},
    {"max_num_seqs": 4},
    {"max_num_seqs": 32},
    FEW_BLOCKS,
    {"max_num_batched_tokens": 48},
    {"enable_prefix_caching": False},
]

Outcome = tuple[list[int], str | None]


@cache
def prompts() -> list[list[int]]:
    """Pieces of source code, 20 to 110 tokens each; every fourth shares its beginning."""
    tokenizer = Tokenizer.from_dir(DEMO_CHECKPOINT)
    source = "".join(inspect.getsource(module) for module in (json, json.decoder, inspect, typing))
    token_ids = tokenizer.encode(source)
    pieces = [token_ids[i * 97 : i * 97 + 20 + i * 7 % 90] for i in range(NUM_PROMPTS)]
    for index in range(4, NUM_PROMPTS, 4):
        pieces[index][:32] = pieces[0][:32]
    return pieces


@cache
def params() -> list[SamplingParams]:
    """Greedy and sampled in turn; the sampled ones with everything that looks at the history."""
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.7, "top_p": 0.9},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": 0.2},
        {"temperature": 0.5, "min_tokens": 10, "stop_token_ids": tuple(range(0, 4096, 40))},
        {"top_k": 5, "bad_words": (" the", "self."), "stop": ("(", "=")},
    ]
    return [
        SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
        if index % 2 == 0
        else SamplingParams(max_tokens=NUM_NEW, seed=index, **kinds[index // 2 % len(kinds)])
        for index in range(NUM_PROMPTS)
    ]


@pytest.fixture(scope="module")
def expected() -> list[Outcome]:
    """What is right: transformers for the greedy prompts, the plain engine for the others."""
    outcomes = run(open_llm(None))
    for index in range(0, NUM_PROMPTS, 2):
        reference = greedy(DEMO_CHECKPOINT, prompts()[index], NUM_NEW).token_ids
        assert outcomes[index] == (reference, "length")
    return outcomes


def open_llm(speculative_config: dict[str, Any] | None, **engine_args: Any) -> LLM:
    values = {"dtype": "float32", "num_gpu_blocks_override": 2000, "max_num_seqs": 32}
    values |= ONE_THREAD
    return LLM(
        str(DEMO_CHECKPOINT), speculative_config=speculative_config, **(values | engine_args)
    )


def run(llm: LLM, *, times: int = 1) -> list[Outcome]:
    with llm:
        for _ in range(times):
            outputs = llm.generate(prompts(), params(), use_tqdm=False)
    return [outcome(output) for output in outputs]


def outcome(output: RequestOutput) -> Outcome:
    return output.outputs[0].token_ids, output.outputs[0].finish_reason


@pytest.mark.parametrize(
    ("drafter", "engine_args"),
    [
        *one_in(7, ((drafter, size) for size in SIZES for drafter in reversed(FIXED_DRAFTERS))),
        *one_in(
            3,
            itertools.product(
                ("adaptive draft_model", "adaptive suffix"), ({"cpu_threads": 2}, FEW_BLOCKS)
            ),
        ),
    ],
    ids=str,
)
def test_drafts_change_no_token(
    expected: list[Outcome], drafter: str, engine_args: dict[str, Any]
) -> None:
    llm = open_llm(DRAFTERS[drafter], **engine_args)
    assert run(llm) == expected
    if engine_args is FEW_BLOCKS:
        assert counter(llm, "preemptions") > 0
    if drafter in FIXED_DRAFTERS:
        assert 0 < counter(llm, "accepted_tokens") < counter(llm, "draft_tokens")


@pytest.mark.parametrize("drafter", ["draft_model", pytest.param("suffix", marks=long)])
def test_drafts_behind_a_prefix_hit_change_no_token(expected: list[Outcome], drafter: str) -> None:
    llm = open_llm(DRAFTERS[drafter])
    assert run(llm, times=2) == expected
    assert counter(llm, "prefix_cache_hit_tokens") > NUM_PROMPTS * 16


def test_log_probabilities_of_accepted_tokens_are_those_without_drafts() -> None:
    many = prompts()[:12]
    asked = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True, logprobs=3)
    plain, drafted = (
        llm.generate(many, asked, use_tqdm=False)
        for llm in (open_llm(None), open_llm(DRAFTERS["draft_model"]))
    )
    for one, other in zip(plain, drafted, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].logprobs == other.outputs[0].logprobs
    accepted = [output.timing["accepted_tokens"] for output in drafted if output.timing]
    assert sum(map(bool, accepted)) > len(many) / 2


@pytest.mark.parametrize("precision", [{"dtype": "bfloat16"}, {"quantization": "int8"}], ids=str)
@pytest.mark.parametrize("drafter", ["draft_model", pytest.param("suffix", marks=long)])
def test_drafts_change_no_token_of_a_rounded_model(precision: dict[str, str], drafter: str) -> None:
    """What the kernels compute for a token does not hang on what else is in the pass."""
    assert run(open_llm(DRAFTERS[drafter], **precision)) == run(open_llm(None, **precision))


def test_drafts_change_no_token_of_torchs_operations(expected: list[Outcome]) -> None:
    """The way that a GPU goes, through the sampler in torch."""
    few = slice(0, 10)
    with open_llm(DRAFTERS["draft_model"], cpu_kernels="torch") as llm:
        outputs = llm.generate(prompts()[few], params()[few], use_tqdm=False)
    assert [outcome(output) for output in outputs] == expected[few]
    assert counter(llm, "accepted_tokens") > 0


def test_log_probabilities_of_the_prompt_come_with_drafts_too() -> None:
    asked = SamplingParams(seed=3, max_tokens=NUM_NEW, logprobs=2, prompt_logprobs=1)
    plain, drafted = (
        llm.generate(prompts()[:8], asked, use_tqdm=False)
        for llm in (open_llm(None), open_llm(DRAFTERS["draft_model"]))
    )
    for one, other in zip(plain, drafted, strict=True):
        assert one.prompt_logprobs == other.prompt_logprobs
        assert one.outputs == other.outputs


def test_a_request_may_do_without_drafts() -> None:
    with open_llm(DRAFTERS["draft_model"]) as llm:
        asked = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, speculation=False)
        llm.generate(prompts()[:4], asked, use_tqdm=False)
        assert counter(llm, "draft_tokens") == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_model_that_guesses_for_itself_is_always_right(
    checkpoint: Callable[..., Path], architecture: str, device: str
) -> None:
    """Any slip in the draft model's own KV cache would make it guess otherwise than the target."""
    model_dir = checkpoint(architecture)
    llm = LLM(
        str(model_dir),
        device=device,
        dtype="float32",
        num_gpu_blocks_override=200,
        max_num_seqs=4,
        speculative_config={"model": str(model_dir), "quantization": None, **FIXED},
        **ONE_THREAD,
    )
    many = [random_prompt(length) for length in (1, 15, 16, 17, 40, 64, 90)]
    with llm:
        references = [greedy(model_dir, prompt, NUM_NEW, device=device) for prompt in many]
        assert_equal_to(references, llm, many)
        assert_equal_to(references, llm, many)  # behind prefix hits
        accepted, drafted = counter(llm, "accepted_tokens"), counter(llm, "draft_tokens")
    assert accepted == drafted if device == "cpu" else accepted > 0.9 * drafted


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_any_model_may_draft_for_any_other(
    checkpoint: Callable[..., Path], architecture: str, device: str
) -> None:
    model_dir = checkpoint(architecture)
    many = [random_prompt(length) for length in (1, 16, 33, 64)]
    references = [greedy(model_dir, prompt, NUM_NEW, device=device) for prompt in many]
    with LLM(
        str(model_dir),
        device=device,
        dtype="float32",
        num_gpu_blocks_override=200,
        speculative_config={"model": str(checkpoint("Qwen3ForCausalLM", seed=5)), **FIXED},
        **ONE_THREAD,
    ) as llm:
        assert_equal_to(references, llm, many)
        assert counter(llm, "draft_tokens") > 0


@pytest.mark.parametrize(
    ("engine_args", "quantization", "target_ids", "draft_ids"),
    one_in(
        3,
        (
            (*engine, *sizes)
            for engine, sizes in itertools.product(
                (
                    ({}, None),
                    ({}, "int8"),
                    ({}, "w8a8"),
                    ({"cpu_kernels": "torch"}, None),
                    ({"tensor_parallel_size": 2}, None),
                ),
                ((384, 448), (448, 384)),
            )
        ),
    ),
    ids=str,
)
def test_a_draft_model_may_have_another_padding_of_the_vocabulary(
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    engine_args: dict[str, Any],
    quantization: str | None,
    target_ids: int,
    draft_ids: int,
) -> None:
    """As in Qwen2.5. The target's texts go through the padding too, where the draft model has none.

    But for the padding the draft model has the target's weights.
    """
    target = padded(checkpoint("Qwen2ForCausalLM"), tmp_path / "target", target_ids)
    draft = padded(checkpoint("Qwen2ForCausalLM"), tmp_path / "draft", draft_ids)
    many = [random_prompt(length) for length in (1, 16, 33, 64)]
    many[1][3:9] = range(target_ids - 6, target_ids)
    values: dict[str, Any] = {"dtype": "float32", "device": "cpu", **ONE_THREAD}
    values |= {"num_gpu_blocks_override": 200, "rank_timeout_s": WAIT_S, **engine_args}
    sampled = SamplingParams(max_tokens=NUM_NEW, seed=4, top_p=0.95, ignore_eos=True)
    with LLM(str(target), **values) as llm:
        plain = [outcome(output) for output in llm.generate(many, sampled, use_tqdm=False)]
    speculative = {"model": str(draft), "quantization": quantization, **FIXED}
    speculative["draft_tensor_parallel_size"] = engine_args.get("tensor_parallel_size")
    with LLM(str(target), speculative_config=speculative, **values) as llm:
        assert_equal_to([greedy(target, prompt, NUM_NEW) for prompt in many], llm, many)
        assert plain == [outcome(output) for output in llm.generate(many, sampled, use_tqdm=False)]
        assert any(max(token_ids) >= min(target_ids, draft_ids) for token_ids, _ in plain) == (
            target_ids > draft_ids
        )
        accepted, drafted = counter(llm, "accepted_tokens"), counter(llm, "draft_tokens")
    least = 0.1 if target_ids > draft_ids else 0.9 if quantization is None else 0.5
    assert accepted > least * drafted


def padded(source: Path, directory: Path, num_ids: int) -> Path:
    """A copy of a checkpoint with more token ids, which its tokenizer has no tokens for."""
    shutil.copytree(source, directory)
    tensors = load_file(source / "model.safetensors")
    generator = torch.Generator().manual_seed(num_ids)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensor = tensors[name]
        more = torch.randn(num_ids - len(tensor), tensor.shape[1], generator=generator)
        tensors[name] = torch.cat((tensor, more * tensor.std()))
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"vocab_size": num_ids}))
    return directory
