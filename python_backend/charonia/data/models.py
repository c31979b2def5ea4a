"""The models of one rank: what is to be loaded, by which operations, and their memory.

Owns the way from the engine's arguments to loaded models with KV caches, the same on every rank.
Must not know plans, rows, sampling or how ranks find each other.

    Basis: shapes, device, operations ──► Models: weights ──► KV caches, of as many blocks as fit
                                   seats ──┘       on every rank ──┘
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from charonia.config import EngineArgs, SpeculativeConfig
from charonia.data.comm import Seat
from charonia.data.kv_store import KVStore, kv_layout
from charonia.data.memory import available_memory
from charonia.data.model.decoder import Decoder
from charonia.data.model.loader import check_size, load_weights, stored_dtype
from charonia.data.model.parameters import Parameters
from charonia.data.model.spec import ModelSpec
from charonia.data.ops.base import Ops
from charonia.data.ops.native.ops import NativeOps
from charonia.data.ops.select import select_ops
from charonia.errors import CheckpointError, ConfigError
from charonia.protocol import KVLayout

PROMPT_LOGPROBS_SLICE = 256
"""Prompt positions whose logits are held at once."""
_ROTARY_BYTES = 8
"""Per position and dimension of a head: the angle, its cosine, its sine, and one of these again in
the model's dtype."""


@dataclass(frozen=True)
class LocalRank:
    """A process among those of its engine on one machine."""

    index: int = 0
    count: int = 1


@dataclass(frozen=True)
class Basis:
    """What every rank knows before it loads weights.

    Attributes:
        draft_spec: of the draft model, where there is one; of the target's vocabulary.
        max_draft_len: tokens that the draft model can follow a sequence.
        ops: what computes.
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
        """Read the checkpoints' shapes and choose device and operations.

        Args:
            local_rank: this process among the ranks of its machine; None for an engine of one.

        Raises:
            CheckpointError: a checkpoint is not supported.
            ConfigError: the device is not there.
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
        """The CPU kernels; None where they are not used."""
        return self.ops.kernels if isinstance(self.ops, NativeOps) else None

    @property
    def max_draft_len(self) -> int:
        """Tokens up to which the draft model can follow a sequence; 0 where there is none."""
        if self.draft_spec is None:
            return 0
        return min(self.max_model_len, self.draft_spec.max_position_embeddings)


class Room(NamedTuple):
    """What a rank can hold, or what all ranks of an engine do.

    Attributes:
        num_blocks: for which there is memory; the least of all ranks counts.
        slot_bytes: that a block has in all models; the most of all ranks counts.
    """

    num_blocks: int
    slot_bytes: int


class KVStores(NamedTuple):
    """The KV caches of a rank, of as many blocks."""

    target: KVStore
    draft: KVStore | None


class LoadedModel(NamedTuple):
    """What a rank has of a checkpoint, and the shape of its KV cache."""

    decoder: Decoder
    layout: KVLayout
    ops: Ops[Any]

    def kv_store(self, num_blocks: int, device: torch.device) -> KVStore:
        """Allocate the KV cache."""
        return KVStore(self.layout, self.ops.page_shapes(self.layout), num_blocks, device)


@dataclass(frozen=True)
class Models:
    """The target and the draft model, as far as they are this rank's."""

    target: LoadedModel
    draft: LoadedModel | None

    @classmethod
    def load(
        cls,
        basis: Basis,
        seat: Seat,
        draft_seat: Seat | None,
        *,
        log: Callable[[str], None],
    ) -> "Models":
        """Load what these seats have.

        Args:
            draft_seat: None where the draft model is other ranks' alone.

        Raises:
            CheckpointError: a checkpoint cannot be loaded.
            ConfigError: a model cannot be split as asked for.
        """
        args = basis.args
        target = _load(basis, args.model, basis.spec, basis.max_model_len, basis.ops, seat, log)
        draft = None
        if basis.draft_spec is not None and draft_seat is not None:
            assert args.speculative_config is not None
            assert args.speculative_config.model is not None
            ops = _draft_ops(args.speculative_config, basis.ops)
            path, spec = args.speculative_config.model, basis.draft_spec
            with _named_as_draft_model():
                draft = _load(basis, path, spec, basis.max_draft_len, ops, draft_seat, log)
        return cls(target, draft)

    def allocate(self, num_blocks: int, device: torch.device) -> KVStores:
        """Allocate the KV caches."""
        draft = self.draft.kv_store(num_blocks, device) if self.draft is not None else None
        return KVStores(self.target.kv_store(num_blocks, device), draft)


def _load(
    basis: Basis,
    path: str,
    spec: ModelSpec,
    num_positions: int,
    ops: Ops[Any],
    seat: Seat,
    log: Callable[[str], None],
) -> LoadedModel:
    check_size(Path(path), spec.num_parameters)
    _check_length(num_positions, spec.head_dim)
    parameters = Parameters(spec, basis.dtype, basis.device, seat.place)
    load_weights(Path(path), parameters.checkpoint_tensors(), is_tied=spec.is_tied, log=log)
    decoder = Decoder(spec, parameters, ops, num_positions=num_positions, seat=seat)
    args = basis.args
    layout = kv_layout(spec, ops, args.block_size, basis.dtype, seat.place, args.kv_cache_dtype)
    return LoadedModel(decoder, layout, ops)


def _check_length(num_positions: int, head_dim: int) -> None:
    """Make sure, before it is tried, that a table for all positions can be made.

    A checkpoint may claim to follow sequences of any length.

    Raises:
        ConfigError: there is no memory for it.
    """
    num_bytes = num_positions * head_dim * _ROTARY_BYTES
    memory = available_memory()
    if num_bytes > memory.available:
        raise ConfigError(
            f"max_model_len = {num_positions} takes {num_bytes} bytes for rotary angles alone, but"
            f" {memory.available} are available ({memory.source}); set a smaller max_model_len"
        )


def _draft_ops(config: SpeculativeConfig, ops: Ops[Any]) -> Ops[Any]:
    """The draft model's operations: the target's, or the same with int8 weights."""
    is_native_auto = config.quantization == "auto" and isinstance(ops, NativeOps)
    return ops.as_int8() if config.quantization == "int8" or is_native_auto else ops


def _draft_spec(path: str, target: ModelSpec) -> ModelSpec:
    """The draft model's shape, with the target's token ids: it reads and guesses no others."""
    with _named_as_draft_model():
        spec = ModelSpec.from_dir(Path(path))
    return spec.with_vocabulary(target.vocab_size)


@contextmanager
def _named_as_draft_model() -> Iterator[None]:
    """Have errors say that it is the draft model which cannot be loaded."""
    try:
        yield
    except (CheckpointError, ConfigError) as error:
        raise type(error)(f"the draft model: {error}") from None


def _dtype(args: EngineArgs, spec: ModelSpec) -> torch.dtype:
    """What to compute in: as asked for, as config.json says, or as the tensors are stored."""
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
        log(f"max_model_len {args.max_model_len} is lowered to {limit}, what the model supports")
    return min(args.max_model_len or limit, limit)
