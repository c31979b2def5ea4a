"""The runner's place in the sequence of plans, and what is left after refusals and failures."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from charonia.config import EngineArgs, SpeculativeConfig
from charonia.data.kv_store import KVStore
from charonia.data.model.decoder import Decoder
from charonia.data.runner import Runner
from charonia.errors import CheckpointError, ConfigError, PlanRefusedError
from charonia.protocol import NewRow, RowSampling, RowStep, StepPlan, StepResult

Checkpoint = Callable[..., Path]
GREEDY = RowSampling(seed=0, temperature=0.0)
PROMPT = [5, 9, 200, 31, 77]


def make_runner(model_dir: Path, **args: Any) -> Runner:
    values = {"num_gpu_blocks_override": 16, "max_num_seqs": 4, "device": "cpu"} | args
    return Runner(EngineArgs(model=str(model_dir), **values), log=lambda line: None)


@pytest.fixture
def runner(checkpoint: Checkpoint) -> Runner:
    return make_runner(checkpoint("LlamaForCausalLM"))


def first_plan(epoch: int = 1) -> StepPlan:
    return StepPlan(
        epoch=epoch,
        step_id=0,
        reset=True,
        joins=[NewRow(0, PROMPT, 5, 0, [3, 1], GREEDY)],
        rows=[RowStep(0, 5)],
    )


def decode_plan(step_id: int, epoch: int = 1) -> StepPlan:
    return StepPlan(epoch=epoch, step_id=step_id, rows=[RowStep(0, 1)])


def tokens(*results: StepResult) -> list[int]:
    return [token_id for result in results for row in result.rows for token_id in row.token_ids]


def test_info_describes_the_engine(checkpoint: Checkpoint) -> None:
    info = make_runner(checkpoint("LlamaForCausalLM"), block_size=8).info()
    assert info.pids == [os.getpid()]
    assert (info.epoch, info.num_blocks, info.max_model_len) == (0, 16, 512)
    assert (info.vocab_size, info.eos_token_ids) == (384, [0])
    assert (info.architecture, info.dtype, info.device) == ("LlamaForCausalLM", "float32", "cpu")
    assert info.kv.bytes_per_block == 2 * 2 * 8 * 2 * 16 * 4  # K and V, layers, tokens, heads, …
    assert info.num_parameters == 384 * 64 * 2 + 64 + 2 * (64 * 128 + 64 * 64 + 3 * 64 * 128 + 128)


def test_info_tells_checkpoints_apart_that_lie_at_the_same_place(checkpoint: Checkpoint) -> None:
    one = checkpoint("LlamaForCausalLM")
    other = checkpoint("LlamaForCausalLM", rms_norm_eps=0.02)
    known = {make_runner(one).info().checkpoint for _ in range(2)}
    assert len(known) == 1
    assert make_runner(other).info().checkpoint not in known
    draft = SpeculativeConfig(model=str(one), num_speculative_tokens=2)
    assert make_runner(one, speculative_config=draft).info().checkpoint not in known


@pytest.mark.parametrize(
    ("asked", "given", "has_line"), [(None, 512, False), (100, 100, False), (513, 512, True)]
)
def test_max_model_len_is_at_most_what_the_model_supports(
    checkpoint: Checkpoint, asked: int | None, given: int, has_line: bool
) -> None:
    lines: list[str] = []
    args = EngineArgs(
        model=str(checkpoint("LlamaForCausalLM")), max_model_len=asked, num_gpu_blocks_override=4
    )
    assert Runner(args, log=lines.append).info().max_model_len == given
    assert any("max_model_len 513 is lowered to 512" in line for line in lines) == has_line


def test_a_sliding_window_limits_max_model_len_and_says_so(checkpoint: Checkpoint) -> None:
    lines: list[str] = []
    model_dir = checkpoint("MistralForCausalLM", sliding_window=200)
    runner = Runner(EngineArgs(model=str(model_dir), num_gpu_blocks_override=4), log=lines.append)
    assert runner.info().max_model_len == 200
    assert any("sliding window (200)" in line for line in lines)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_and_pages_take_the_dtype_asked_for(checkpoint: Checkpoint, dtype: str) -> None:
    runner = make_runner(checkpoint("LlamaForCausalLM"), dtype=dtype)
    assert runner.info().dtype == dtype
    assert runner.info().kv.dtype == dtype
    assert len(tokens(runner.execute(first_plan()))) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a device that is not there")
def test_a_device_that_is_not_there_is_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(ConfigError, match="accepted is 'cpu'"):
        make_runner(checkpoint("LlamaForCausalLM"), device="cuda")


def test_a_step_that_only_drops_rows_computes_nothing(runner: Runner) -> None:
    runner.execute(first_plan())
    result = runner.execute(StepPlan(epoch=1, step_id=1, leaves=[0]))
    assert result.rows == []
    assert (result.epoch, result.step_id) == (1, 1)


def test_a_prompt_in_chunks_yields_a_token_with_its_last_chunk_only(runner: Runner) -> None:
    whole = runner.execute(first_plan())
    plan = first_plan(epoch=2)
    results = [
        runner.execute(StepPlan(epoch=2, step_id=0, reset=True, joins=plan.joins)),
        runner.execute(StepPlan(epoch=2, step_id=1, rows=[RowStep(0, 3)])),
        runner.execute(StepPlan(epoch=2, step_id=2, rows=[RowStep(0, 2)])),
    ]
    assert results[1].rows[0].token_ids == []
    assert tokens(*results) == tokens(whole)


def test_a_fresh_engine_accepts_nothing_but_a_reset(runner: Runner) -> None:
    for plan in (decode_plan(0), StepPlan(epoch=0, step_id=0), first_plan(epoch=0)):
        with pytest.raises(PlanRefusedError):
            runner.execute(plan)
    assert runner.info().epoch == 0
    runner.execute(first_plan())
    assert runner.info().epoch == 1


@pytest.mark.parametrize(
    "bad",
    [
        decode_plan(0),
        decode_plan(2),
        decode_plan(1, epoch=2),
        first_plan(epoch=1),
        StepPlan(epoch=1, step_id=1, leaves=[0], rows=[RowStep(0, 1)]),
        StepPlan(epoch=1, step_id=1, leaves=[0], joins=[NewRow(0, [999], 1, 0, [4], GREEDY)]),
        StepPlan(epoch=1, step_id=1, rows=[RowStep(0, 1, [16])]),
        StepPlan(
            epoch=1,
            step_id=1,
            joins=[NewRow(1, [1, 2], 2, 0, [5], GREEDY)],
            rows=[RowStep(1, 2), RowStep(0, 2)],
        ),
        StepPlan(epoch=2, step_id=0, reset=True, joins=[NewRow(9, [1], 1, 0, [4], GREEDY)]),
    ],
)
def test_a_refused_plan_changes_nothing(checkpoint: Checkpoint, bad: StepPlan) -> None:
    undisturbed = make_runner(checkpoint("LlamaForCausalLM"))
    expected = tokens(undisturbed.execute(first_plan()), undisturbed.execute(decode_plan(1)))
    runner = make_runner(checkpoint("LlamaForCausalLM"))
    first = runner.execute(first_plan())
    with pytest.raises(PlanRefusedError):
        runner.execute(bad)
    assert tokens(first, runner.execute(decode_plan(1))) == expected


def test_after_a_step_that_raised_only_a_reset_goes_on(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tokens(runner.execute(first_plan()), runner.execute(decode_plan(1)))
    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "logits", _out_of_memory)  # K and V are written by then
        with pytest.raises(torch.OutOfMemoryError):
            runner.execute(decode_plan(2))
    for plan in (decode_plan(2), decode_plan(3), first_plan(epoch=1)):
        with pytest.raises(PlanRefusedError):
            runner.execute(plan)
    again = tokens(runner.execute(first_plan(epoch=2)), runner.execute(decode_plan(1, epoch=2)))
    assert again == expected


def _out_of_memory(*args: object, **kwargs: object) -> None:
    raise torch.OutOfMemoryError("out of memory")


def test_a_row_that_overflows_does_not_spoil_its_neighbours(checkpoint: Checkpoint) -> None:
    """Infinities of one row stay its own: beside it, and in the block that it leaves behind."""
    model_dir = checkpoint("LlamaForCausalLM")
    undisturbed = make_runner(model_dir)
    expected = tokens(undisturbed.execute(first_plan()), undisturbed.execute(decode_plan(1)))
    runner = make_runner(model_dir)
    runner._target._model._decoder._embedding[300] = float("inf")
    left_behind = NewRow(1, [300] * 16, 16, 0, [3], GREEDY)
    beside = NewRow(2, [300] * 16, 16, 0, [7, 8], GREEDY)
    results = [
        runner.execute(plan)
        for plan in (
            StepPlan(epoch=1, step_id=0, reset=True, joins=[left_behind], rows=[RowStep(1, 16)]),
            StepPlan(
                epoch=1,
                step_id=1,
                leaves=[1],
                joins=[*first_plan().joins, beside],
                rows=[RowStep(0, 5), RowStep(2, 16)],
            ),
            StepPlan(epoch=1, step_id=2, rows=[RowStep(0, 1), RowStep(2, 1)]),
        )
    ]
    assert [result.rows[0].token_ids[0] for result in results[1:]] == expected


# ---------------------------------------------------------------------- speculation


def drafting_runner(checkpoint: Checkpoint, draft: Path, **config: Any) -> Runner:
    model_dir = checkpoint("LlamaForCausalLM")
    speculative = SpeculativeConfig(model=str(draft), quantization=None, **config)
    return make_runner(model_dir, speculative_config=speculative)


def test_a_run_is_what_the_target_samples_whatever_the_drafts(
    runner: Runner, checkpoint: Checkpoint
) -> None:
    expected = tokens(
        runner.execute(first_plan()), *[runner.execute(decode_plan(i)) for i in range(1, 8)]
    )
    drafts = [*expected[1:3], (expected[3] + 1) % 384, 7]
    result = [
        runner.execute(first_plan(epoch=2)),
        runner.execute(StepPlan(epoch=2, step_id=1, rows=[RowStep(0, 1, [], len(drafts), drafts)])),
    ]
    assert tokens(*result) == expected[:4]  # two drafts and the token that the third was not
    rest = [runner.execute(decode_plan(i, epoch=2)) for i in range(2, 6)]
    assert tokens(*result, *rest) == expected


def test_the_draft_model_catches_up_behind_drafts_that_were_not_its_own(
    checkpoint: Checkpoint,
) -> None:
    model_dir = checkpoint("LlamaForCausalLM")
    runner = drafting_runner(checkpoint, model_dir)
    assert runner.info().max_draft_len == runner.info().max_model_len
    plain = [runner.execute(first_plan()), *[runner.execute(decode_plan(i)) for i in range(1, 12)]]
    expected = tokens(*plain)
    steps = [
        RowStep(0, 1, [], 2, [], num_draft_tokens=6),  # prompt and first token
        RowStep(0, 1, [], 2, [9, 9]),  # of the plan, wrong
        RowStep(0, 1, []),
        RowStep(0, 1, [], 0, [], num_draft_tokens=1),  # one of the four that it lacks
        RowStep(0, 1, [], 2, [], num_draft_tokens=4),
    ]
    results = [runner.execute(first_plan(epoch=2))]
    for step_id, step in enumerate(steps, 1):
        results.append(runner.execute(StepPlan(epoch=2, step_id=step_id, rows=[step])))
    runs = [len(result.rows[0].token_ids) for result in results]
    assert runs == [1, 3, 1, 1, 1, 3]
    assert tokens(*results) == expected[:10]
    assert results[1].draft_seconds > 0
    assert results[2].draft_seconds == 0


@pytest.mark.parametrize(("rate", "length"), [(0.0, 1), (1.0, 4)])
def test_synthetic_acceptance_takes_drafts_whatever_they_are(
    checkpoint: Checkpoint, rate: float, length: int
) -> None:
    draft = checkpoint("LlamaForCausalLM", seed=7)
    runner = drafting_runner(checkpoint, draft, synthetic_acceptance_rate=rate)
    runner.execute(first_plan())
    step = RowStep(0, 1, [], 3, [], num_draft_tokens=6)
    result = runner.execute(StepPlan(epoch=1, step_id=1, rows=[step]))
    assert len(result.rows[0].token_ids) == length


def test_a_draft_model_that_cannot_be_read_is_named(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"the draft model: .*config\.json"):
        drafting_runner(checkpoint, tmp_path)


def test_huge_pages_are_wished_for_again_once_all_blocks_are_in_use(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    for name in ("discard", "use_all"):
        monkeypatch.setattr(KVStore, name, lambda store, *args, name=name: done.append(name))
    plans = [
        first_plan(),
        StepPlan(epoch=1, step_id=1, discards=[14, 15], num_blocks=14),
        StepPlan(epoch=1, step_id=2, num_blocks=15),
        first_plan(epoch=2),  # which begins with all, whatever the memory
        StepPlan(epoch=2, step_id=1, discards=[15], num_blocks=15),
        StepPlan(epoch=2, step_id=2),
        StepPlan(epoch=2, step_id=3),
    ]
    for plan in plans:
        runner.execute(plan)
        done.append(" ")
    assert "".join(done).split(" ") == ["", "discard", "", "", "discard", "use_all", "", ""]


def test_a_draft_model_whose_heads_the_kv_format_does_not_take_is_named(
    checkpoint: Checkpoint,
) -> None:
    target = checkpoint("LlamaForCausalLM", head_dim=32)
    draft = checkpoint("LlamaForCausalLM", head_dim=48)
    speculative = SpeculativeConfig(model=str(draft))
    says = r"^the draft model: kv_cache_dtype = 'int4' .* every 32 .* this model's have 48;"
    with pytest.raises(ConfigError, match=says):
        make_runner(target, speculative_config=speculative, kv_cache_dtype="int4")
    with pytest.raises(ConfigError, match=r"^kv_cache_dtype = 'int4' .* this model's have 48;"):
        make_runner(draft, kv_cache_dtype="int4")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("hidden_size", {"hidden_size": 63, "head_dim": 16}),
        ("intermediate_size", {"intermediate_size": 63}),
    ],
)
def test_an_odd_size_that_the_kernels_do_not_take_is_refused_by_its_name(
    checkpoint: Checkpoint, name: str, values: dict[str, int]
) -> None:
    model_dir = checkpoint("Qwen2ForCausalLM", **values)
    with pytest.raises(ConfigError, match=f"even {name}, and it is 63; cpu_kernels = 'torch'"):
        make_runner(model_dir)
    make_runner(model_dir, cpu_kernels="torch")
