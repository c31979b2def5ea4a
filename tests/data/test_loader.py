"""Loading weights: every tensor to its place, and clear words for what does not fit."""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from charonia.data.comm import Place
from charonia.data.model import loader
from charonia.data.model.loader import load_weights, stored_dtype
from charonia.data.model.parameters import Parameters
from charonia.data.model.shard import vocab_range
from charonia.data.model.spec import ModelSpec
from charonia.errors import CheckpointError

Checkpoint = Callable[..., Path]
WEIGHTS = "model.safetensors"
EMBEDDING = "model.embed_tokens.weight"
WHOLE = Place()


def load(
    model_dir: Path, dtype: torch.dtype = torch.float32, place: Place = WHOLE
) -> tuple[dict[str, list[Tensor]], int, list[str]]:
    """Load a place's part.

    Returns:
        The pieces of each tensor, the number of parameters, and what was logged.
    """
    spec = ModelSpec.from_dir(model_dir)
    parameters = Parameters(spec, dtype, torch.device("cpu"), place)
    lines: list[str] = []
    count = load_weights(
        model_dir, parameters.checkpoint_tensors(), is_tied=spec.is_tied, log=lines.append
    )
    pieces = {
        tensor.name: [piece.memory for piece in tensor.pieces]
        for tensor in parameters.checkpoint_tensors()
    }
    return pieces, count, lines


def assert_is(pieces: list[Tensor], tensor: Tensor, name: str) -> None:
    (piece,) = pieces
    assert torch.equal(piece, tensor), name


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
        assert_is(loaded[name], tensor, name)
    assert count == sum(tensor.numel() for tensor in stored.values())


def test_shards_load_as_the_single_file_does(checkpoint: Checkpoint) -> None:
    sharded = checkpoint("LlamaForCausalLM", max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    whole, _, _ = load(checkpoint("LlamaForCausalLM"))
    parts, _, _ = load(sharded)
    for name, (tensor,) in whole.items():
        assert_is(parts[name], tensor, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_converted_to_the_dtype_asked_for(
    checkpoint: Checkpoint, dtype: torch.dtype
) -> None:
    model_dir = checkpoint("LlamaForCausalLM", dtype="bfloat16")
    loaded, _, _ = load(model_dir, dtype)
    for name, tensor in load_file(model_dir / WEIGHTS).items():
        assert_is(loaded[name], tensor.to(dtype), name)


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


@pytest.mark.parametrize("place", [WHOLE, Place(1, 2), Place(0, 2, 1, 2)])
def test_another_head_in_a_tied_checkpoint_is_refused(
    altered: Callable[..., Path], place: Place
) -> None:
    """transformers would take it, and tell the user to say so in config.json."""

    def add(tensors: dict[str, Tensor]) -> None:
        head = tensors["model.embed_tokens.weight"].clone()
        head[[0, -1]] += 1e-3
        tensors["lm_head.weight"] = head

    model_dir = altered(add, tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match=r"tie_word_embeddings = true, but lm_head\.weight"):
        load(model_dir, place=place)


def test_a_tied_head_of_another_shape_is_refused(altered: Callable[..., Path]) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = torch.zeros(3, 64)

    with pytest.raises(CheckpointError, match=r"lm_head\.weight \(is \[3, 64\], should be"):
        load(altered(add, tie_word_embeddings=True))


def test_a_single_file_counts_and_an_index_beside_it_does_not(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    shutil.copytree(checkpoint(max_shard_size="100KB", seed=1), tmp_path, dirs_exist_ok=True)
    shutil.copy(checkpoint() / WEIGHTS, tmp_path)
    loaded, _, _ = load(tmp_path)
    assert_is(loaded["model.norm.weight"], load_file(tmp_path / WEIGHTS)["model.norm.weight"], "")
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_is(loaded["model.norm.weight"], model.model.norm.weight.data, "transformers")


@pytest.mark.parametrize("settings", [{}, {"max_shard_size": "100KB"}], ids=["file", "shards"])
@pytest.mark.parametrize("named", [None, "float16"])
@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_without_a_dtype_the_stored_tensors_tell_it_as_in_transformers(
    checkpoint: Checkpoint,
    tmp_path: Path,
    settings: dict[str, str],
    named: str | None,
    dtypes: tuple[str, str],
) -> None:
    first, others = (getattr(torch, name) for name in dtypes)
    shutil.copytree(checkpoint(**settings), tmp_path, dirs_exist_ok=True)
    for path in tmp_path.glob("*.safetensors"):
        save_file(
            {
                name: tensor.to(first if "norm" in name else others)
                for name, tensor in load_file(path).items()
            },
            path,
            {"format": "pt"},
        )
    if named is not None and settings:
        path = tmp_path / f"{WEIGHTS}.index.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"metadata": {"dtype": named}}))
    config = json.loads((tmp_path / "config.json").read_text())
    del config["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert ModelSpec.from_dir(tmp_path).dtype is None
    expected = AutoModelForCausalLM.from_pretrained(tmp_path).dtype
    assert getattr(torch, stored_dtype(tmp_path)) is expected
    assert (expected is torch.float16) == (named is not None and bool(settings))


@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
)
@pytest.mark.parametrize("is_tied", [True, False])
def test_the_parameters_of_each_family_are_counted(
    checkpoint: Checkpoint, architecture: str, is_tied: bool
) -> None:
    model_dir = checkpoint(architecture, tie_word_embeddings=is_tied)
    stored = load_file(model_dir / WEIGHTS)
    num_stored = sum(one.numel() for one in stored.values())
    assert ModelSpec.from_dir(model_dir).num_parameters == num_stored


@pytest.mark.parametrize("num_ids", [300, 384, 500])
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_vocabulary_may_be_cut_or_filled_up_with_zeros(
    checkpoint: Checkpoint, num_ids: int, is_tied: bool
) -> None:
    model_dir = checkpoint(tie_word_embeddings=is_tied)
    spec = ModelSpec.from_dir(model_dir)
    stored = load_file(model_dir / WEIGHTS)
    for place in (WHOLE, *(Place(part, 4) for part in range(4))):
        other = spec.with_vocabulary(num_ids)
        assert other.num_parameters == spec.num_parameters
        parameters = Parameters(other, torch.float32, torch.device("cpu"), place)
        tensors = list(parameters.checkpoint_tensors())
        load_weights(model_dir, tensors, is_tied=is_tied, log=lambda line: None)
        ids = vocab_range(other, place)
        for name, memory in (("embed_tokens", parameters.embedding), ("head", parameters.head)):
            assert memory is not None
            whole = stored["lm_head.weight" if name == "head" and not is_tied else EMBEDDING]
            here = whole[:num_ids][ids.start : ids.stop]
            assert len(memory) == len(ids)
            assert torch.equal(memory[: len(here)], here)
            assert not memory[len(here) :].any()


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
        ({f"{WEIGHTS}.index.json": b"["}, "model.safetensors.index.json is not JSON"),
        ({f"{WEIGHTS}.index.json": b"[]"}, "must be a JSON object, but is \\[\\]"),
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


class Recorder:
    """A safetensors file that counts the elements which are taken from each of its tensors."""

    def __init__(self, taken: Counter[str], *args: Any, **settings: Any) -> None:
        self._taken = taken
        self._file = safe_open(*args, **settings)

    def __enter__(self) -> Self:
        self._file.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.__exit__(kind, error, traceback)

    def keys(self) -> list[str]:
        return list(self._file.keys())

    def get_slice(self, name: str) -> "RecorderSlice":
        return RecorderSlice(self._taken, name, self._file.get_slice(name))


class RecorderSlice:
    def __init__(self, taken: Counter[str], name: str, stored: Any) -> None:
        self._taken, self._name, self._stored = taken, name, stored
        self.get_shape, self.get_dtype = stored.get_shape, stored.get_dtype

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        tensor: Tensor = self._stored[index]
        self._taken[self._name] += tensor.numel()
        return tensor


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many elements of each tensor the loader has taken from files."""
    counts: Counter[str] = Counter()

    def opened(*args: Any, **settings: Any) -> Recorder:
        return Recorder(counts, *args, **settings)

    monkeypatch.setattr(loader, "safe_open", opened)
    return counts


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_rank_reads_its_own_part_alone(
    checkpoint: Checkpoint, taken: Counter[str], part: int, stage: int
) -> None:
    model_dir = checkpoint("LlamaForCausalLM")
    _, count, _ = load(model_dir, place=Place(part, 2, stage, 2))
    wanted = {
        name: tensor.numel() // (2 if tensor.dim() == 2 else 1)  # norms are on every rank
        for name, tensor in load_file(model_dir / WEIGHTS).items()
        if name.startswith(
            ("model.embed_tokens.", "model.layers.0.")
            if stage == 0
            else ("model.layers.1.", "model.norm.", "lm_head.")
        )
    }
    assert taken == wanted
    assert count == sum(wanted.values())


def test_one_rank_alone_reads_everything_once(checkpoint: Checkpoint, taken: Counter[str]) -> None:
    model_dir = checkpoint("Qwen2ForCausalLM")
    load(model_dir)
    stored = load_file(model_dir / WEIGHTS)
    assert taken == {name: tensor.numel() for name, tensor in stored.items()}


def test_progress_is_that_of_the_ranks_own_bytes(checkpoint: Checkpoint) -> None:
    model_dir = checkpoint("LlamaForCausalLM", intermediate_size=1024)
    _, count, lines = load(model_dir, place=Place(part=1, num_parts=4))
    assert lines[-1] == f"loading weights: 100 % of {count * 4 / 2**20:.1f} MiB"


@pytest.mark.parametrize("stage", [0, 1])
def test_every_rank_refuses_what_is_wrong_with_any_part(
    altered: Callable[..., Path], taken: Counter[str], stage: int
) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.0.self_attn.k_proj.bias"] = torch.zeros(32)
        tensors["model.norm.weight"] = torch.zeros(65)
        tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(64, 64)

    with pytest.raises(CheckpointError) as caught:
        load(altered(spoil), place=Place(0, 2, stage, 2))
    text = str(caught.value)
    assert "missing tensors: model.layers.1.mlp.up_proj.weight;" in text
    assert "unknown tensors: model.layers.0.self_attn.k_proj.bias;" in text
    assert "model.norm.weight (is [65], should be [64])" in text
    assert "model.layers.0.mlp.up_proj.weight (is [64, 64], should be [128, 64])" in text
    assert not taken
