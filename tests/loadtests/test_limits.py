"""The limit that measured rates are compared with."""

from dataclasses import replace

import pytest

from limits import Machine, ModelCost, Work, output_limit, prefill_seconds, prompt_limit

# llama-135m: 30 layers of 3,538,944 parameters in matrices, a head of 49,152 by 576.
COST = ModelCost(
    body_parameters=106_168_320,
    head_parameters=28_311_552,
    kv_bytes_per_token=23_040,
    attention_width=17_280,
)
MACHINE = Machine(read_gb_s=52.0, gemm_gflop_s=982.0)


def test_one_sequence_is_limited_by_reading_the_weights():
    faster_at_compute = Machine(MACHINE.read_gb_s, MACHINE.gemm_gflop_s * 100)
    work = Work(concurrency=1, prompt_tokens=1, new_tokens=64)
    assert output_limit(COST, MACHINE, work) == pytest.approx(52e9 / COST.weight_bytes, rel=0.01)
    assert output_limit(COST, faster_at_compute, work) == output_limit(COST, MACHINE, work)


def test_a_prefill_is_limited_by_compute_and_samples_one_row_per_prompt():
    work = Work(concurrency=8, prompt_tokens=128, new_tokens=1)
    products = 128 * COST.body_parameters + COST.head_parameters + 2 * (128 * 129 // 2) * 17_280
    flop = 2 * 8 * products
    assert prefill_seconds(COST, MACHINE, work) == pytest.approx(flop / 982e9)
    assert prompt_limit(COST, MACHINE, work) == pytest.approx(8 * 128 / (flop / 982e9))


def test_a_long_prompt_is_limited_by_what_its_tokens_look_at():
    def seconds(tokens: int) -> float:
        work = Work(concurrency=1, prompt_tokens=tokens, new_tokens=1)
        return prefill_seconds(COST, MACHINE, work)

    assert seconds(16_384) > 2.5 * 8 * seconds(2_048)


def test_many_sequences_also_pay_for_reading_their_caches():
    work = Work(concurrency=32, prompt_tokens=128, new_tokens=64)
    without_cache = replace(COST, kv_bytes_per_token=0)
    steps = 63
    seconds = steps * 32 * (128 + 32) * COST.kv_bytes_per_token / 52e9
    assert 32 * 64 / output_limit(COST, MACHINE, work) == pytest.approx(
        32 * 64 / output_limit(without_cache, MACHINE, work) + seconds
    )


def test_the_cost_is_read_from_a_config(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "head_dim": 64,'
        ' "num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49152}'
    )
    assert ModelCost.of_llama(tmp_path) == COST
