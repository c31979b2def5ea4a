"""A checkpoint's files, whatever is in them, but for its tokenizer's."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from charonia.config import EngineArgs
from charonia.data.model.fingerprint import fingerprint
from charonia.data.model.loader import weight_files
from charonia.data.model.spec import ModelSpec
from charonia.data.runner import Runner
from charonia.errors import CheckpointError, ConfigError
from support.fuzzing import (
    DEEP,
    HUGE_INTEGER,
    altered,
    damaged,
    literals,
    little_memory,
    only_clear_errors,
    texts,
)

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4,
    "intermediate_size": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": 8,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-6,
    "eos_token_id": [0, 1],
    "dtype": "float32",
    "tie_word_embeddings": True,
    "sliding_window": 16,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
}
SHAPES = {
    "model.embed_tokens.weight": [8, 4],
    "model.norm.weight": [4],
    "model.layers.0.input_layernorm.weight": [4],
    "model.layers.0.post_attention_layernorm.weight": [4],
    "model.layers.0.self_attn.q_proj.weight": [4, 4],
    "model.layers.0.self_attn.k_proj.weight": [2, 4],
    "model.layers.0.self_attn.v_proj.weight": [2, 4],
    "model.layers.0.self_attn.o_proj.weight": [4, 4],
    "model.layers.0.mlp.gate_proj.weight": [4, 4],
    "model.layers.0.mlp.up_proj.weight": [4, 4],
    "model.layers.0.mlp.down_proj.weight": [4, 4],
}


def tensor(dtype: Any = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
    """What a safetensors header says of a tensor."""
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def safetensors(header: bytes, body: bytes = b"", announced: int | None = None) -> bytes:
    """A file: the header's length, the header, the tensors."""
    length = len(header) if announced is None else announced
    return struct.pack("<Q", length) + header + body


def whole_file() -> bytes:
    """The file that fits CONFIG."""
    header, end = {}, 0
    for name, shape in SHAPES.items():
        start, end = end, end + 4 * torch.Size(shape).numel()
        header[name] = tensor("F32", shape, [start, end])
    return safetensors(json.dumps(header).encode(), b"\0" * end)


WHOLE = whole_file()
HEADER_END = 8 + struct.unpack("<Q", WHOLE[:8])[0]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoint")


PART = "part.safetensors"


def write(
    directory: Path,
    *,
    config: bytes = json.dumps(CONFIG).encode(),
    generation: bytes = b"{}",
    weights: bytes = WHOLE,
    index: bytes | None = None,
) -> Path:
    (directory / "config.json").write_bytes(config)
    (directory / "generation_config.json").write_bytes(generation)
    (directory / "model.safetensors").unlink(missing_ok=True)
    (directory / "model.safetensors.index.json").unlink(missing_ok=True)
    if index is not None:
        (directory / "model.safetensors.index.json").write_bytes(index)
    (directory / ("model.safetensors" if index is None else PART)).write_bytes(weights)
    return directory


def load(directory: Path) -> Runner | None:
    """The engine of a checkpoint; None where there is an error that it may have."""
    args = EngineArgs(model=str(directory), cpu_kernels="torch", max_num_seqs=2, device="cpu")
    with little_memory(), only_clear_errors(CheckpointError, ConfigError, secret=directory):
        return Runner(args, log=lambda line: None)
    return None


def check(directory: Path) -> None:
    """Let every reader have it."""
    load(directory)
    with only_clear_errors(CheckpointError, secret=directory):
        fingerprint(directory)


def test_the_whole_checkpoint_loads(directory: Path) -> None:
    assert load(write(directory)) is not None
    index = json.dumps({"weight_map": dict.fromkeys(SHAPES, PART)}).encode()
    assert load(write(directory, index=index)) is not None


@given(data=altered(CONFIG))
def test_config_json(directory: Path, data: bytes) -> None:
    check(write(directory, config=data))


@given(st.sampled_from(sorted(CONFIG["rope_parameters"])), literals)
def test_the_rope_parameters(directory: Path, name: str, value: str) -> None:
    # Members that come last count, so both are put there.
    parameters = json.dumps(CONFIG["rope_parameters"])[:-1] + f', "{name}": {value}}}'
    text = json.dumps(CONFIG)[:-1] + f', "rope_parameters": {parameters}}}'
    with only_clear_errors(CheckpointError, secret=directory):
        ModelSpec.from_dir(write(directory, config=text.encode()))


@given(data=altered({"eos_token_id": 3}))
def test_generation_config_json(directory: Path, data: bytes) -> None:
    with only_clear_errors(CheckpointError, secret=directory):
        ModelSpec.from_dir(write(directory, generation=data))


@given(data=damaged(WHOLE[:HEADER_END]))
def test_a_damaged_header(directory: Path, data: bytes) -> None:
    check(write(directory, weights=data + WHOLE[HEADER_END:]))


sizes = st.sampled_from([0, 1, 2, 4, 16, 2**31, 2**32, 2**62, 2**63, 2**64, -1, 0.5, "4", None])
tensors = st.builds(
    tensor,
    st.sampled_from(
        ["F32", "BF16", "F64", "I64", "U8", "BOOL", "C64", "F8_E4M3", "F4", "F6_E2M3", "", 4]
    ),
    st.lists(sizes, max_size=4),
    st.lists(sizes, max_size=3),
)


@given(
    header=st.dictionaries(st.one_of(st.sampled_from(sorted(SHAPES)), texts), tensors, max_size=3),
    num_bytes=st.integers(0, 64),
)
def test_a_header_that_describes_anything(
    directory: Path, header: dict[str, Any], num_bytes: int
) -> None:
    data = json.dumps(header).encode()
    check(write(directory, weights=safetensors(data, b"\0" * num_bytes)))


@given(data=altered({"metadata": {"dtype": "float32"}, "weight_map": {"model.norm.weight": PART}}))
def test_the_index(directory: Path, data: bytes) -> None:
    check(write(directory, index=data))


@given(data=altered({"metadata": {"dtype": "float32"}, "weight_map": {"a": PART}}))
def test_the_index_where_config_json_has_no_dtype(directory: Path, data: bytes) -> None:
    values = {key: value for key, value in CONFIG.items() if key != "dtype"}
    check(write(directory, config=json.dumps(values).encode(), index=data))


@given(name=texts)
def test_a_file_that_the_index_names(directory: Path, name: str) -> None:
    data = json.dumps({"weight_map": {"model.norm.weight": name}}).encode()
    with only_clear_errors(CheckpointError, secret=directory):
        weight_files(write(directory, index=data))


CONFIGS: list[dict[str, Any]] = [
    {"hidden_size": 2**40},
    {"num_hidden_layers": 2**31 - 1},
    {"vocab_size": 2**31 - 1},
    {"intermediate_size": 2**31 - 1},
    {"num_attention_heads": 2**30, "head_dim": 2**30},
    {"max_position_embeddings": 2**31 - 1, "sliding_window": None},
    {"rms_norm_eps": 10**400},
    {"architectures": ["x" * 2**20]},
]


@pytest.mark.parametrize("values", CONFIGS, ids=lambda values: str(list(values)))
def test_no_memory_is_taken_for_what_is_only_announced(
    directory: Path, values: dict[str, Any]
) -> None:
    assert load(write(directory, config=json.dumps(CONFIG | values).encode())) is None


WEIGHTS = {
    "a header of 2^60 bytes": safetensors(b"{}", announced=2**60),
    "a header of 2^64 - 1 bytes": safetensors(b"{}", announced=2**64 - 1),
    "a header of 90 MB that did not come": safetensors(b"{}", announced=90 * 10**6),
    "no header": b"",
    "a deep header": safetensors(b'{"a":' * DEEP),
    "a negative offset": safetensors(json.dumps({"a": tensor(offsets=[-4, 0])}).encode()),
    "an offset outside": safetensors(json.dumps({"a": tensor(offsets=[4, 8])}).encode(), b"\0" * 4),
    "the same bytes twice": safetensors(
        json.dumps({"a": tensor(), "b": tensor()}).encode(), b"\0" * 4
    ),
    "a shape whose product overflows": safetensors(
        json.dumps({"a": tensor(shape=[2**32, 2**32], offsets=[0, 0])}).encode()
    ),
    "a shape too large for torch": safetensors(
        json.dumps({"a": tensor(shape=[2**62, 0], offsets=[0, 0])}).encode()
    ),
    "numbers of 4 bits": safetensors(json.dumps({"a": tensor("F4", [2], [0, 1])}).encode(), b"\0"),
    "numbers of 6 bits": safetensors(
        json.dumps({"a": tensor("F6_E2M3", [4], [0, 3])}).encode(), b"\0" * 3
    ),
    "a name twice": safetensors(
        f'{{"a": {json.dumps(tensor())}, "a": {json.dumps(tensor())}}}'.encode(), b"\0" * 4
    ),
    "a long name": safetensors(json.dumps({"x" * 2**20: tensor()}).encode(), b"\0" * 4),
    "a thousand axes": safetensors(json.dumps({"a": tensor(shape=[1] * 1000)}).encode(), b"\0" * 4),
}


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS.keys())
def test_weights_that_are_none(directory: Path, weights: bytes) -> None:
    write(directory, weights=weights)
    assert load(directory) is None
    check(directory)


INDEXES = {
    "deep": b'{"weight_map":' * DEEP,
    "the directory above": b'{"weight_map": {"a": ".."}}',
    "the directory itself": b'{"weight_map": {"a": ""}}',
    "a name that no file can have": b'{"weight_map": {"a": "' + b"x" * 5000 + b'"}}',
    "a zero byte": b'{"weight_map": {"a": "x\\u0000"}}',
    "half a character": b'{"weight_map": {"a": "\\ud800"}}',
    "a list of files": b'{"weight_map": {"a": ["part.safetensors"]}}',
    "a huge number": b'{"weight_map": {"a": ' + HUGE_INTEGER.encode() + b"}}",
}


@pytest.mark.parametrize("index", INDEXES.values(), ids=INDEXES.keys())
def test_an_index_that_is_none(directory: Path, index: bytes) -> None:
    assert load(write(directory, index=index)) is None
