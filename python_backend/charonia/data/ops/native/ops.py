"""`Ops` in C++: what a decoder layer does on a CPU, in two native calls.

Owns the wiring between the seam and `kernels.cpp`. Must not know plans or weights' names.
"""

import copy
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from charonia.data.ops.base import (
    AttentionBlock,
    AttentionWeights,
    Head,
    MatrixWeights,
    MlpBlock,
    MlpWeights,
    NormWeights,
    Pages,
    Rotation,
    StepBatch,
)
from charonia.data.ops.native.threads import ThreadLayout
from charonia.errors import ConfigError
from charonia.protocol import KVLayout

DTYPES = (torch.float32, torch.bfloat16)
_LANES = 16
"""Of the widest vectors; a block holds a multiple, a head is filled up to one."""


class NativeOps:
    """Implements `ops.base.Ops` with the CPU kernels.

    From here on torch itself computes with one thread, and the kernels' pool with as many as it is
    told: two pools would fight over the same cores.

    Args:
        kernels: of `build.load_kernels`.
        is_int8: keep weights as int8 with a scale per output.
    """

    def __init__(
        self, kernels: ModuleType, threads: ThreadLayout, *, is_int8: bool = False
    ) -> None:
        self._kernels = kernels
        self._is_int8 = is_int8
        torch.set_num_threads(1)
        kernels.set_threads(threads.num_threads, list(threads.cores[1:]))

    def as_int8(self) -> "NativeOps":
        """The same for another model, whose weights are kept as int8."""
        other = copy.copy(self)
        other._is_int8 = True
        return other

    @property
    def kernels(self) -> ModuleType:
        """The compiled module: the sampler draws with it too."""
        return self._kernels

    @staticmethod
    def obstacle(dtype: torch.dtype, block_size: int) -> str | None:
        """Say what the kernels cannot do of what is asked for, None if there is nothing."""
        if dtype not in DTYPES:
            return f"they compute in float32 and bfloat16, not in {dtype}".replace("torch.", "")
        if block_size % _LANES:
            return f"they need blocks of a multiple of {_LANES} tokens, not of {block_size}"
        return None

    def phase_seconds(self) -> dict[str, float]:
        """Seconds that this process has spent in each kind of operation so far."""
        return dict(self._kernels.phase_seconds())

    @staticmethod
    def page_shapes(layout: KVLayout) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """As products want their right-hand side: see `Pages` in kernels.cpp."""
        dim = -(-layout.head_dim // _LANES) * _LANES
        pair = 2 if layout.dtype == "bfloat16" else 1
        heads, tokens = layout.num_kv_heads, layout.block_size
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

    def attention(self, weights: AttentionWeights) -> AttentionBlock[Any]:
        query_norm, key_norm = weights.head_norms or (None, None)
        call = self._kernels.Attention(
            self._norm(weights.norm),
            weights.qkv.weight,
            weights.qkv.bias,
            weights.output.weight,
            weights.output.bias,
            query_norm and self._norm(query_norm),
            key_norm and self._norm(key_norm),
            weights.head_dim,
            self._is_int8,
        )

        def block(x: Tensor | None, residual: Tensor, step: Any, pages: Pages) -> Tensor:
            contribution: Tensor = call(x, residual, step, pages.keys, pages.values)
            return contribution

        return block

    def mlp(self, weights: MlpWeights) -> MlpBlock:
        if (size := weights.down.weight.shape[1]) % 2:
            raise ConfigError(
                f"the CPU kernels need an even intermediate_size, and it is {size};"
                " cpu_kernels = 'torch' takes any"
            )
        block: MlpBlock = self._kernels.Mlp(
            self._norm(weights.norm),
            weights.gate_up.weight,
            weights.gate_up.bias,
            weights.down.weight,
            weights.down.bias,
            self._is_int8,
        )
        return block

    def head(self, norm: NormWeights, weights: MatrixWeights) -> Head:
        linear = self._kernels.Linear(weights.weight, weights.bias, self._is_int8)
        rms_norm = self._kernels.rms_norm

        def head(x: Tensor, residual: Tensor) -> Tensor:
            logits: Tensor = linear(rms_norm(x, residual.clone(), norm.weight, norm.eps), True)
            return logits

        return head

    def _norm(self, weights: NormWeights) -> Any:
        return self._kernels.Norm(weights.weight, weights.eps)
