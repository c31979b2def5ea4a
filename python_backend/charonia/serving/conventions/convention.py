"""Conventions: translations between a proxy's clients and the scheduler.

Owns the interface between a proxy and a convention, and the plain convention, which is the
scheduler's own. Must not know connections or senders.

A client's request may become several requests to the scheduler. These are its parts; their answers
go to the same client.
"""

from collections.abc import Sequence
from typing import Protocol

from charonia.errors import CharoniaError, InvalidRequestError
from charonia.serving.requests.raw_request import Outputs, RawRequest


class Part(Protocol):
    """Translates the scheduler's answers to one part.

    It must not hold the request, which may be large.
    """

    def answer(self, outputs: Outputs) -> Outputs | None:
        """The client's outputs for these outputs of the scheduler; None sends nothing."""
        ...

    def failure(self, error: CharoniaError) -> CharoniaError | None:
        """The client's error for an error of the scheduler; None ends the answer without one."""
        ...


class Convention(Protocol):
    """Translates the requests of one proxy's clients."""

    def split(self, raw: RawRequest) -> Sequence[tuple[RawRequest, Part]]:
        """Split a client's request into parts, at least one, as requests to the scheduler.

        Raises:
            CharoniaError: the whole request is refused.
        """
        ...


class _Whole:
    """A request that is passed on unchanged, like its answers."""

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
        """Raises InvalidRequestError: it asks for a stream, and the model is not decoupled."""
        if not self._is_decoupled and "stream" in raw.tensors:
            raise InvalidRequestError("this model cannot stream: it is not decoupled")
        return [(raw, _Whole())]
