"""Writes a Llama checkpoint of Hugging Face as a GGUF file, in float16, bfloat16 or Q8_0.

Owns the names and the one layout that differ: llama.cpp rotates neighbouring pairs of a head's
dimensions, Hugging Face rotates halves, so the rows of the query and key matrices are permuted.
The tokenizer in the file only counts: every id gets some text, prompts come as ids. Norms are
float32, as in llama.cpp's own conversion. `gguf` is there in llama.cpp's environment only, so it is
imported where a file is written.
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from gguf import GGUFWriter

_LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
Q8_0_VALUES = 32
"""Values of a block."""
_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(checkpoint: Path, target: Path, kind: str) -> Path:
    """Write the file unless it is there.

    Args:
        checkpoint: a directory with config.json and *.safetensors.
        kind: of the matrices, "f16", "bf16" or "q8_0".

    Raises:
        ValueError: the checkpoint is not a plain Llama in bfloat16, or a matrix cannot be cut into
            blocks.
    """
    if target.exists():
        return target
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] != "llama" or config.get("rope_scaling"):
        raise ValueError("only Llama checkpoints without rope_scaling can be written as GGUF")
    from gguf import GGUFWriter

    unfinished = target.with_suffix(".unfinished")
    writer = GGUFWriter(unfinished, "llama")
    _add_metadata(writer, config, kind)
    for name, values in _tensors(checkpoint):
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        for part, num_heads in (
            ("q_proj", config["num_attention_heads"]),
            ("k_proj", config["num_key_value_heads"]),
        ):
            if part in name:
                values = permuted(values, num_heads)
        _add_tensor(writer, gguf_name(name), values, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(target)
    return target


def gguf_name(name: str) -> str:
    """Return GGUF's name of a tensor of the checkpoint."""
    stem = name.removesuffix(".weight")
    if stem in _NAMES:
        return f"{_NAMES[stem]}.weight"
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_LAYER_NAMES[part]}.weight"


def permuted(weight: np.ndarray, num_heads: int) -> np.ndarray:  # [heads * head_dim, hidden]
    """Rows of each head from halves (0 … d/2, d/2 … d) to neighbouring pairs."""
    halves = weight.reshape(num_heads, 2, -1, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def _add_metadata(writer: "GGUFWriter", config: dict[str, Any], kind: str) -> None:
    from gguf import LlamaFileType, TokenType

    kinds = {
        "f16": LlamaFileType.MOSTLY_F16,
        "bf16": LlamaFileType.MOSTLY_BF16,
        "q8_0": LlamaFileType.MOSTLY_Q8_0,
    }
    writer.add_file_type(kinds[kind])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    vocab_size = config["vocab_size"]
    writer.add_vocab_size(vocab_size)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"t{index}" for index in range(vocab_size)])
    writer.add_token_scores([0.0] * vocab_size)
    writer.add_token_types([TokenType.NORMAL] * vocab_size)
    writer.add_eos_token_id(config["eos_token_id"])


def _add_tensor(writer: "GGUFWriter", name: str, values: np.ndarray, kind: str) -> None:
    """`values` are bfloat16 as uint16."""
    from gguf import GGMLQuantizationType

    if values.ndim == 1:
        writer.add_tensor(name, as_float32(values))
    elif kind == "f16":
        writer.add_tensor(name, as_float32(values).astype(np.float16))
    elif kind == "q8_0":
        blocks = as_q8_0(as_float32(values))
        writer.add_tensor(name, blocks, raw_dtype=GGMLQuantizationType.Q8_0)
    else:
        writer.add_tensor(name, values.view(np.uint8), raw_dtype=GGMLQuantizationType.BF16)


def as_float32(values: np.ndarray) -> np.ndarray:
    """bfloat16 as uint16 is the upper half of float32."""
    return (values.astype(np.uint32) << 16).view(np.float32)


def as_q8_0(values: np.ndarray) -> np.ndarray:  # [rows, columns] -> [rows, columns / 32 * 34]
    """Bytes of GGML's type Q8_0: blocks of 32 values of a row, each a float16 scale and 32 int8.

    The scale is the largest magnitude over 127, and a value the nearest integer to itself over the
    scale before that was rounded, halves away from zero (`quantize_row_q8_0_ref` in ggml-quants.c).

    Raises:
        ValueError: rows are no whole number of blocks.
    """
    if values.shape[1] % Q8_0_VALUES:
        raise ValueError(f"Q8_0 takes rows of a multiple of {Q8_0_VALUES} values; {values.shape}")
    blocks = values.astype(np.float32).reshape(-1, Q8_0_VALUES)
    scales = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    scaled = np.divide(blocks, scales, out=np.zeros_like(blocks), where=scales > 0)
    integers = np.trunc(scaled + np.copysign(np.float32(0.5), scaled)).astype(np.int8)
    packed = np.concatenate([scales.astype("<f2").view(np.uint8), integers.view(np.uint8)], axis=1)
    return packed.reshape(len(values), -1)


def _tensors(checkpoint: Path) -> Iterator[tuple[str, np.ndarray]]:
    """All tensors as uint16. NumPy has no bfloat16, so the files are mapped by their header."""
    for path in sorted(checkpoint.glob("*.safetensors")):
        with path.open("rb") as file:
            (header_size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(header_size))
        data = np.memmap(path, mode="r", offset=8 + header_size)
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if entry["dtype"] != "BF16":
                raise ValueError(f"{name} is {entry['dtype']}; only BF16 can be written as GGUF")
            begin, end = entry["data_offsets"]
            yield name, data[begin:end].view(np.uint16).reshape(entry["shape"])
