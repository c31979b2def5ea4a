"""`Ops` in C++: all layers of a model on a CPU in one native call.

Owns the mapping from `Ops` to `kernels.cpp`. Must not know plans or names of weights.
"""

import copy
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from charonia.config import Quantization
from charonia.data.comm import Comm
from charonia.data.ops.base import (
    AttentionWeights,
    Guesser,
    Head,
    Layer,
    Layers,
    MatrixWeights,
    MlpWeights,
    NormWeights,
    Ops,
    Rotation,
    StepBatch,
    Sublayer,
)
from charonia.data.ops.composed import one_by_one
from charonia.data.ops.kv_format import FORMATS, Quantized
from charonia.data.ops.native.threads import ThreadLayout
from charonia.data.ops.native.tuning import Tuner
from charonia.errors import ConfigError
from charonia.protocol import KVLayout

DTYPES = (torch.float32, torch.bfloat16)
_LANES = 16
"""Lanes of the widest vectors. Blocks have a multiple of it; heads are padded to one."""


class NativeOps(Ops[Any]):
    """The operations of the CPU kernels.

    From here on torch itself computes with one thread, and the kernels' pool with those of
    `threads`: two pools would compete for the same cores.

    Args:
        kernels: of `build.load_kernels`.
        quantization: number format of the weights; see `EngineArgs`.
        tuner: chooses how products read weights; None keeps the defaults.
    """

    prefers_int8 = True
    attends_in_pieces = True

    def __init__(
        self,
        kernels: ModuleType,
        threads: ThreadLayout,
        quantization: Quantization | None = None,
        *,
        tuner: Tuner | None = None,
    ) -> None:
        self._kernels = kernels
        self._tuner = tuner
        self._quantization = _quantization_of(kernels, quantization)
        torch.set_num_threads(1)
        kernels.set_threads(threads.num_threads, list(threads.cores[1:]))

    def quantized(self, quantization: Quantization | None) -> "NativeOps":
        """See `Ops`."""
        other = copy.copy(self)
        other._quantization = _quantization_of(self._kernels, quantization)
        return other

    @property
    def kernels(self) -> ModuleType:
        """See `Ops`."""
        return self._kernels

    @staticmethod
    def obstacle(dtype: torch.dtype, block_size: int) -> str | None:
        """Explain why the kernels cannot be used with these arguments; None if they can."""
        if dtype not in DTYPES:
            return f"they compute in float32 and bfloat16, not in {dtype}".replace("torch.", "")
        if block_size % _LANES:
            return f"they need blocks of a multiple of {_LANES} tokens, not of {block_size}"
        return None

    @staticmethod
    def page_shapes(layout: KVLayout) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The layout that products need of their right-hand side; see pages.h."""
        dim = -(-layout.head_dim // _LANES) * _LANES
        heads, tokens = layout.num_kv_heads, layout.block_size
        kv_format = FORMATS[layout.dtype]
        if isinstance(kv_format, Quantized):
            shape = heads, tokens, kv_format.width(dim)  # the same size, in another order
            return shape, shape
        pair = 4 // kv_format.storage.itemsize
        return (heads, dim // pair, tokens, pair), (heads, tokens // pair, dim, pair)

    def begin(self, batch: StepBatch, rotation: Rotation) -> Any:
        return self._kernels.Step(
            batch.positions,
            batch.slots,
            batch.query_starts,
            batch.context_lens,
            batch.block_tables,
            rotation.cos,
            rotation.sin,
        )

    def attention(self, weights: AttentionWeights) -> Sublayer[Any]:
        _require_even("hidden_size", weights.qkv.weight.shape[1])
        self._tune(weights.qkv, weights.output)
        query_norm, key_norm = weights.head_norms or (None, None)
        attention: Sublayer[Any] = self._kernels.Attention(
            self._norm(weights.norm),
            weights.qkv.weight,
            weights.qkv.bias,
            weights.output.weight,
            weights.output.bias,
            query_norm and self._norm(query_norm),
            key_norm and self._norm(key_norm),
            weights.head_dim,
            self._quantization,
        )
        return attention

    def mlp(self, weights: MlpWeights) -> Sublayer[Any]:
        _require_even("intermediate_size", weights.down.weight.shape[1])
        self._tune(weights.gate_up, weights.down)
        mlp: Sublayer[Any] = self._kernels.Mlp(
            self._norm(weights.norm),
            weights.gate_up.weight,
            weights.gate_up.bias,
            weights.down.weight,
            weights.down.bias,
            self._quantization,
        )
        return mlp

    def layers(self, layers: Sequence[Layer[Any]], parts: Comm | None = None) -> Layers[Any]:
        """Combine the sublayers of each layer, and the layers, into one native call.

        This is for layers of attention and an MLP, on one rank or on ranks that share memory.
        Others use one call per sublayer.

        Args:
            parts: if it has an attribute `exchange`, an object of the kernels, the call reduces
                through it.
        """
        exchange, kernels = getattr(parts, "exchange", None), self._kernels
        is_fused = all(
            [type(part) for part in layer] == [kernels.Attention, kernels.Mlp] for layer in layers
        )
        if not is_fused or (parts is not None and exchange is None):
            return one_by_one(layers, parts)
        joined: Layers[Any] = kernels.Layers([tuple(layer) for layer in layers], exchange)
        return joined

    def head(self, norm: NormWeights, weights: MatrixWeights) -> Head:
        self._tune(weights)
        head: Head = self._kernels.Head(
            self._norm(norm), weights.weight, weights.bias, self._quantization
        )
        return head

    def guesser(
        self, embedding: Tensor, layers: Layers[Any], head: Head, rotation: Rotation
    ) -> Guesser | None:
        """See `Ops`."""
        if not isinstance(layers, self._kernels.Layers):
            return None
        guesser: Guesser = self._kernels.Guesser(embedding, layers, head, *rotation)
        return guesser

    def _tune(self, *matrices: MatrixWeights) -> None:
        """Choose how products with these will read weights: the kernels pack them next."""
        if self._tuner is not None:
            for matrix in matrices:
                self._tuner.tune(matrix.weight, self._quantization)

    def _norm(self, weights: NormWeights) -> Any:
        return self._kernels.Norm(weights.weight, weights.eps)


def _quantization_of(kernels: ModuleType, quantization: Quantization | None) -> Any:
    return getattr(kernels.Quantization, quantization or "none")


def _require_even(name: str, size: int) -> None:
    if size % 2:
        raise ConfigError(
            f"the CPU kernels need an even {name}, and it is {size};"
            " cpu_kernels = 'torch' takes any"
        )
