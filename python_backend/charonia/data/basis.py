"""Everything that a rank of an engine knows before it loads weights.

Owns computing shapes, dtype, device and operations from the engine's arguments, with the same
result on every rank. Must not know weights, plans, or how ranks find each other.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from charonia.config import EngineArgs
from charonia.data.model.loader import stored_dtype
from charonia.data.model.spec import ModelSpec
from charonia.data.ops.base import Ops
from charonia.data.ops.select import select_ops
from charonia.errors import CheckpointError, ConfigError


@dataclass(frozen=True)
class LocalRank:
    """The index of a rank among those of its engine on one machine, and their number."""

    index: int = 0
    count: int = 1


@dataclass(frozen=True)
class Basis:
    """Everything that a rank knows before it loads weights.

    Attributes:
        draft_spec: shape of the draft model, with the target's vocabulary; None without one.
        max_draft_len: the most tokens of a sequence that the draft model can follow.
        ops: the operations that compute.
    """

    args: EngineArgs
    local_rank: LocalRank
    spec: ModelSpec
    draft_spec: ModelSpec | None
    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    ops: Ops[Any]

    @classmethod
    def of(
        cls, args: EngineArgs, *, log: Callable[[str], None], local_rank: LocalRank | None = None
    ) -> "Basis":
        """Read the shapes of the checkpoints, and choose device and operations.

        Args:
            local_rank: this rank's place on its machine; None for an engine with one rank.

        Raises:
            CheckpointError: a checkpoint is not supported.
            ConfigError: the device does not exist.
        """
        spec = ModelSpec.from_dir(Path(args.model))
        draft_path = (args.speculative_config and args.speculative_config.model) or ""
        dtype = _dtype(args, spec)
        device = _device(args.device, local_rank)
        local_rank = local_rank or LocalRank()
        return cls(
            args=args,
            local_rank=local_rank,
            spec=spec,
            draft_spec=_draft_spec(draft_path, spec) if draft_path else None,
            dtype=dtype,
            device=device,
            max_model_len=_max_model_len(args, spec, log),
            ops=select_ops(
                args,
                dtype,
                device,
                log,
                local_rank=local_rank.index,
                num_local_ranks=local_rank.count,
            ),
        )

    @property
    def kernels(self) -> ModuleType | None:
        """The CPU kernels; None if they are not used."""
        return self.ops.kernels

    @property
    def max_draft_len(self) -> int:
        """The most tokens of a sequence that the draft model can follow; 0 without one."""
        if self.draft_spec is None:
            return 0
        return min(self.max_model_len, self.draft_spec.max_position_embeddings)


def _draft_spec(path: str, target: ModelSpec) -> ModelSpec:
    """The draft model's shape, with the target's token ids: it reads and guesses only these."""
    with named_as_draft_model():
        spec = ModelSpec.from_dir(Path(path))
    return spec.with_vocabulary(target.vocab_size)


@contextmanager
def named_as_draft_model() -> Iterator[None]:
    """Name the draft model in errors."""
    try:
        yield
    except (CheckpointError, ConfigError) as error:
        raise type(error)(f"the draft model: {error}") from None


def _dtype(args: EngineArgs, spec: ModelSpec) -> torch.dtype:
    """The dtype to compute in: that of the arguments, of config.json, or of the stored tensors."""
    is_auto = args.dtype == "auto"
    name = (spec.dtype or stored_dtype(Path(args.model))) if is_auto else args.dtype
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _device(name: str, local_rank: LocalRank | None) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ConfigError("device = 'cuda', but torch finds no CUDA device; accepted is 'cpu'")
    if name == "cpu" or not has_cuda:
        return torch.device("cpu")
    if local_rank is None:
        return torch.device("cuda")
    if local_rank.count > torch.cuda.device_count():
        raise ConfigError(
            f"{local_rank.count} ranks on a machine with {torch.cuda.device_count()} CUDA devices;"
            " each rank needs one of its own"
        )
    return torch.device("cuda", local_rank.index)


def _max_model_len(args: EngineArgs, spec: ModelSpec, log: Callable[[str], None]) -> int:
    limit = spec.max_position_embeddings
    if spec.sliding_window is not None:
        log(
            f"max_model_len is limited to the model's sliding window ({limit}):"
            " beyond it, sliding-window attention is not supported"
        )
    if args.max_model_len is not None and args.max_model_len > limit:
        log(
            f"warning: max_model_len {args.max_model_len} is lowered to {limit}, what the model"
            " supports"
        )
    return min(args.max_model_len or limit, limit)
