"""The models of one rank: their weights and their KV caches.

Owns loading models and allocating their KV caches from a `Basis`, the same way on every rank. Must
not know plans, rows, sampling or how ranks find each other.

    Basis: shapes, device, operations ──► Models: weights ──► KV caches, with as many blocks as fit
                             model ranks ──┘       on every rank ──┘
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from charonia.config import SpeculativeConfig
from charonia.data.basis import Basis, named_as_draft_model
from charonia.data.comm import ModelRank
from charonia.data.kv_store import KVStore, kv_layout
from charonia.data.memory import available_memory
from charonia.data.model.decoder import Decoder
from charonia.data.model.loader import check_size, load_weights
from charonia.data.model.parameters import Parameters
from charonia.data.model.spec import ModelSpec
from charonia.data.ops.base import Ops
from charonia.errors import ConfigError
from charonia.protocol import KVLayout

PROMPT_LOGPROBS_SLICE = 256
"""Number of prompt positions whose logits are in memory at once."""
_ROTARY_BYTES = 8
"""Bytes per position and dimension of a head: the angle, its cosine, its sine, and one of these
again in the model's dtype."""


class KVStores(NamedTuple):
    """The KV caches of a rank, with the same number of blocks."""

    target: KVStore
    draft: KVStore | None


class LoadedModel(NamedTuple):
    """A rank's part of a checkpoint, and the shape of its KV cache."""

    decoder: Decoder
    layout: KVLayout
    ops: Ops[Any]

    def kv_store(self, num_blocks: int, device: torch.device) -> KVStore:
        """Allocate the KV cache."""
        return KVStore(self.layout, self.ops.page_shapes(self.layout), num_blocks, device)


@dataclass(frozen=True)
class Models:
    """This rank's parts of the target and of the draft model."""

    target: LoadedModel
    draft: LoadedModel | None

    @classmethod
    def load(
        cls,
        basis: Basis,
        model_rank: ModelRank,
        draft_rank: ModelRank | None,
        *,
        log: Callable[[str], None],
    ) -> "Models":
        """Load this rank's parts of both models.

        Args:
            draft_rank: None if this rank has no part of the draft model.

        Raises:
            CheckpointError: a checkpoint cannot be loaded.
            ConfigError: a model cannot be split as the arguments say.
        """
        args = basis.args
        target = _load(
            basis, args.model, basis.spec, basis.max_model_len, basis.ops, model_rank, log
        )
        draft = None
        if basis.draft_spec is not None and draft_rank is not None:
            assert args.speculative_config is not None
            assert args.speculative_config.model is not None
            ops = _draft_ops(args.speculative_config, basis.ops)
            path, spec = args.speculative_config.model, basis.draft_spec
            with named_as_draft_model():
                draft = _load(basis, path, spec, basis.max_draft_len, ops, draft_rank, log)
        return cls(target, draft)

    def allocate(self, num_blocks: int, device: torch.device) -> KVStores:
        """Allocate the KV caches.

        Raises:
            ConfigError: there is not so much memory.
        """
        try:
            draft = self.draft.kv_store(num_blocks, device) if self.draft is not None else None
            return KVStores(self.target.kv_store(num_blocks, device), draft)
        except (OSError, OverflowError, torch.OutOfMemoryError) as error:
            num_bytes = sum(one.layout.bytes_per_block for one in (self.target, self.draft) if one)
            raise ConfigError(
                f"a KV cache of {num_blocks} blocks of {num_bytes} bytes cannot be allocated on"
                f" {device.type}: {str(error).splitlines()[0]}; set a smaller"
                " num_gpu_blocks_override or kv_cache_memory_bytes"
            ) from None


def _load(
    basis: Basis,
    path: str,
    spec: ModelSpec,
    num_positions: int,
    ops: Ops[Any],
    model_rank: ModelRank,
    log: Callable[[str], None],
) -> LoadedModel:
    check_size(Path(path), spec.num_parameters)
    _check_length(num_positions, spec.head_dim)
    parameters = Parameters(spec, basis.dtype, basis.device, model_rank.place)
    load_weights(Path(path), parameters.checkpoint_tensors(), is_tied=spec.is_tied, log=log)
    decoder = Decoder(spec, parameters, ops, num_positions=num_positions, model_rank=model_rank)
    args = basis.args
    layout = kv_layout(
        spec, ops, args.block_size, basis.dtype, model_rank.place, args.kv_cache_dtype
    )
    return LoadedModel(decoder, layout, ops)


def _check_length(num_positions: int, head_dim: int) -> None:
    """Check that there is memory for a table of all positions, before allocating it.

    A checkpoint may claim any length of sequences.

    Raises:
        ConfigError: there is not enough memory.
    """
    num_bytes = num_positions * head_dim * _ROTARY_BYTES
    memory = available_memory()
    if num_bytes > memory.available:
        raise ConfigError(
            f"max_model_len = {num_positions} takes {num_bytes} bytes for rotary angles alone, but"
            f" {memory.available} are available ({memory.source}); set a smaller max_model_len"
        )


def _draft_ops(config: SpeculativeConfig, ops: Ops[Any]) -> Ops[Any]:
    """The draft model's operations: the target's, for weights in its own number format."""
    quantization = config.quantization
    if quantization == "auto":
        quantization = "int8" if ops.prefers_int8 else None
    return ops.quantized(quantization)
