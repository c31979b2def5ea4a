"""The decoder of the llama family: token ids in, hidden states and logits out.

Owns what a model is made of, from the embedding to the head, and where the ranks that have parts
of it exchange what (Megatron-LM: Shoeybi et al. 2019, arXiv 1909.08053, section 3). Every rank of
a model makes the same calls with the same batch. Must not know plans, files or processes.

    token ids ─► embedding ─ sum ─► layers of stage 0 ─ send ─► layers of stage 1 ─► head ─ gather
                 (a part of the     (a sum after each sublayer)                   (of a part of the
                  vocabulary)                                                         vocabulary)
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from charonia.data.comm import ModelRank, Place
from charonia.data.model.parameters import Parameters
from charonia.data.model.rotary import rotation_table
from charonia.data.model.shard import vocab_range
from charonia.data.model.spec import ModelSpec
from charonia.data.ops.base import Guesser, MatrixWeights, Ops, Pages, StepBatch


class Hidden(NamedTuple):
    """The residual stream behind the last layer; the last contribution is not added yet."""

    x: Tensor  # [tokens, hidden]
    residual: Tensor  # [tokens, hidden]

    def rows(self, index: Tensor | slice) -> "Hidden":
        """Pick some tokens."""
        return Hidden(self.x[index], self.residual[index])


class Decoder:
    """A model, or what this rank has of it.

    Args:
        parameters: loaded, of `model_rank.place`; a layer's are let go as soon as `ops` has
            prepared it, which may copy them, so that a model is never in memory twice.
        num_positions: positions that rotary angles are tabulated for, i.e. max_model_len.
    """

    def __init__(
        self,
        spec: ModelSpec,
        parameters: Parameters,
        ops: Ops[Any],
        *,
        num_positions: int,
        model_rank: ModelRank | None = None,
    ) -> None:
        self._spec = spec
        self._ops = ops
        self._model_rank = model_rank = model_rank or ModelRank()
        self._embedding = parameters.embedding
        self._dtype, self._device = parameters.dtype, parameters.device
        self._rotation = rotation_table(
            spec.rope, spec.head_dim, num_positions, self._dtype, self._device
        )
        layers = []
        while parameters.layers:
            layer = parameters.layers.pop(0)
            layers.append([sublayer.prepare(ops) for sublayer in layer])
        self._layers = ops.layers(layers, model_rank.links.parts)
        self._head = None
        if parameters.head is not None and parameters.norm is not None:
            self._head = ops.head(parameters.norm, MatrixWeights(parameters.head, None))

    def hidden_states(self, batch: StepBatch, pages: Sequence[Pages]) -> Hidden:
        """Compute a step's tokens, storing their K and V in `pages` (one entry per layer).

        Returns:
            What `logits` wants to have; it means something on the last stage alone.
        """
        step = self._ops.begin(batch, self._rotation)
        residual = self._enter(batch)
        hidden = Hidden(self._layers(residual, step, pages), residual)
        after = self._model_rank.links.after
        if after is not None:
            after.broadcast(hidden.residual.add_(hidden.x), source=0)
        return hidden

    def logits(self, hidden: Hidden, lines: Tensor | slice | None = None) -> Tensor:
        """Map the tokens of `hidden`, or some `lines` of it, to logits.

        Every rank of the last stage must call this, and the engine's process, which alone gets them
        whole, and waits for them where it is on another stage.

        Args:
            lines: whose logits; a slice has a start and a stop.

        Returns:
            [lines, vocab_size] float32.
        """
        link = self._model_rank.links.logits
        if self._head is None:
            assert link is not None, "this rank has no logits"
            return link.broadcast(self._empty_logits(hidden, lines), source=1)
        logits = self._whole(self._head(*(hidden if lines is None else hidden.rows(lines))))
        return logits if link is None else link.broadcast(logits.contiguous(), source=1)

    def guesser(self) -> Guesser | None:
        """All of the model as one call, where its operations have that and it is whole."""
        if self._model_rank.place != Place() or self._embedding is None or self._head is None:
            return None
        return self._ops.guesser(self._embedding, self._layers, self._head, self._rotation)

    def _enter(self, batch: StepBatch) -> Tensor:
        """The residual stream before this stage's layers, [tokens, hidden]."""
        links = self._model_rank.links
        if links.before is not None:
            size = (len(batch.token_ids), self._spec.hidden_size)
            stream = torch.empty(size, dtype=self._dtype, device=self._device)
            return links.before.broadcast(stream, source=0)
        assert self._embedding is not None, "the first stage has the embedding"
        if links.parts is None:
            return self._embedding.index_select(0, batch.token_ids)
        lines = batch.token_ids - vocab_range(self._spec, self._model_rank.place).start
        is_elsewhere = (lines < 0) | (lines >= len(self._embedding))
        stream = self._embedding.index_select(0, lines.masked_fill_(is_elsewhere, 0))
        return links.parts.all_reduce(stream.masked_fill_(is_elsewhere[:, None], 0))

    def _whole(self, logits: Tensor) -> Tensor:
        """Join the vocabulary's parts, for part 0, which alone needs them all.

        One part after the other, each to its place: what all ranks gather would be moved twice, and
        then once more to be in order.
        """
        parts = self._model_rank.links.parts
        if parts is None:
            return logits
        num_lines, size = logits.shape
        whole = logits.new_empty((num_lines, parts.size, size)) if parts.rank == 0 else None
        for source in range(parts.size):
            part = logits if source == parts.rank else torch.empty_like(logits)
            if source:
                parts.broadcast(part, source)
            if whole is not None:
                whole[:, source] = part
        if whole is None:
            return logits
        return whole.view(num_lines, -1)[:, : self._spec.vocab_size]

    def _empty_logits(self, hidden: Hidden, lines: Tensor | slice | None) -> Tensor:
        count = len(hidden.x)
        if lines is not None:
            count = lines.stop - lines.start if isinstance(lines, slice) else len(lines)
        return torch.empty((count, self._spec.vocab_size), device=self._device)
