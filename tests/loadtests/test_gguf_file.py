"""What differs between Hugging Face's files and GGUF: names, and which rows rotate together."""

import numpy as np
import pytest
from gguf_file import as_float32, as_q8_0, gguf_name, permuted

HEADS, HEAD_DIM, HIDDEN = 3, 8, 5
ANGLES = np.arange(1, HEAD_DIM // 2 + 1) * 0.3


def rotate(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rotate each pair by its angle."""
    cos, sin = np.cos(ANGLES), np.sin(ANGLES)
    return first * cos - second * sin, first * sin + second * cos


def test_permuted_rows_rotated_in_pairs_are_the_rows_rotated_in_halves():
    generator = np.random.default_rng(0)
    weight = generator.standard_normal((HEADS * HEAD_DIM, HIDDEN))
    hidden = generator.standard_normal(HIDDEN)
    plain = (weight @ hidden).reshape(HEADS, HEAD_DIM)
    paired = (permuted(weight, HEADS) @ hidden).reshape(HEADS, HEAD_DIM)

    halves = rotate(plain[:, : HEAD_DIM // 2], plain[:, HEAD_DIM // 2 :])
    pairs = rotate(paired[:, 0::2], paired[:, 1::2])

    np.testing.assert_allclose(pairs, halves)


def test_tensors_have_their_gguf_names():
    assert gguf_name("model.embed_tokens.weight") == "token_embd.weight"
    assert gguf_name("model.layers.12.self_attn.q_proj.weight") == "blk.12.attn_q.weight"
    assert gguf_name("model.layers.0.input_layernorm.weight") == "blk.0.attn_norm.weight"


def test_bfloat16_is_widened_exactly():
    assert as_float32(np.array([0x3F80, 0xC000, 0x3EA0], dtype=np.uint16)).tolist() == [
        1.0,
        -2.0,
        0.3125,
    ]


def test_q8_0_is_a_half_and_32_integers_per_block():
    rows = np.zeros((2, 64), dtype=np.float32)
    rows[0, :32] = np.arange(32) - 16.0
    rows[0, 32:] = 127.0 * np.linspace(-1, 1, 32)
    rows[1, 5] = 2.5
    packed = as_q8_0(rows)
    assert packed.dtype == np.uint8
    assert packed.shape == (2, 2 * 34)
    blocks = packed.reshape(4, 34)
    scales = blocks[:, :2].copy().view("<f2").ravel()
    integers = blocks[:, 2:].view(np.int8)
    assert scales.tolist() == np.array([16 / 127, 1, 2.5 / 127, 0], dtype=np.float16).tolist()
    assert integers[0, :3].tolist() == [-127, -119, -111]
    assert integers[2].tolist() == [0] * 5 + [127] + [0] * 26
    assert not integers[3].any()
    back = integers * scales[:, None].astype(np.float32)
    assert np.abs(back.reshape(2, 64) - rows).max() <= 0.51


def test_halves_are_rounded_away_from_zero():
    row = np.zeros((1, 32), dtype=np.float32)
    row[0, :5] = [127, 0.5, -0.5, 1.5, -2.5]
    assert as_q8_0(row)[0, 2:7].view(np.int8).tolist() == [127, 1, -1, 2, -3]


def test_rows_that_are_no_whole_number_of_blocks_are_refused():
    with pytest.raises(ValueError, match=r"multiple of 32 values; \(2, 40\)"):
        as_q8_0(np.ones((2, 40), dtype=np.float32))
