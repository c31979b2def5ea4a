"""The runner, driven by hand-written plans, against transformers' `generate`: token for token."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from charonia.protocol import NewRow, RowSampling, RowStep
from parity.driver import BLOCK_SIZE, GREEDY, Driver, blocks_for, make_runner, new_row
from parity.reference import Reference, greedy, prompt_logprobs, random_prompt
from support.checkpoints import ARCHITECTURES, assert_varied
from support.devices import DEVICES

Checkpoint = Callable[..., Path]
NUM_NEW = 40
LOGPROB_TOLERANCE = 1e-4

pytestmark = pytest.mark.parametrize("device", DEVICES)


def assert_equal(driver: Driver, row: int, expected: Reference) -> None:
    assert driver.tokens[row] == expected.token_ids[: len(driver.tokens[row])]
    assert driver.logprobs[row] == pytest.approx(
        expected.logprobs[: len(driver.logprobs[row])], abs=LOGPROB_TOLERANCE
    )
    assert len(driver.tokens[row]) == NUM_NEW


def run_alone(
    model_dir: Path, device: str, *, prompt_len: int = 45, budget: int = 2048
) -> tuple[Driver, Reference]:
    prompt = random_prompt(prompt_len)
    expected = greedy(model_dir, prompt, NUM_NEW, device=device)
    driver = Driver(make_runner(model_dir, device, max_num_batched_tokens=budget))
    joins: tuple[NewRow, ...] = (new_row(0, prompt, blocks_for(prompt_len + NUM_NEW)),)
    for start in range(0, prompt_len, budget):
        driver.step(RowStep(0, min(budget, prompt_len - start)), joins=joins)
        joins = ()
    driver.decode(0, NUM_NEW - 1)
    return driver, expected


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("prompt_len", [1, 16, 45, 130])
def test_one_prompt_in_one_step_equals_transformers(
    checkpoint: Checkpoint, architecture: str, prompt_len: int, device: str
) -> None:
    driver, expected = run_alone(checkpoint(architecture), device, prompt_len=prompt_len)
    assert_equal(driver, 0, expected)
    assert_varied(expected.token_ids)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("budget", [1, 7, 16, 32])
def test_a_prompt_cut_into_chunks_equals_transformers(
    checkpoint: Checkpoint, architecture: str, budget: int, device: str
) -> None:
    driver, expected = run_alone(checkpoint(architecture), device, prompt_len=100, budget=budget)
    assert_equal(driver, 0, expected)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_rows_of_unlike_lengths_side_by_side_equal_transformers(
    checkpoint: Checkpoint, architecture: str, device: str
) -> None:
    model_dir = checkpoint(architecture)
    prompts = [random_prompt(length) for length in (3, 150, 40, 17)]
    expected = [greedy(model_dir, prompt, NUM_NEW, device=device) for prompt in prompts]
    driver = Driver(make_runner(model_dir, device))
    free = list(range(1, 64))
    random.Random(0).shuffle(free)
    joins = []
    for row, prompt in enumerate(prompts):
        num_blocks = -(-(len(prompt) + NUM_NEW) // BLOCK_SIZE)
        joins.append(new_row(row, prompt, [free.pop() for _ in range(num_blocks)]))
    # Row 0 decodes while row 1 is at its chunks and the others join one after the other.
    driver.step(RowStep(0, 3), RowStep(1, 60), joins=(joins[0], joins[1]))
    driver.step(RowStep(1, 60), RowStep(0, 1))
    driver.step(RowStep(0, 1), RowStep(1, 30), RowStep(2, 40), joins=(joins[2],))
    driver.step(RowStep(2, 1), RowStep(3, 17), RowStep(0, 1), joins=(joins[3],))
    while any(len(driver.tokens[row]) < NUM_NEW for row in range(4)):
        pending = [row for row in range(4) if len(driver.tokens[row]) < NUM_NEW]
        driver.step(*(RowStep(row, 1) for row in pending))
    for row in range(4):
        assert_equal(driver, row, expected[row])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_blocks_that_come_one_by_one_and_out_of_order_equal_transformers(
    checkpoint: Checkpoint, architecture: str, device: str
) -> None:
    model_dir = checkpoint(architecture)
    prompt = random_prompt(20)
    expected = greedy(model_dir, prompt, NUM_NEW, device=device)
    driver = Driver(make_runner(model_dir, device))
    free = list(range(1, 64))
    random.Random(1).shuffle(free)
    driver.step(RowStep(0, 20, [free.pop(), free.pop()]), joins=(new_row(0, prompt, []),))
    for position in range(20, 20 + NUM_NEW - 1):
        new_block_ids = [free.pop()] if position % BLOCK_SIZE == 0 else []
        driver.step(RowStep(0, 1, new_block_ids))
    assert_equal(driver, 0, expected)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("num_kept", [0, 2])
def test_a_row_resumed_after_a_preemption_equals_transformers(
    checkpoint: Checkpoint, architecture: str, num_kept: int, device: str
) -> None:
    model_dir = checkpoint(architecture)
    prompt = random_prompt(30)
    expected = greedy(model_dir, prompt, NUM_NEW, device=device)
    driver = Driver(make_runner(model_dir, device))
    driver.step(RowStep(0, 30), joins=(new_row(0, prompt, blocks_for(50)),))
    driver.decode(0, 14)
    known = prompt + driver.tokens[0]
    # Another request takes the blocks that are not kept, and row 0.
    other = random_prompt(40, seed=1)
    taken = blocks_for(50)[num_kept:]
    driver.step(RowStep(0, 20), joins=(new_row(0, other, taken[:2]),), leaves=(0,))
    num_computed = num_kept * BLOCK_SIZE
    block_ids = blocks_for(50)[:num_kept] + list(range(40, 46))
    resumed = new_row(5, known, block_ids, num_prompt=30, num_computed=num_computed)
    driver.tokens[5], driver.logprobs[5] = driver.tokens[0][:15], driver.logprobs[0][:15]
    driver.step(RowStep(5, len(known) - num_computed), joins=(resumed,), leaves=(0,))
    driver.decode(5, NUM_NEW - len(driver.tokens[5]))
    assert_equal(driver, 5, expected)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_rows_that_share_the_blocks_of_a_prefix_equal_transformers(
    checkpoint: Checkpoint, architecture: str, device: str
) -> None:
    model_dir = checkpoint(architecture)
    prefix = random_prompt(32)
    prompts = [prefix + random_prompt(9, seed=1), prefix + random_prompt(21, seed=2)]
    driver = Driver(make_runner(model_dir, device))
    driver.step(RowStep(0, 41), joins=(new_row(0, prompts[0], blocks_for(41 + NUM_NEW)),))
    hit = new_row(1, prompts[1], [1, 2, *range(20, 26)], num_computed=32)
    driver.step(RowStep(0, 1), RowStep(1, 21), joins=(hit,))
    for _ in range(NUM_NEW - 2):
        driver.step(RowStep(0, 1), RowStep(1, 1))
    driver.decode(1, 1)
    for row, prompt in enumerate(prompts):
        assert_equal(driver, row, greedy(model_dir, prompt, NUM_NEW, device=device))


@pytest.mark.parametrize("budget", [13, 2048])
def test_prompt_logprobs_equal_those_of_transformers_however_the_prompt_is_cut(
    checkpoint: Checkpoint, budget: int, device: str
) -> None:
    model_dir = checkpoint("LlamaForCausalLM")
    prompt = random_prompt(50)
    driver = Driver(make_runner(model_dir, device))
    sampling = RowSampling(seed=0, temperature=0.0, num_prompt_logprobs=0)
    joins: tuple[NewRow, ...] = (new_row(0, prompt, blocks_for(60), sampling=sampling),)
    for start in range(0, 50, budget):
        driver.step(RowStep(0, min(budget, 50 - start)), joins=joins)
        joins = ()
    driver.decode(0, 3)
    assert driver.prompt_logprobs[0] == pytest.approx(
        prompt_logprobs(model_dir, prompt), abs=LOGPROB_TOLERANCE
    )


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("LlamaForCausalLM", {"rope_parameters": LLAMA3}),
        (
            "Qwen2ForCausalLM",
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
        ),
        (
            "MistralForCausalLM",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        ),
        ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
        ("Qwen3ForCausalLM", {"attention_bias": True}),
        ("LlamaForCausalLM", {"tie_word_embeddings": True}),
        ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
        ("LlamaForCausalLM", {"num_key_value_heads": 4}),
        ("LlamaForCausalLM", {"num_key_value_heads": 1}),
        ("MistralForCausalLM", {"head_dim": 24}),
        ("MistralForCausalLM", {"sliding_window": 200}),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 200}),
        ("LlamaForCausalLM", {"max_shard_size": "100KB"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_every_feature_of_a_configuration_equals_transformers(
    checkpoint: Checkpoint, architecture: str, overrides: dict[str, object], device: str
) -> None:
    driver, expected = run_alone(checkpoint(architecture, **overrides), device, prompt_len=100)
    assert_equal(driver, 0, expected)


@pytest.mark.parametrize("rope_type_key", ["rope_type", "type"])
def test_the_older_form_of_rope_scaling_equals_the_newer(
    checkpoint: Checkpoint, tmp_path: Path, rope_type_key: str, device: str
) -> None:
    newer = checkpoint("LlamaForCausalLM", rope_parameters=LLAMA3)
    for file in newer.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((newer / "config.json").read_text())
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    scaling[rope_type_key] = scaling.pop("rope_type")
    config["rope_scaling"] = scaling
    config["torch_dtype"] = config.pop("dtype")
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    driver, _ = run_alone(tmp_path, device, prompt_len=100)
    assert_equal(driver, 0, greedy(newer, random_prompt(100), NUM_NEW, device=device))


def test_a_row_beside_one_with_other_sampling_stays_greedy(
    checkpoint: Checkpoint, device: str
) -> None:
    model_dir = checkpoint("LlamaForCausalLM")
    prompt = random_prompt(20)
    driver = Driver(make_runner(model_dir, device))
    wild = RowSampling(seed=1, temperature=2.0, top_k=5, num_logprobs=2)
    driver.step(
        RowStep(0, 20),
        RowStep(1, 20),
        joins=(
            new_row(0, prompt, blocks_for(60), sampling=GREEDY),
            new_row(1, prompt, blocks_for(60, first=10), sampling=wild),
        ),
    )
    for _ in range(NUM_NEW - 1):
        driver.step(RowStep(1, 1), RowStep(0, 1))
    assert_equal(driver, 0, greedy(model_dir, prompt, NUM_NEW, device=device))
    assert driver.tokens[1] != driver.tokens[0]
