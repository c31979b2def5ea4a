"""The kinds of sublayers of a decoder layer: a rank's part of their parameters.

Owns the names of their tensors in a checkpoint, and passing their weights to `Ops`. Must not know
which layers a model has (`ModelSpec.sublayers` does) or what is computed (`Ops` do).

To add one, add its name in `families.family`, a class here, and its computation in `Ops`.
"""

from collections.abc import Iterator
from typing import Protocol

from charonia.data.comm import Place
from charonia.data.model.checkpoint_tensors import Allocate, CheckpointTensor, Stack
from charonia.data.model.families.family import SublayerName
from charonia.data.model.shard import (
    Share,
    heads_share,
    intermediate_share,
    local_kv_heads,
    query_heads,
)
from charonia.data.model.spec import ModelSpec
from charonia.data.ops.base import AttentionWeights, MlpWeights, NormWeights, Ops, StepT, Sublayer


class SublayerParameters(Protocol):
    """A part of a sublayer's parameters, uninitialized until a loader fills them."""

    def checkpoint_tensors(self, prefix: str) -> Iterator[CheckpointTensor]:
        """Name the tensors that fill them; `prefix` is the layer's, and ends with a dot."""
        ...

    def prepare(self, ops: Ops[StepT]) -> Sublayer[StepT]:
        """Have the operations make a callable sublayer of them."""
        ...


class AttentionParameters:
    """Implements `SublayerParameters` for causal self-attention."""

    def __init__(self, allocate: Allocate, spec: ModelSpec, place: Place) -> None:
        head_dim, eps = spec.head_dim, spec.rms_norm_eps
        heads, kv_heads = query_heads(spec, place), local_kv_heads(spec, place)
        queries = heads_share(heads, spec.num_heads, head_dim)
        kv = heads_share(kv_heads, spec.num_kv_heads, head_dim)
        hidden = Share.full(spec.hidden_size)
        outputs = {"q_proj": queries, "k_proj": kv, "v_proj": kv}
        self._qkv = Stack(allocate, outputs, hidden, has_bias=spec.qkv_bias)
        self._output = Stack(
            allocate,
            {"o_proj": hidden},
            queries,
            has_bias=spec.output_bias,
            adds_bias=place.part == 0,
        )
        norms = [NormWeights(allocate(head_dim), eps) for _ in range(2 * spec.qk_norm)]
        self.weights = AttentionWeights(
            norm=NormWeights(allocate(spec.hidden_size), eps),
            qkv=self._qkv.weights,
            output=self._output.weights,
            head_norms=(norms[0], norms[1]) if norms else None,
            num_heads=len(heads),
            num_kv_heads=len(kv_heads),
            head_dim=head_dim,
        )

    def checkpoint_tensors(self, prefix: str) -> Iterator[CheckpointTensor]:
        """See `SublayerParameters`."""
        weights = self.weights
        yield CheckpointTensor.whole(weights.norm.weight, f"{prefix}input_layernorm.weight")
        for stack in (self._qkv, self._output):
            yield from stack.checkpoint_tensors(f"{prefix}self_attn.")
        if weights.head_norms is not None:
            for name, norm in zip(("q_norm", "k_norm"), weights.head_norms, strict=True):
                yield CheckpointTensor.whole(norm.weight, f"{prefix}self_attn.{name}.weight")

    def prepare(self, ops: Ops[StepT]) -> Sublayer[StepT]:
        """See `SublayerParameters`."""
        return ops.attention(self.weights)


class MlpParameters:
    """Implements `SublayerParameters` for a SwiGLU layer."""

    def __init__(self, allocate: Allocate, spec: ModelSpec, place: Place) -> None:
        hidden, inner = Share.full(spec.hidden_size), intermediate_share(spec, place)
        outputs = {"gate_proj": inner, "up_proj": inner}
        self._gate_up = Stack(allocate, outputs, hidden, has_bias=spec.mlp_bias)
        self._down = Stack(
            allocate,
            {"down_proj": hidden},
            inner,
            has_bias=spec.mlp_bias,
            adds_bias=place.part == 0,
        )
        self.weights = MlpWeights(
            norm=NormWeights(allocate(spec.hidden_size), spec.rms_norm_eps),
            gate_up=self._gate_up.weights,
            down=self._down.weights,
        )

    def checkpoint_tensors(self, prefix: str) -> Iterator[CheckpointTensor]:
        """See `SublayerParameters`."""
        norm = self.weights.norm.weight
        yield CheckpointTensor.whole(norm, f"{prefix}post_attention_layernorm.weight")
        for stack in (self._gate_up, self._down):
            yield from stack.checkpoint_tensors(f"{prefix}mlp.")

    def prepare(self, ops: Ops[StepT]) -> Sublayer[StepT]:
        """See `SublayerParameters`."""
        return ops.mlp(self.weights)


SUBLAYERS: dict[SublayerName, type[AttentionParameters] | type[MlpParameters]] = {
    "attention": AttentionParameters,
    "mlp": MlpParameters,
}
