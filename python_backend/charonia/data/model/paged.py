"""A model with its KV cache, as an engine's step uses it.

Owns the pairing of a decoder and its pages, and the hidden states of the last pass. Must not know
rows, plans or other ranks.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from charonia.data.kv_store import KVStore
from charonia.data.model.decoder import Decoder, Hidden
from charonia.data.ops.base import StepBatch
from charonia.protocol import BlockCopy

PendingLogits = Callable[[], Tensor]
"""Computes logits, [lines, vocab_size] float32, or waits for the ranks that do. Must be called
once, in the order of the requests for logits."""


class Model(Protocol):
    """A model on one rank or on several."""

    def forward(self, batch: StepBatch, lines: Sequence[int]) -> PendingLogits:
        """Compute a pass.

        Args:
            lines: indices in the batch of the tokens whose logits are wanted, ascending. If there
                are none, the returned function must not be called.
        """
        ...

    def logits(self, lines: slice) -> PendingLogits:
        """Return the logits of more tokens of the last pass."""
        ...

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks of the KV cache, with the effect of one copy after the other."""
        ...


class PagedModel:
    """Implements `Model` for this process's part of a model."""

    def __init__(self, decoder: Decoder, kv: KVStore) -> None:
        self._decoder = decoder
        self._kv = kv
        self._hidden: Hidden | None = None

    def forward(self, batch: StepBatch, lines: Sequence[int]) -> PendingLogits:
        """See `Model`."""
        hidden = self._hidden = self._decoder.hidden_states(batch, self._kv.pages)
        index: Tensor | None = None
        if len(lines) < len(batch.positions):
            index = torch.tensor(lines).to(batch.positions.device)
        return lambda: self._decoder.logits(hidden, index)

    def logits(self, lines: slice) -> PendingLogits:
        """See `Model`."""
        hidden = self._hidden
        assert hidden is not None, "logits() before forward()"
        return lambda: self._decoder.logits(hidden, lines)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """See `Model`."""
        self._kv.copy(copies)
