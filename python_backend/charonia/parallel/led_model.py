"""A model with parts on other ranks, from the view of the rank that leads.

Owns which message each pass sends. Must not know how ranks are reached.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor

from charonia.data.model.paged import PagedModel, PendingLogits
from charonia.data.ops.base import StepBatch
from charonia.parallel.messages import Copy, Lines, Message, forward_of
from charonia.protocol import BlockCopy


class LedModel:
    """A `Model` whose other ranks compute what this process computes.

    Args:
        tell: sends a message to these ranks. name: of the model, in the messages.
        model: this rank's part. ranks: those with the other parts.
        receiver: receives the logits of a pipeline's last stage; None where they are here.
    """

    def __init__(
        self,
        tell: Callable[[Message, Sequence[int]], None],
        name: str,
        model: PagedModel,
        ranks: Sequence[int],
        receiver: Executor | None,
    ) -> None:
        self._tell = tell
        self._name = name
        self._model = model
        self._ranks = ranks
        self._receiver = receiver

    def forward(self, batch: StepBatch, lines: Sequence[int]) -> PendingLogits:
        """See `Model`."""
        self._tell(forward_of(self._name, batch, list(lines)), self._ranks)
        pending = self._model.forward(batch, lines)
        return self._receive(pending) if lines else pending

    def logits(self, lines: slice) -> PendingLogits:
        """See `Model`."""
        self._tell(Lines(self._name, lines.start, lines.stop), self._ranks)
        return self._receive(self._model.logits(lines))

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """See `Model`."""
        self._tell(Copy(self._name, list(copies)), self._ranks)
        self._model.copy_blocks(copies)

    def _receive(self, pending: PendingLogits) -> PendingLogits:
        return pending if self._receiver is None else self._receiver.submit(pending).result
