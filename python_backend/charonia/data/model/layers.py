"""The layers of the decoder, each with its parameters and where they come from in a checkpoint.

Owns parameters and their fusion: a layer allocates its tensors and names, in
`checkpoint_tensors`, the part of them that each tensor of a checkpoint fills. Must not know files
(`loader` does), pages' addresses or devices: what is heavy goes through `Ops`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from charonia.data.model.spec import ModelSpec, RopeSpec
from charonia.data.ops.base import Ops, PagedAttention, Pages, Rotation

Destination = tuple[str, Tensor]
"""A tensor's name in the checkpoint and the memory it fills (a view of a parameter)."""


@dataclass(frozen=True)
class Placement:
    """Where a model's parameters live and who computes with them."""

    ops: Ops
    dtype: torch.dtype
    device: torch.device

    def empty(self, *shape: int) -> Tensor:
        """Allocate a parameter; a loader fills it."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)


class Linear:
    """y = x Wᵀ + b, where W may be stacked from several matrices of the checkpoint.

    Args:
        parts: name in the checkpoint and number of outputs of each matrix, in order.
    """

    def __init__(
        self, place: Placement, parts: dict[str, int], num_inputs: int, has_bias: bool
    ) -> None:
        self._ops = place.ops
        self._parts = parts
        num_outputs = sum(parts.values())
        self.weight = place.empty(num_outputs, num_inputs)
        self.bias = place.empty(num_outputs) if has_bias else None

    def checkpoint_tensors(self, prefix: str) -> Iterator[Destination]:
        """Name what fills this layer; `prefix` ends with a dot or is empty."""
        start = 0
        for name, size in self._parts.items():
            yield f"{prefix}{name}.weight", self.weight[start : start + size]
            if self.bias is not None:
                yield f"{prefix}{name}.bias", self.bias[start : start + size]
            start += size

    def __call__(self, x: Tensor) -> Tensor:
        """Map [tokens, inputs] to [tokens, outputs]."""
        return self._ops.linear(x, self.weight, self.bias)


class RMSNorm:
    """Root mean square normalization with a learned scale."""

    def __init__(self, place: Placement, size: int, eps: float) -> None:
        self._ops = place.ops
        self._eps = eps
        self.weight = place.empty(size)

    def checkpoint_tensors(self, prefix: str) -> Iterator[Destination]:
        """Name what fills this layer; `prefix` ends with a dot."""
        yield f"{prefix}weight", self.weight

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the normalized `x` + `residual`, and their sum."""
        return self._ops.rms_norm(x, self.weight, self._eps, residual)


class Attention:
    """Grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245) over the pages."""

    def __init__(self, place: Placement, spec: ModelSpec) -> None:
        self._ops = place.ops
        self._num_heads = spec.num_heads
        self._head_dim = spec.head_dim
        query_size = spec.num_heads * spec.head_dim
        kv_size = spec.num_kv_heads * spec.head_dim
        parts = {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size}
        self._qkv = Linear(place, parts, spec.hidden_size, spec.qkv_bias)
        self._output = Linear(place, {"o_proj": spec.hidden_size}, query_size, spec.output_bias)
        self._head_norms: tuple[RMSNorm, RMSNorm] | None = None
        if spec.qk_norm:
            self._head_norms = (
                RMSNorm(place, spec.head_dim, spec.rms_norm_eps),
                RMSNorm(place, spec.head_dim, spec.rms_norm_eps),
            )
        self._num_kv_heads = spec.num_kv_heads

    def checkpoint_tensors(self, prefix: str) -> Iterator[Destination]:
        """Name what fills this layer; `prefix` ends with a dot."""
        yield from self._qkv.checkpoint_tensors(prefix)
        yield from self._output.checkpoint_tensors(prefix)
        if self._head_norms is not None:
            for name, norm in zip(("q_norm.", "k_norm."), self._head_norms, strict=True):
                yield from norm.checkpoint_tensors(prefix + name)

    def __call__(
        self,
        x: Tensor,
        rotation: Rotation,
        slots: Tensor,
        attend: PagedAttention,
        pages: Pages,
    ) -> Tensor:
        """Store K and V of `x` [tokens, hidden], attend, return [tokens, hidden]."""
        tokens = x.shape[0]
        qkv = self._qkv(x).view(tokens, -1, self._head_dim)  # [tokens, heads, dim]
        if self._head_norms is not None:
            first = 0
            for norm, heads in zip(
                self._head_norms, (self._num_heads, self._num_kv_heads), strict=True
            ):
                part = qkv[:, first : first + heads]
                part.copy_(norm(part)[0])
                first += heads
        query = self._ops.rope_and_write(qkv, self._num_heads, rotation, slots, pages)
        return self._output(attend(query, pages).reshape(tokens, -1))


class MLP:
    """SwiGLU feed-forward layer (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, place: Placement, spec: ModelSpec) -> None:
        self._ops = place.ops
        parts = {"gate_proj": spec.intermediate_size, "up_proj": spec.intermediate_size}
        self._gate_up = Linear(place, parts, spec.hidden_size, spec.mlp_bias)
        self._down = Linear(
            place, {"down_proj": spec.hidden_size}, spec.intermediate_size, spec.mlp_bias
        )

    def checkpoint_tensors(self, prefix: str) -> Iterator[Destination]:
        """Name what fills this layer; `prefix` ends with a dot."""
        yield from self._gate_up.checkpoint_tensors(prefix)
        yield from self._down.checkpoint_tensors(prefix)

    def __call__(self, x: Tensor) -> Tensor:
        """Map [tokens, hidden] to [tokens, hidden]."""
        return self._down(self._ops.silu_mul(self._gate_up(x)))


class RotaryTable:
    """Cosines and sines of the rotary angles of all positions."""

    def __init__(self, place: Placement, rope: RopeSpec, head_dim: int, num_positions: int) -> None:
        angles = torch.outer(
            torch.arange(num_positions, dtype=torch.float32), inverse_frequencies(rope, head_dim)
        )
        self._cos = angles.cos().to(place.device, place.dtype)  # [positions, head_dim / 2]
        self._sin = angles.sin().to(place.device, place.dtype)

    def __call__(self, positions: Tensor) -> Rotation:
        """Look up `positions` [tokens]."""
        return Rotation(self._cos.index_select(0, positions), self._sin.index_select(0, positions))


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """Radians per position of each pair of a head's dimensions, float32 [head_dim / 2].

    "linear" divides all by `factor`. "llama3" (Llama 3.1's published recipe) leaves wavelengths
    shorter than original_max_position_embeddings / high_freq_factor, divides those longer than
    original_max_position_embeddings / low_freq_factor, and interpolates between.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.kind == "default":
        return frequencies
    if rope.kind == "linear":
        return frequencies / rope.factor
    turns = rope.original_max_position_embeddings * frequencies / (2 * torch.pi)
    share = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    share = share.clamp(0.0, 1.0)  # 1 keeps a frequency, 0 divides it by the factor
    return (1 - share) * frequencies / rope.factor + share * frequencies
