"""A draft model that is the target itself: whatever it guesses must be what the target samples."""

from collections.abc import Callable
from pathlib import Path

import pytest

from charonia.config import EngineArgs, SpeculativeConfig
from charonia.data.runner import Runner
from charonia.protocol import NewRow, RowSampling, RowStep, StepPlan
from support.kernels import ISAS

SAMPLINGS = [
    RowSampling(seed=0, temperature=0.0),
    RowSampling(seed=3, temperature=0.9, repetition_penalty=1.3, frequency_penalty=0.4),
    RowSampling(seed=4, temperature=1.0, top_p=0.9, top_k=40),
    RowSampling(seed=5, temperature=0.7, min_p=0.01, logit_bias={7: 2.0}),
    RowSampling(seed=6, temperature=0.8),
]
PROMPTS = [[5, 9, 200, 31, 77], [8] * 17, list(range(40, 70)), [300], [1, 2, 3]]


@pytest.mark.parametrize("cpu_kernels", [*ISAS, "torch"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_target_as_its_own_draft_model_is_always_right(
    checkpoint: Callable[..., Path], cpu_kernels: str, dtype: str
) -> None:
    """In rows of every depth, with every lag, some of which only catch up or rest."""
    if cpu_kernels == "torch" and dtype == "bfloat16":
        pytest.skip("torch's products depend on the number of rows")
    model = checkpoint("Qwen3ForCausalLM")
    args = EngineArgs(
        model=str(model),
        device="cpu",
        dtype=dtype,  # type: ignore[arg-type]
        cpu_kernels=cpu_kernels,  # type: ignore[arg-type]
        num_gpu_blocks_override=32,
        max_num_seqs=8,
        speculative_config=SpeculativeConfig(model=str(model), quantization=None),
    )
    runner = Runner(args, log=lambda line: None)
    joins = [
        NewRow(row, prompt, len(prompt), 0, [1 + 4 * row + i for i in range(4)], sampling)
        for row, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True))
    ]
    prefill = [RowStep(row, len(prompt)) for row, prompt in enumerate(PROMPTS)]
    runner.execute(StepPlan(epoch=1, step_id=0, reset=True, joins=joins, rows=prefill))
    known = [len(prompt) + 1 for prompt in PROMPTS]
    computed = [0] * len(PROMPTS)  # by the draft model
    depths_of_steps = [[3, 2, 4, None, 0], [1, 5, 2, 3, 1], [0, 0, 3, None, 2], [4, 1, 1, 5, None]]
    for step_id, depths in enumerate(depths_of_steps, 1):
        steps = [
            RowStep(row, 1)
            if depth is None
            else RowStep(row, 1, [], depth, [], num_draft_tokens=known[row] - computed[row])
            for row, depth in enumerate(depths)
        ]
        result = runner.execute(StepPlan(epoch=1, step_id=step_id, rows=steps))
        for row, (depth, one) in enumerate(zip(depths, result.rows, strict=True)):
            assert len(one.token_ids) == 1 + (depth or 0), (step_id, row)
            if depth is not None:
                computed[row] = known[row] + max(0, depth - 1)
            known[row] += len(one.token_ids)


def test_a_draft_model_in_int8_guesses_well(checkpoint: Callable[..., Path]) -> None:
    model = checkpoint("LlamaForCausalLM")
    runs = {}
    for quantization in (None, "int8"):
        speculative = SpeculativeConfig(model=str(model), quantization=quantization)  # type: ignore[arg-type]
        args = EngineArgs(
            model=str(model),
            device="cpu",
            num_gpu_blocks_override=32,
            speculative_config=speculative,
        )
        runner = Runner(args, log=lambda line: None)
        join = NewRow(0, PROMPTS[2], len(PROMPTS[2]), 0, [1, 2, 3, 4, 5, 6], SAMPLINGS[0])
        steps = [RowStep(0, len(PROMPTS[2]))]
        known, computed, run = len(PROMPTS[2]), 0, []
        for step_id in range(12):
            result = runner.execute(
                StepPlan(
                    epoch=1,
                    step_id=step_id,
                    reset=step_id == 0,
                    joins=[join] if step_id == 0 else [],
                    rows=steps,
                )
            )
            token_ids = result.rows[0].token_ids
            if step_id:
                computed = known + min(len(token_ids) - 1, 2)
            known += len(token_ids)
            run += token_ids
            steps = [RowStep(0, 1, [], 3, [], num_draft_tokens=known - computed)]
        runs[quantization] = run
    shortest = min(map(len, runs.values()))
    assert runs[None][:shortest] == runs["int8"][:shortest]
    assert len(runs["int8"]) > 0.7 * len(runs[None])
