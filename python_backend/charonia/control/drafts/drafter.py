"""The seam behind which tokens are guessed from text alone.

Owns the protocol. Whoever implements it must not know blocks, rows or whether a guess paid.
"""

from typing import Protocol

from charonia.control.state.request import Request


class Drafter(Protocol):
    """Guesses what follows a request's tokens."""

    def begin_step(self) -> None:
        """A step is being planned; proposals for its rows follow.

        What takes long, such as indexing a prompt, is to be spread over steps: this says when one
        ends and the next one begins.
        """
        ...

    def propose(self, request: Request, max_tokens: int) -> list[int]:
        """Guess at most `max_tokens` (>= 1) tokens; none where nothing suggests itself.

        Called at most once per step and request, possibly not for many steps. The request's
        tokens only grow.
        """
        ...

    def forget(self, request: Request) -> None:
        """The request has ended, whether it ever asked for a guess or not."""
        ...
