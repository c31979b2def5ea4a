"""What transformers' own `generate` says, for charonia to be compared with."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
)

from support.checkpoints import VOCAB_SIZE


@dataclass(frozen=True)
class Reference:
    """A greedy continuation, its tokens' log-probabilities, and how close the runner-up was.

    The last two are of the model's own logits.
    """

    token_ids: list[int]
    logprobs: list[float]
    margins: list[float]


def greedy(
    model_dir: Path,
    prompt: Sequence[int],
    num_new: int,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    processor: LogitsProcessor | None = None,
) -> Reference:
    """Generate exactly `num_new` tokens with transformers.

    Args:
        processor: edits the logits before each choice.
    """
    return _greedy(model_dir, tuple(prompt), num_new, dtype, device, processor)


@functools.cache
def _greedy(
    model_dir: Path,
    prompt: tuple[int, ...],
    num_new: int,
    dtype: str,
    device: str,
    processor: LogitsProcessor | None,
) -> Reference:
    input_ids = torch.tensor([prompt], device=device)
    output = _model(model_dir, dtype, device).generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        logits_processor=LogitsProcessorList([] if processor is None else [processor]),
        generation_config=GenerationConfig(
            max_new_tokens=num_new,
            do_sample=False,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        ),
    )
    token_ids = output.sequences[0, len(prompt) :].tolist()
    logprobs = torch.log_softmax(torch.cat(output.logits).double(), dim=-1)
    best = logprobs.topk(2, dim=-1).values
    return Reference(
        token_ids=token_ids,
        logprobs=[logprobs[i, token_id].item() for i, token_id in enumerate(token_ids)],
        margins=(best[:, 0] - best[:, 1]).tolist(),
    )


def prompt_logprobs(model_dir: Path, prompt: Sequence[int]) -> list[float]:
    """Log-probability of each token of a prompt but the first, float32 on the CPU."""
    logits = logits_of(model_dir, prompt)
    logprobs = torch.log_softmax(logits.double(), dim=-1)
    return [logprobs[i, token_id].item() for i, token_id in enumerate(prompt[1:])]


def logits_of(model_dir: Path, token_ids: Sequence[int]) -> torch.Tensor:
    """The logits behind each token, [tokens, vocab] float32, on the CPU."""
    with torch.inference_mode():
        return _model(model_dir, "float32", "cpu")(torch.tensor([list(token_ids)])).logits[0]


@functools.lru_cache(maxsize=16)
def _model(model_dir: Path, dtype: str, device: str) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype))
    # Not in the call's own configuration: None there means "as the model's".
    model.generation_config.eos_token_id = None
    return model.to(device).eval()


def random_prompt(length: int, seed: int = 0) -> list[int]:
    """Random token ids, without the special token 0."""
    generator = torch.Generator().manual_seed(seed * 1000 + length)
    return torch.randint(1, VOCAB_SIZE, (length,), generator=generator).tolist()
