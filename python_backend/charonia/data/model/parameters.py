"""A rank's parameters: memory for them, and where each comes from in a checkpoint.

Owns allocation and fusion: matrices that are applied to the same input are stacked, and
`checkpoint_tensors` names every tensor of a checkpoint and what of it is needed here. Must not
know files (`loader` does), how a model is shared out (`shard` does) or what is computed with the
parameters (`decoder` and `Ops` do).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Protocol

import torch
from torch import Tensor

from charonia.data.comm import Place
from charonia.data.model.shard import (
    Share,
    heads_share,
    intermediate_share,
    local_kv_heads,
    query_heads,
    stage_layers,
    vocab_share,
)
from charonia.data.model.spec import ModelSpec
from charonia.data.ops.base import AttentionWeights, MatrixWeights, MlpWeights, NormWeights


@dataclass(frozen=True)
class Piece:
    """Some memory of a parameter, and the slice of a checkpoint's tensor that fills it."""

    memory: Tensor
    index: tuple[slice, ...]


@dataclass(frozen=True)
class CheckpointTensor:
    """A tensor that the checkpoint must have, of this shape, and what of it is needed here.

    Attributes:
        pieces: disjoint in memory; none where the tensor belongs to other ranks.
    """

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @classmethod
    def filling(cls, memory: Tensor | None, name: str, *shares: Share) -> "CheckpointTensor":
        """Fill `memory` with the part's share of each axis."""
        shape = tuple(share.whole for share in shares)
        if memory is None:
            return cls(name, shape, ())
        pieces = []
        for cuts in product(*(share.cuts() for share in shares)):
            here = tuple(local for local, _ in cuts)
            pieces.append(Piece(memory[here], tuple(stored for _, stored in cuts)))
        return cls(name, shape, tuple(pieces))


class _Allocate(Protocol):
    """Allocate a parameter; a loader fills all of it but the padding."""

    def __call__(self, *shape: int, is_padded: bool = False) -> Tensor: ...


def _allocate(
    *shape: int, dtype: torch.dtype, device: torch.device, is_padded: bool = False
) -> Tensor:
    make = torch.zeros if is_padded else torch.empty
    return make(shape, dtype=dtype, device=device)


class _Stack:
    """A matrix stacked from several of the checkpoint, which all have the same inputs.

    Args:
        outputs: what the part has of each of them, by name.
        has_bias: whether they have biases in the checkpoint.
        adds_bias: whether the part has these: where the parts' products are added up, one alone.
    """

    def __init__(
        self,
        allocate: _Allocate,
        outputs: dict[str, Share],
        inputs: Share,
        *,
        has_bias: bool,
        adds_bias: bool = True,
    ) -> None:
        self._outputs = outputs
        self._inputs = inputs
        self._has_bias = has_bias
        size = sum(share.size for share in outputs.values())
        is_padded = any(share.is_padded for share in outputs.values())
        bias = allocate(size, is_padded=is_padded) if has_bias and adds_bias else None
        weight = allocate(size, inputs.size, is_padded=is_padded or inputs.is_padded)
        self.weights = MatrixWeights(weight, bias)

    def checkpoint_tensors(self, prefix: str) -> Iterator[CheckpointTensor]:
        weight, bias = self.weights.weight, self.weights.bias
        start = 0
        for name, share in self._outputs.items():
            rows = slice(start, start + share.size)
            yield CheckpointTensor.filling(
                weight[rows], f"{prefix}{name}.weight", share, self._inputs
            )
            if self._has_bias:
                memory = bias[rows] if bias is not None else None
                yield CheckpointTensor.filling(memory, f"{prefix}{name}.bias", share)
            start += share.size


class LayerParameters:
    """A part of the parameters of one decoder layer."""

    def __init__(self, allocate: _Allocate, spec: ModelSpec, place: Place) -> None:
        def norm(size: int) -> NormWeights:
            return NormWeights(allocate(size), spec.rms_norm_eps)

        head_dim = spec.head_dim
        heads, kv_heads = query_heads(spec, place), local_kv_heads(spec, place)
        queries = heads_share(heads, spec.num_heads, head_dim)
        kv = heads_share(kv_heads, spec.num_kv_heads, head_dim)
        hidden, inner = Share.full(spec.hidden_size), intermediate_share(spec, place)
        is_first = place.part == 0
        outputs = {"q_proj": queries, "k_proj": kv, "v_proj": kv}
        qkv = _Stack(allocate, outputs, hidden, has_bias=spec.qkv_bias)
        outputs = {"o_proj": hidden}
        output = _Stack(allocate, outputs, queries, has_bias=spec.output_bias, adds_bias=is_first)
        outputs = {"gate_proj": inner, "up_proj": inner}
        gate_up = _Stack(allocate, outputs, hidden, has_bias=spec.mlp_bias)
        outputs = {"down_proj": hidden}
        down = _Stack(allocate, outputs, inner, has_bias=spec.mlp_bias, adds_bias=is_first)
        self.attention = AttentionWeights(
            norm=norm(spec.hidden_size),
            qkv=qkv.weights,
            output=output.weights,
            head_norms=(norm(head_dim), norm(head_dim)) if spec.qk_norm else None,
            num_heads=len(heads),
            num_kv_heads=len(kv_heads),
            head_dim=head_dim,
        )
        self.mlp = MlpWeights(
            norm=norm(spec.hidden_size), gate_up=gate_up.weights, down=down.weights
        )
        self._stacks = {"self_attn.": (qkv, output), "mlp.": (gate_up, down)}

    def checkpoint_tensors(self, prefix: str) -> Iterator[CheckpointTensor]:
        """Name what fills this layer; `prefix` ends with a dot."""
        yield _whole(f"{prefix}input_layernorm.weight", self.attention.norm.weight)
        for half, stacks in self._stacks.items():
            for stack in stacks:
                yield from stack.checkpoint_tensors(prefix + half)
        if self.attention.head_norms is not None:
            for name, norm in zip(("q_norm", "k_norm"), self.attention.head_norms, strict=True):
                yield _whole(f"{prefix}self_attn.{name}.weight", norm.weight)
        yield _whole(f"{prefix}post_attention_layernorm.weight", self.mlp.norm.weight)


def _whole(name: str, memory: Tensor) -> CheckpointTensor:
    return CheckpointTensor.filling(memory, name, *map(Share.full, memory.shape))


class Parameters:
    """A rank's part of a model's parameters, uninitialized until a loader has filled them.

    Attributes:
        embedding: [token ids of the part, hidden] (see `shard.vocab_range`), on the first stage;
            and on the last one too where the head is tied to it. None elsewhere.
        head: as `embedding`, on the last stage, and the same tensor where they are tied.
        norm: the last one, on the last stage.
        layers: those of the stage; the first of them is the model's layer `first_layer`.
        dtype, device: of all of them.

    Raises:
        ConfigError: the model cannot be shared out as `place` says.
    """

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        place: Place = Place(),  # noqa: B008 (frozen)
    ) -> None:
        allocate = partial(_allocate, dtype=dtype, device=device)
        self.dtype, self.device = dtype, device
        self._spec = spec
        self._hidden = Share.full(spec.hidden_size)
        self._vocab = vocab = vocab_share(spec, place)
        layers = stage_layers(spec, place)
        self.first_layer = layers.start
        self.embedding: Tensor | None = None
        if place.is_first or (spec.is_tied and place.is_last):
            self.embedding = allocate(vocab.size, spec.hidden_size, is_padded=vocab.is_padded)
        self.layers = [LayerParameters(allocate, spec, place) for _ in layers]
        self.norm: NormWeights | None = None
        self.head: Tensor | None = None
        if place.is_last:
            self.norm = NormWeights(allocate(spec.hidden_size), spec.rms_norm_eps)
            self.head = self.embedding
            if not spec.is_tied:
                self.head = allocate(vocab.size, spec.hidden_size, is_padded=vocab.is_padded)

    def checkpoint_tensors(self) -> Iterator[CheckpointTensor]:
        """Name every tensor of the whole checkpoint, and what of it is needed here.

        Call it before layers are taken out of `layers`.
        """
        axes = self._vocab, self._hidden
        yield CheckpointTensor.filling(self.embedding, "model.embed_tokens.weight", *axes)
        for index in range(self._spec.num_layers):
            yield from self._layer_tensors(index)
        norm = self.norm.weight if self.norm is not None else None
        yield CheckpointTensor.filling(norm, "model.norm.weight", self._hidden)
        if not self._spec.is_tied:
            yield CheckpointTensor.filling(self.head, "lm_head.weight", *axes)

    def _layer_tensors(self, index: int) -> Iterator[CheckpointTensor]:
        prefix = f"model.layers.{index}."
        local = index - self.first_layer
        if 0 <= local < len(self.layers):
            yield from self.layers[local].checkpoint_tensors(prefix)
        else:
            # All layers have tensors of the same names and shapes: any layer tells those of a
            # layer that another stage has.
            for tensor in self.layers[0].checkpoint_tensors(prefix):
                yield replace(tensor, pieces=())
