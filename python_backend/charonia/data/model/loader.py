"""Fills a rank's parameters from safetensors files.

Owns the files: which exist, what they must contain, in which order they are read. Files are
memory-mapped, and only what this rank needs is copied, one tensor at a time. Parts of other ranks
are not read, except by the operating system's read-ahead. Must not know layers or ranks: the
parameters name the tensors that fill them (`Parameters.checkpoint_tensors`).
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from charonia.checkpoint_files import read_json_object
from charonia.data.model.checkpoint_tensors import CheckpointTensor
from charonia.errors import CheckpointError, shown

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
STORED_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_MAX_NAMES_SHOWN = 20
_MAX_REASON = 200  # characters


def load_weights(
    model_dir: Path,
    tensors: Iterable[CheckpointTensor],
    *,
    is_tied: bool,
    log: Callable[[str], None],
) -> int:
    """Copy all needed pieces from a checkpoint, converting their dtype.

    All names and shapes are checked before the first copy, even of tensors that this rank does not
    need. Rotary frequency buffers of old checkpoints are ignored.

    If the configuration ties the head to the embedding, the checkpoint may still have an
    `lm_head.weight`, but it must be equal to the embedding. transformers does not tie them if they
    differ; set tie_word_embeddings to false then.

    Args:
        tensors: all tensors that the checkpoint must have.

    Returns:
        Number of parameters filled.

    Raises:
        CheckpointError: files are missing or damaged; tensors are missing, unknown, of another
            shape or of an unsupported type, which the text names; or a tied head differs from the
            embedding.
    """
    wanted = {tensor.name: tensor for tensor in tensors}
    with ExitStack() as stack:
        files = [stack.enter_context(open_weights(path)) for path in weight_files(model_dir)]
        sources = {
            name: file
            for file in files
            for name in file.keys()  # noqa: SIM118 (a file has keys(), but is no mapping)
            if not name.endswith("rotary_emb.inv_freq")
        }
        memory = [piece.memory for tensor in wanted.values() for piece in tensor.pieces]
        tied = {_HEAD: replace(wanted[_EMBEDDING], name=_HEAD)} if is_tied else {}
        _check(sources, wanted, tied)
        progress = _Progress(sum(tensor.nbytes for tensor in memory), log)
        # In the order of the files, to make use of read-ahead.
        for name, file in sources.items():
            if name in tied:
                continue
            for piece in wanted[name].pieces:
                piece.memory.copy_(file.get_slice(name)[piece.index])
                progress.add(piece.memory)
        for name, tensor in tied.items():
            if name in sources:
                _check_tied(tensor, sources[name])
    return sum(tensor.numel() for tensor in memory)


def weight_files(model_dir: Path) -> list[Path]:
    """The safetensors files of a checkpoint.

    As in transformers, a single file takes precedence over an index.

    Raises:
        CheckpointError: some or all files are missing.
    """

    # Unlike the methods of Path this accepts any name.
    def is_there(name: str) -> bool:
        return os.path.isfile(model_dir / name)

    if is_there(SINGLE_NAME):
        return [model_dir / SINGLE_NAME]
    if not is_there(INDEX_NAME):
        raise CheckpointError(f"the checkpoint has neither {SINGLE_NAME} nor {INDEX_NAME}")
    weight_map = read_json_object(model_dir / INDEX_NAME).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{INDEX_NAME} is not a JSON object with a weight_map")
    for name in weight_map.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(
                f"{INDEX_NAME} names {shown(name)}, which is not a plain file name"
            )
    names = sorted(set(weight_map.values()))
    if missing := [name for name in names if not is_there(name)]:
        raise CheckpointError(f"the checkpoint lacks {_some(missing)}")
    return [model_dir / name for name in names]


def stored_dtype(model_dir: Path) -> str:
    """The dtype of a checkpoint's tensors, for configurations without one.

    As in transformers it is the dtype that the index names, or that of the first floating-point
    tensor of the first file.

    Raises:
        CheckpointError: files are missing or damaged, or the dtype is not supported.
    """
    first, *_ = weight_files(model_dir)
    if first.name != SINGLE_NAME:
        metadata = read_json_object(model_dir / INDEX_NAME).get("metadata")
        if isinstance(metadata, dict) and "dtype" in metadata:
            return _checked_dtype(metadata["dtype"], INDEX_NAME)
    with open_weights(first) as file:
        stored = [file.get_slice(name).get_dtype() for name in file.keys()]  # noqa: SIM118
    floating = (name for name in stored if name in STORED_DTYPES or name == "F64")
    return _checked_dtype(STORED_DTYPES.get(next(floating, ""), stored[:1]), first.name)


def _checked_dtype(name: object, where: str) -> str:
    if name not in STORED_DTYPES.values():
        raise CheckpointError(
            f"config.json has no dtype, and that of {where} is {shown(name)}; accepted are"
            f" {', '.join(STORED_DTYPES.values())}"
        )
    return str(name)


def check_size(model_dir: Path, num_parameters: int) -> None:
    """Check that the files can contain a model, before its memory is allocated.

    Raises:
        CheckpointError: files are missing, or have less than one byte per parameter.
    """
    num_bytes = sum(path.stat().st_size for path in weight_files(model_dir))
    if num_bytes < num_parameters:
        raise CheckpointError(
            f"config.json describes a model of {num_parameters} parameters, but the checkpoint's"
            f" weights have {num_bytes} bytes"
        )


def open_weights(path: Path) -> Any:
    """Map a safetensors file; returns a context manager.

    Raises:
        CheckpointError: the file is damaged, or is not a safetensors file.
    """
    try:
        return safe_open(path, framework="pt", device="cpu")
    except SafetensorError as error:
        raise CheckpointError(f"{path.name} cannot be read: {str(error)[:_MAX_REASON]}") from None
    except OSError as error:  # its text contains the path
        raise CheckpointError(f"{path.name} cannot be read: {type(error).__name__}") from None


def _check_tied(tensor: CheckpointTensor, file: Any) -> None:
    """Check that an optional tensor is equal to what its memory was filled with."""
    for piece in tensor.pieces:
        stored = file.get_slice(tensor.name)[piece.index].to(piece.memory)
        if not torch.equal(stored, piece.memory):
            raise CheckpointError(
                f"config.json has tie_word_embeddings = true, but {tensor.name} is not"
                f" {_EMBEDDING}; set it to false, or leave {tensor.name} out"
            )


def _check(
    sources: dict[str, Any],
    wanted: dict[str, CheckpointTensor],
    optional: dict[str, CheckpointTensor],
) -> None:
    known = wanted | optional
    problems = []
    if missing := [name for name in wanted if name not in sources]:
        problems.append(f"missing tensors: {_some(missing)}")
    if unknown := [name for name in sources if name not in known]:
        problems.append(f"unknown tensors: {_some(unknown)}")
    if misshapen := list(_misshapen(sources, known)):
        problems.append(f"tensors of the wrong shape: {_some(misshapen)}")
    if untyped := [
        f"{name} ({dtype})"
        for name, file in sources.items()
        if (dtype := file.get_slice(name).get_dtype()) not in STORED_DTYPES
    ]:
        problems.append(f"tensors not of {', '.join(STORED_DTYPES)}: {_some(untyped)}")
    if problems:
        raise CheckpointError("the checkpoint does not fit the model: " + "; ".join(problems))


def _misshapen(sources: dict[str, Any], wanted: dict[str, CheckpointTensor]) -> Iterator[str]:
    for name, tensor in wanted.items():
        if name in sources:
            found = list(sources[name].get_slice(name).get_shape())
            if found != list(tensor.shape):
                yield f"{name} (is {shown(found)}, should be {list(tensor.shape)})"


def _some(names: list[str]) -> str:
    some = ", ".join(map(_legible, names[:_MAX_NAMES_SHOWN]))
    left_out = len(names) - _MAX_NAMES_SHOWN
    return f"{some} and {left_out} more" if left_out > 0 else some


def _legible(name: str) -> str:
    """A tensor's name, escaped if it is not printable or very long."""
    return name if name.isprintable() and len(name) <= _MAX_REASON else shown(name)


@dataclass
class _Progress:
    """Logs each tenth of the bytes."""

    total: int
    log: Callable[[str], None]
    done: int = 0
    tenths: int = 0

    def add(self, tensor: Tensor) -> None:
        self.done += tensor.nbytes
        tenths = 10 * self.done // self.total
        if tenths > self.tenths:
            self.tenths = tenths
            self.log(f"loading weights: {10 * tenths} % of {self.total / 2**20:.1f} MiB")
