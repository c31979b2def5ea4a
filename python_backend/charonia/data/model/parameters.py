"""A model's parameters: memory for them, and where each comes from in a checkpoint.

Owns allocation and fusion: matrices that are applied to the same input are stacked, and
`checkpoint_tensors` names the part that each tensor of a checkpoint fills. Must not know files
(`loader` does) or what is computed with the parameters (`decoder` and `Ops` do).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from charonia.data.model.spec import ModelSpec
from charonia.data.ops.base import AttentionWeights, MatrixWeights, MlpWeights, NormWeights

Destination = tuple[str, Tensor]
"""A tensor's name in the checkpoint and the memory it fills (a view of a parameter)."""

Allocate = Callable[..., Tensor]
"""Allocate a parameter of the given shape; a loader fills it."""


@dataclass(frozen=True)
class _Stack:
    """A matrix stacked from several of the checkpoint: their names and numbers of outputs."""

    weights: MatrixWeights
    parts: dict[str, int]

    @classmethod
    def empty(
        cls, allocate: Allocate, parts: dict[str, int], num_inputs: int, has_bias: bool
    ) -> "_Stack":
        num_outputs = sum(parts.values())
        bias = allocate(num_outputs) if has_bias else None
        return cls(MatrixWeights(allocate(num_outputs, num_inputs), bias), parts)

    def checkpoint_tensors(self, prefix: str) -> Iterator[Destination]:
        start = 0
        for name, size in self.parts.items():
            yield f"{prefix}{name}.weight", self.weights.weight[start : start + size]
            if self.weights.bias is not None:
                yield f"{prefix}{name}.bias", self.weights.bias[start : start + size]
            start += size


class LayerParameters:
    """The parameters of one decoder layer."""

    def __init__(self, allocate: Allocate, spec: ModelSpec) -> None:
        def norm(size: int) -> NormWeights:
            return NormWeights(allocate(size), spec.rms_norm_eps)

        query_size = spec.num_heads * spec.head_dim
        kv_size = spec.num_kv_heads * spec.head_dim
        hidden, inner = spec.hidden_size, spec.intermediate_size
        parts = {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size}
        qkv = _Stack.empty(allocate, parts, hidden, spec.qkv_bias)
        output = _Stack.empty(allocate, {"o_proj": hidden}, query_size, spec.output_bias)
        parts = {"gate_proj": inner, "up_proj": inner}
        gate_up = _Stack.empty(allocate, parts, hidden, spec.mlp_bias)
        down = _Stack.empty(allocate, {"down_proj": hidden}, inner, spec.mlp_bias)
        self.attention = AttentionWeights(
            norm=norm(hidden),
            qkv=qkv.weights,
            output=output.weights,
            head_norms=(norm(spec.head_dim), norm(spec.head_dim)) if spec.qk_norm else None,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
        )
        self.mlp = MlpWeights(norm=norm(hidden), gate_up=gate_up.weights, down=down.weights)
        self._stacks = {"self_attn.": (qkv, output), "mlp.": (gate_up, down)}

    def checkpoint_tensors(self, prefix: str) -> Iterator[Destination]:
        """Name what fills this layer; `prefix` ends with a dot."""
        yield f"{prefix}input_layernorm.weight", self.attention.norm.weight
        for part, stacks in self._stacks.items():
            for stack in stacks:
                yield from stack.checkpoint_tensors(prefix + part)
        if self.attention.head_norms is not None:
            for name, norm in zip(("q_norm", "k_norm"), self.attention.head_norms, strict=True):
                yield f"{prefix}self_attn.{name}.weight", norm.weight
        yield f"{prefix}post_attention_layernorm.weight", self.mlp.norm.weight


class Parameters:
    """The parameters of a whole model, uninitialized until a loader has filled them.

    Attributes:
        embedding: [vocab_size, hidden].
        head: [vocab_size, hidden]; the embedding itself where they are tied.
    """

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        def allocate(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self.embedding = allocate(spec.vocab_size, spec.hidden_size)
        self.layers = [LayerParameters(allocate, spec) for _ in range(spec.num_layers)]
        self.norm = NormWeights(allocate(spec.hidden_size), spec.rms_norm_eps)
        self.is_tied = spec.is_tied
        self.head = self.embedding
        if not spec.is_tied:
            self.head = allocate(spec.vocab_size, spec.hidden_size)

    def checkpoint_tensors(self) -> Iterator[Destination]:
        """Name every tensor of the checkpoint and the memory that it fills."""
        yield "model.embed_tokens.weight", self.embedding
        for index, layer in enumerate(self.layers):
            yield from layer.checkpoint_tensors(f"model.layers.{index}.")
        yield "model.norm.weight", self.norm.weight
        if not self.is_tied:
            yield "lm_head.weight", self.head
