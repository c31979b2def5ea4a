"""The protocol of drafters, which make drafts from text alone.

Owns the protocol. Implementations know nothing about blocks, rows or whether drafts paid off.
"""

from typing import Protocol

from charonia.control.state.request import Request


class Drafter(Protocol):
    """Drafts the tokens that may follow a request's tokens."""

    def begin_step(self) -> None:
        """A step is being planned; calls of `propose` for its rows follow.

        Slow work, such as indexing a prompt, should be spread over steps. This call marks where one
        step ends and the next begins.
        """
        ...

    def propose(self, request: Request, max_tokens: int) -> list[int]:
        """Draft at most `max_tokens` (>= 1) tokens, or none if nothing is likely.

        Called at most once per step and request, possibly not for many steps. The request's
        tokens only grow.
        """
        ...

    def forget(self, request: Request) -> None:
        """The request has ended, whether `propose` was ever called for it or not."""
        ...

    def forget_ended(self) -> None:
        """Another engine follows, which may lack tokens of requests that have ended."""
        ...
