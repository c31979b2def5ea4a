"""What differs between Hugging Face's files and GGUF: names, and which rows rotate together."""

import numpy as np
from gguf_file import as_float32, gguf_name, permuted

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
