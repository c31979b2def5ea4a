"""The same on GPUs, whose ranks exchange through NCCL."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from charonia import LLM
from parity.reference import greedy, random_prompt
from support.parity import assert_equal_to, counter

NUM_NEW = 24
PROMPT_LENGTHS = (1, 16, 33, 90, 150)
DRAFTS = {"adaptive": False, "num_speculative_tokens": 3, "quantization": "int8"}


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [(1, 1), (2, 1), (1, 2)], ids=["alone", "TP 2", "PP 2"])
def test_ranks_on_gpus_say_what_transformers_says(
    checkpoint: Callable[..., Path], layout: tuple[int, int]
) -> None:
    num_parts, num_stages = layout
    if torch.cuda.device_count() < num_parts * num_stages:
        devices = "two CUDA devices" if num_parts * num_stages == 2 else "a CUDA device"
        pytest.skip(f"needs {devices}")
    model_dir = checkpoint(vocab_size=389)
    prompts = [random_prompt(length) for length in PROMPT_LENGTHS]
    references = [greedy(model_dir, prompt, NUM_NEW, device="cuda") for prompt in prompts]
    with LLM(
        str(model_dir),
        dtype="float32",
        device="cuda",
        tensor_parallel_size=num_parts,
        pipeline_parallel_size=num_stages,
        num_gpu_blocks_override=40,
        speculative_config={
            "model": str(model_dir),
            "draft_tensor_parallel_size": num_parts,
            **DRAFTS,
        },
    ) as llm:
        assert_equal_to(references, llm, prompts, speculation=False)
        assert_equal_to(references, llm, prompts)
        assert counter(llm, "accepted_tokens") > 0
