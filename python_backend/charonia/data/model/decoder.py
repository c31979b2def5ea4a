"""The decoder of the llama family: token ids in, hidden states and logits out.

Owns the structure of a model from the embedding to the head, and its communication between ranks
(Megatron-LM: Shoeybi et al. 2019, arXiv 1909.08053, section 3). Every rank of a model makes the
same calls with the same batch. Must not know plans, files or processes.

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
    """The residual stream after the last layer; `x` is its last contribution, not added yet."""

    x: Tensor  # [tokens, hidden]
    residual: Tensor  # [tokens, hidden]

    def rows(self, index: Tensor | slice) -> "Hidden":
        """Select tokens by [n] int64 or a slice."""
        return Hidden(self.x[index], self.residual[index])


class Decoder:
    """A model, or this rank's part of it.

    Args:
        parameters: loaded, of `model_rank.place`. Each layer's are released once `ops` has prepared
            it, possibly by copying them. So a model is never in memory twice.
        num_positions: number of positions with tabulated rotary angles, i.e. max_model_len.
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
        """Compute a step's tokens, and store their K and V in `pages` (one entry per layer).

        Returns:
            The argument of `logits`; it is meaningful only on the last stage.
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

        Every rank of the last stage must call this, and the engine's process. Only the latter gets
        the logits of the whole vocabulary; if it is on another stage, it receives them.

        Args:
            lines: indices [n] int64 of tokens, or a slice with start and stop; None takes all.

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
        """The whole model as one call; None if it is split or `ops` does not support that."""
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
        """Join the parts of the vocabulary on part 0, the only one that needs all of them.

        Each part is broadcast in turn, and copied to its place. A gather on all ranks would move
        the data twice, and once more to put it in order.
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
