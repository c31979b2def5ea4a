"""Fingerprints of checkpoints, without reading them whole.

Owns what is compared between machines that have parts of one model. Must not know ranks.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from charonia.checkpoint_files import read_json_object
from charonia.data.model.loader import open_weights, weight_files
from charonia.errors import CheckpointError, shown

_SAMPLE = 16
"""Numbers of each tensor that are compared. Two trained models have none of them in common."""


def fingerprint(model_dir: Path) -> dict[str, str]:
    """Digests of a checkpoint's configuration, tensors (names, types, shapes) and weights.

    Of the weights only a few numbers from the middle of each tensor count. The digests do not
    depend on how tensors are split among files.

    Raises:
        CheckpointError: files are missing or damaged.
    """
    described, sampled = [], []
    for path in weight_files(model_dir):
        with open_weights(path) as file:
            for name in file.keys():  # noqa: SIM118 (a file has keys(), but is no mapping)
                tensor = file.get_slice(name)
                shape = tensor.get_shape()
                described.append(f"{name} {tensor.get_dtype()} {shape}\n".encode())
                try:
                    sampled.append(name.encode() + _sample(tensor))
                except (SafetensorError, RuntimeError):  # a type or shape that torch does not have
                    raise CheckpointError(
                        f"{path.name}: tensor {shown(name)} of type {tensor.get_dtype()} and"
                        f" shape {shown(shape)} cannot be read"
                    ) from None
    configuration = read_json_object(model_dir / "config.json")
    return {
        "config.json": _digest([json.dumps(configuration, sort_keys=True).encode()]),
        "the tensors' names, types or shapes": _digest(sorted(described)),
        "the weights": _digest(sorted(sampled)),
    }


def _sample(tensor: Any) -> bytes:
    """Read a few numbers from the middle of a file's tensor."""
    shape = tensor.get_shape()
    index = tuple(slice(length // 2, length // 2 + 1) for length in shape[:-1])
    if shape:
        start = max(shape[-1] - _SAMPLE, 0) // 2
        index = (*index, slice(start, start + _SAMPLE))
    numbers: Tensor = tensor[index]
    return numbers.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _digest(parts: list[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()
