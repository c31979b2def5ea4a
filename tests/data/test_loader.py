"""Loading weights: every tensor to its place, and clear words for what does not fit."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from charonia.data.model.loader import load_weights
from charonia.data.model.parameters import Parameters
from charonia.data.model.spec import ModelSpec
from charonia.errors import CheckpointError

Checkpoint = Callable[..., Path]
WEIGHTS = "model.safetensors"


def load(
    model_dir: Path, dtype: torch.dtype = torch.float32
) -> tuple[dict[str, Tensor], int, list[str]]:
    spec = ModelSpec.from_dir(model_dir)
    parameters = Parameters(spec, dtype, torch.device("cpu"))
    lines: list[str] = []
    count = load_weights(
        model_dir, parameters.checkpoint_tensors(), is_tied=spec.is_tied, log=lines.append
    )
    return dict(parameters.checkpoint_tensors()), count, lines


@pytest.fixture
def altered(checkpoint: Checkpoint, tmp_path: Path) -> Callable[..., Path]:
    """A copy of a checkpoint whose tensors went through a function."""

    def make(change: Callable[[dict[str, Tensor]], None], **settings: object) -> Path:
        source = checkpoint("LlamaForCausalLM", **settings)
        shutil.copytree(source, tmp_path, dirs_exist_ok=True)
        tensors = load_file(source / WEIGHTS)
        change(tensors)
        save_file(tensors, tmp_path / WEIGHTS)
        return tmp_path

    return make


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM"])
def test_every_tensor_of_the_file_is_where_it_belongs(
    checkpoint: Checkpoint, architecture: str
) -> None:
    model_dir = checkpoint(architecture)
    stored = load_file(model_dir / WEIGHTS)
    loaded, count, _ = load(model_dir)
    assert loaded.keys() == stored.keys()
    for name, tensor in stored.items():
        assert torch.equal(loaded[name], tensor), name
    assert count == sum(tensor.numel() for tensor in stored.values())


def test_shards_load_as_the_single_file_does(checkpoint: Checkpoint) -> None:
    sharded = checkpoint("LlamaForCausalLM", max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    whole, _, _ = load(checkpoint("LlamaForCausalLM"))
    parts, _, _ = load(sharded)
    assert all(torch.equal(parts[name], tensor) for name, tensor in whole.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_converted_to_the_dtype_asked_for(
    checkpoint: Checkpoint, dtype: torch.dtype
) -> None:
    model_dir = checkpoint("LlamaForCausalLM", dtype="bfloat16")
    loaded, _, _ = load(model_dir, dtype)
    for name, tensor in load_file(model_dir / WEIGHTS).items():
        assert torch.equal(loaded[name], tensor.to(dtype)), name


def test_progress_is_logged_in_tenths(checkpoint: Checkpoint) -> None:
    _, _, lines = load(checkpoint("LlamaForCausalLM"))
    assert 1 < len(lines) <= 10
    assert lines[-1] == "loading weights: 100 % of 0.5 MiB"


def test_a_tied_model_counts_its_embedding_once(checkpoint: Checkpoint) -> None:
    _, tied, _ = load(checkpoint("LlamaForCausalLM", tie_word_embeddings=True))
    _, untied, _ = load(checkpoint("LlamaForCausalLM"))
    assert untied - tied == 384 * 64


def test_leftovers_of_old_checkpoints_are_tolerated(altered: Callable[..., Path]) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    load(altered(add, tie_word_embeddings=True))


def test_all_that_does_not_fit_is_named_at_once(altered: Callable[..., Path]) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(128, 64)
        tensors["model.norm.weight"] = torch.zeros(65)
        tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(128, 64, dtype=torch.int8)

    with pytest.raises(CheckpointError) as caught:
        load(altered(spoil))
    text = str(caught.value)
    assert "missing tensors: model.layers.1.mlp.up_proj.weight;" in text
    assert "unknown tensors: model.layers.2.mlp.up_proj.weight;" in text
    assert "model.norm.weight (is [65], should be [64])" in text
    assert "not of F32, BF16, F16: model.layers.0.mlp.up_proj.weight (I8)" in text


def test_a_long_list_of_names_is_cut(altered: Callable[..., Path]) -> None:
    with pytest.raises(CheckpointError, match=r"missing tensors: model.embed.* and 1 more"):
        load(altered(dict.clear))


def test_a_bias_that_the_configuration_does_not_know_is_refused(
    altered: Callable[..., Path],
) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)

    with pytest.raises(CheckpointError, match=r"unknown tensors: .*q_proj\.bias"):
        load(altered(add))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "neither model.safetensors nor model.safetensors.index.json"),
        ({WEIGHTS: b"no"}, "model.safetensors cannot be read"),
        ({f"{WEIGHTS}.index.json": b"{}"}, "is not a JSON object with a weight_map"),
        ({f"{WEIGHTS}.index.json": b"["}, "is not a JSON object with a weight_map"),
        ({f"{WEIGHTS}.index.json": b"[]"}, "is not a JSON object with a weight_map"),
        (
            {f"{WEIGHTS}.index.json": json.dumps({"weight_map": {"a": "x.safetensors"}}).encode()},
            "lacks x.safetensors",
        ),
        (
            {f"{WEIGHTS}.index.json": json.dumps({"weight_map": {"a": "../x"}}).encode()},
            "'../x', which is not a plain file name",
        ),
    ],
)
def test_missing_and_damaged_files_are_named_without_their_path(
    checkpoint: Checkpoint, tmp_path: Path, files: dict[str, bytes], message: str
) -> None:
    shutil.copy(checkpoint("LlamaForCausalLM") / "config.json", tmp_path)
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        load(tmp_path)
    assert str(tmp_path) not in str(caught.value)
