"""Checkpoints are told apart by a few bytes of each tensor, and only where they differ."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from charonia.data.model.fingerprint import fingerprint
from charonia.errors import CheckpointError

CONFIG, TENSORS, WEIGHTS = "config.json", "the tensors' names, types or shapes", "the weights"
Tensors = dict[str, torch.Tensor]


def write(model_dir: Path, tensors: Tensors, config: str = '{"a": 1, "b": 2}') -> Path:
    model_dir.mkdir()
    (model_dir / "config.json").write_text(config)
    save_file(tensors, model_dir / "model.safetensors")
    return model_dir


def tensors() -> Tensors:
    return {
        "matrix": torch.arange(600.0).view(20, 30),
        "experts": torch.ones(3, 4, 50, dtype=torch.bfloat16),
        "short": torch.ones(3, dtype=torch.float16),
        "number": torch.tensor(3.0),
        "nothing": torch.zeros(0),
    }


def changed(**values: torch.Tensor) -> Tensors:
    return tensors() | values


@pytest.mark.parametrize(
    ("others", "different"),
    [
        (tensors(), []),
        (changed(number=torch.tensor(4.0)), [WEIGHTS]),
        (changed(matrix=torch.arange(600.0).view(20, 30) + 1), [WEIGHTS]),
        (changed(short=torch.ones(3, dtype=torch.bfloat16)), [TENSORS, WEIGHTS]),
        (changed(experts=torch.ones(4, 3, 50, dtype=torch.bfloat16)), [TENSORS]),
        (changed(more=torch.zeros(0)), [TENSORS, WEIGHTS]),
    ],
)
def test_what_differs_is_named(tmp_path: Path, others: Tensors, different: list[str]) -> None:
    ours = fingerprint(write(tmp_path / "ours", tensors()))
    theirs = fingerprint(write(tmp_path / "theirs", others))
    assert [what for what in ours if ours[what] != theirs[what]] == different


def test_the_configuration_counts_and_its_spelling_does_not(tmp_path: Path) -> None:
    one, same, other = (
        fingerprint(write(tmp_path / str(number), tensors(), config))
        for number, config in enumerate(('{"a": 1, "b": 2}', '{"b":2,"a":1}', '{"a": 1, "b": 3}'))
    )
    assert one == same
    assert [what for what in one if one[what] != other[what]] == [CONFIG]


def test_how_tensors_are_shared_out_among_files_does_not_matter(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    whole = load_file(checkpoint() / "model.safetensors")
    (tmp_path / "config.json").write_bytes((checkpoint() / "config.json").read_bytes())
    names = sorted(whole)
    files = {name: f"part-{index % 2}.safetensors" for index, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: whole[name] for name in names if files[name] == file}, tmp_path / file)
    index = json.dumps({"weight_map": files})
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert fingerprint(tmp_path) == fingerprint(checkpoint())


def test_a_checkpoint_without_files_has_none(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither"):
        fingerprint(tmp_path)
    (write(tmp_path / "one", tensors()) / "config.json").unlink()
    with pytest.raises(CheckpointError, match="config"):
        fingerprint(tmp_path / "one")
