"""Everything that a block's content depends on besides its key.

It keeps an engine from loading blocks of a different one.

Owns the list of these facts, and their names. Must not know where contents are stored.
"""

import hashlib
import os
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from charonia.config import EngineArgs
from charonia.data.basis import Basis
from charonia.data.comm import Place
from charonia.data.loaded_models import Models
from charonia.data.model.fingerprint import fingerprint
from charonia.data.model.loader import weight_files
from charonia.version import VERSION

_PACKAGE = Path(__file__).parents[2]
_Facts = dict[str, str]
"""Facts by name."""
_DIGEST = "digest "
"""Prefix of values that mean nothing to a reader."""


class Identity(NamedTuple):
    """Everything that a block's content depends on besides its key.

    Attributes:
        engine: facts common to all ranks of an engine. part: facts of one rank.
    """

    engine: bytes
    part: bytes


def identity_of(basis: Basis, models: Models, place: Place) -> Identity:
    """The identity of one rank's blocks.

    Raises:
        CheckpointError: files of a checkpoint are missing or damaged.
    """
    args, kernels = basis.args, basis.kernels
    layout = models.target.layout
    engine: _Facts = {
        "version of charonia": VERSION,
        "sources of charonia": _digest_of_sources(),
        "what computes": Path(kernels.__file__ or "").stem
        if kernels
        else f"torch {torch.__version__}",
        "device": basis.device.type,
        "dtype": str(basis.dtype),
        "quantization": str(args.quantization),
        "kv_cache_dtype": layout.dtype,
        "block_size": str(layout.block_size),
        "tensor_parallel_size": str(args.tensor_parallel_size),
        "pipeline_parallel_size": str(args.pipeline_parallel_size),
        "draft_tensor_parallel_size": str(args.draft_ranks),
        **_checkpoint(Path(args.model), "the checkpoint"),
    }
    draft = args.speculative_config
    if draft is not None and draft.model is not None:
        engine["quantization of the draft model"] = str(draft.quantization)
        engine |= _checkpoint(Path(draft.model), "the draft model")
    layouts = [model.layout for model in (models.target, models.draft) if model is not None]
    encode = msgspec.msgpack.encode
    return Identity(encode(engine), encode([repr(place), layouts]))


def label_of(args: EngineArgs, place: Place) -> str:
    """A label of a rank, equal for all engines with the same path of the checkpoint."""
    path = hashlib.blake2b(os.fsencode(os.path.realpath(args.model)), digest_size=16)
    return f"{path.hexdigest()} {place.part} {place.stage}"


def differences(found: bytes, own: bytes) -> str:
    """Describe how an engine differs from this one.

    Args:
        found, own: `Identity.engine` of both.
    """
    try:
        there, here = (msgspec.msgpack.decode(one, type=_Facts) for one in (found, own))
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return "it is of a version that records this differently"
    words = []
    for name in [*here, *(there.keys() - here.keys())]:
        old, new = there.get(name), here.get(name)
        if old == new:
            continue
        is_digest = _DIGEST in f"{old} {new}"
        words.append(name if is_digest else f"{name} (there {old}, here {new})")
    return "another " + ", another ".join(words)


def _digest_of_sources() -> str:
    """Digest of this package, which computes K and V, defines their layout and their keys."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(_PACKAGE.rglob("*.py")):
        digest.update(hashlib.blake2b(path.read_bytes()).digest())
    return _DIGEST + digest.hexdigest()


def _checkpoint(model_dir: Path, name: str) -> _Facts:
    """Facts that identify a checkpoint, and its version."""
    facts: _Facts = {
        f"{what} of {name}": _DIGEST + one for what, one in fingerprint(model_dir).items()
    }
    files = {path.name: path.stat() for path in weight_files(model_dir)}
    written = [(file, status.st_size, status.st_mtime_ns) for file, status in sorted(files.items())]
    digest = hashlib.blake2b(msgspec.msgpack.encode(written), digest_size=16)
    what = f"size or time of the last change of a file of {name}"
    return facts | {what: _DIGEST + digest.hexdigest()}
