"""How a proxy's clients speak, and what their requests are to the scheduler.

Owns the seam between a proxy and a convention, and the plain one, which is the scheduler's own.
Must not know connections or senders.

One request of a client may be several to the scheduler: parts, whose answers go to the same client.
"""

from collections.abc import Sequence
from typing import Protocol

from charonia.errors import CharoniaError, InvalidRequestError
from charonia.serving.requests.raw_request import Outputs, RawRequest


class Part(Protocol):
    """What the scheduler's answers to a request mean to the client.

    It does not hold the request, which may be large and has gone by then.
    """

    def answer(self, outputs: Outputs) -> Outputs | None:
        """What the client gets for these outputs of the scheduler; None for nothing."""
        ...

    def failure(self, error: CharoniaError) -> CharoniaError | None:
        """What the client gets for an error; None for an answer that just ends."""
        ...


class Convention(Protocol):
    """How clients speak to one proxy."""

    def split(self, raw: RawRequest) -> Sequence[tuple[RawRequest, Part]]:
        """The parts of a client's request, one at least, as requests of the scheduler.

        Raises:
            CharoniaError: it is refused as a whole.
        """
        ...


class _Whole:
    """A request that goes on as it came, as do its answers."""

    def answer(self, outputs: Outputs) -> Outputs:
        return outputs

    def failure(self, error: CharoniaError) -> CharoniaError:
        return error


class PlainConvention:
    """The scheduler's own convention.

    Args:
        is_decoupled: whether clients may ask for streams.
    """

    def __init__(self, *, is_decoupled: bool) -> None:
        self._is_decoupled = is_decoupled

    def split(self, raw: RawRequest) -> Sequence[tuple[RawRequest, Part]]:
        """Raises InvalidRequestError: a stream cannot be had."""
        if not self._is_decoupled and "stream" in raw.tensors:
            raise InvalidRequestError("this model cannot stream: it is not decoupled")
        return [(raw, _Whole())]
