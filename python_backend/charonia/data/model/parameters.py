"""A rank's parameters: their memory, and the tensors of a checkpoint that fill it.

Owns the parameters outside the layers, and `checkpoint_tensors`, which names every tensor of a
checkpoint and the parts of it that are needed here. Must not know files (`loader` does), how a
model is split among ranks (`shard` does) or what is computed with the parameters (`decoder` and
`Ops` do).
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from charonia.data.comm import Place
from charonia.data.model.checkpoint_tensors import CheckpointTensor
from charonia.data.model.shard import Share, stage_layers, vocab_share
from charonia.data.model.spec import ModelSpec
from charonia.data.model.sublayers import SUBLAYERS, SublayerParameters
from charonia.data.ops.base import NormWeights


def _allocate(
    *shape: int, dtype: torch.dtype, device: torch.device, is_padded: bool = False
) -> Tensor:
    make = torch.zeros if is_padded else torch.empty
    return make(shape, dtype=dtype, device=device)


class Parameters:
    """A rank's part of a model's parameters, uninitialized until a loader fills them.

    Attributes:
        embedding: [token ids of the part, hidden] (see `shard.vocab_range`), on the first stage,
            and on the last stage if the head is tied to it. None elsewhere.
        head: as `embedding`, on the last stage; the same tensor if they are tied.
        norm: the final norm, on the last stage.
        layers: the sublayers of each layer of the stage; the first is layer `first_layer` of the
            model.
        dtype, device: of all parameters.

    Raises:
        ConfigError: the model cannot be split as `place` says.
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
        self.layers: list[list[SublayerParameters]] = [
            [SUBLAYERS[name](allocate, spec, place) for name in spec.sublayers] for _ in layers
        ]
        self.norm: NormWeights | None = None
        self.head: Tensor | None = None
        if place.is_last:
            self.norm = NormWeights(allocate(spec.hidden_size), spec.rms_norm_eps)
            self.head = self.embedding
            if not spec.is_tied:
                self.head = allocate(vocab.size, spec.hidden_size, is_padded=vocab.is_padded)

    def checkpoint_tensors(self) -> Iterator[CheckpointTensor]:
        """Name every tensor of the whole checkpoint, and the pieces that are needed here.

        Must be called before layers are removed from `layers`.
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
        is_here = 0 <= local < len(self.layers)
        # All layers have tensors of the same names and shapes, so any layer can describe the layers
        # of other stages.
        for sublayer in self.layers[local if is_here else 0]:
            for tensor in sublayer.checkpoint_tensors(prefix):
                yield tensor if is_here else replace(tensor, pieces=())
