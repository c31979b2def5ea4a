"""Reload: another engine under a running scheduler.

Owns an operator's order to change the engine, and the move of live requests to a scheduler with
other limits. Must not know how an engine is loaded, nor which clients wait.

    waiting ──► [draining: live requests finish, new ones are held] ──► loading ──► done
                                                                           │
                             the old configuration is loaded again ◄───────┘──► failed
"""

from dataclasses import dataclass
from typing import Literal, Protocol

from charonia.control import Limits, Request, Scheduler
from charonia.protocol import EngineInfo

Phase = Literal["waiting", "draining", "loading", "done", "failed"]


class Configuration(Protocol):
    """The engine's configuration, where its next load finds it. Every method may raise OSError."""

    def install(self) -> None:
        """Replace the old one; if that fails, the old one is kept."""
        ...

    def restore(self) -> None:
        """Undo that."""
        ...

    def settle(self) -> None:
        """Make it permanent, since an engine serves with it."""
        ...


@dataclass
class Reload:
    """An order to change to another engine, and its progress.

    The thread that owns the engine writes it; any thread may read it. Other threads write only
    `is_cancelled`, and call `fail` for an order that is refused before that thread has seen it.

    Attributes:
        configuration: the new one.
        drain: whether live requests finish on the old engine first.
        phase: progress. seconds: from the old engine's last step to the end, once it is over.
        num_live: while draining, requests that must finish first; when done, requests that went on.
        num_held: while draining, new requests that wait for the next engine.
        reason: why it failed or can no longer succeed.
        is_cancelled: set by the operator's side, to cancel it while it is draining.
    """

    configuration: Configuration
    drain: bool = False
    phase: Phase = "waiting"
    seconds: float = 0.0
    num_live: int = 0
    num_held: int = 0
    reason: str = ""
    is_cancelled: bool = False
    _began_at: float | None = None

    @property
    def is_over(self) -> bool:
        """True if it is done or has failed."""
        return self.phase in ("done", "failed")

    def begin(self, now: float) -> None:
        """Note that the old engine has stopped and the new one is to be loaded."""
        self.phase = "loading"
        self._began_at = now

    def finish(self, now: float) -> None:
        """Note that the new engine serves."""
        self._take_time(now)
        self.phase = "done"

    def undo(self, reason: str) -> str:
        """Restore the old configuration, if a new one was installed.

        Returns:
            The reason, and the error if that fails, too.
        """
        if self._began_at is None:
            return reason
        try:
            self.configuration.restore()
        except OSError as error:
            return f"{reason}; the old configuration cannot be restored: {error.strerror}"
        return reason

    def fail(self, reason: str, now: float | None = None) -> None:
        """Note that the reload has failed."""
        if now is not None:
            self._take_time(now)
        self.reason = reason
        self.phase = "failed"

    def _take_time(self, now: float) -> None:
        if self._began_at is not None:
            self.seconds = now - self._began_at


def take_over(old: Scheduler, new: Scheduler) -> None:
    """Move all live requests from an old scheduler to a new one, in their order.

    The new cache is empty. All requests must fit the new engine (see `misfit`).
    """
    old.reset()  # nothing is in flight, and no request has a row
    requests = sorted(old.requests, key=lambda request: request.number)
    for request in requests:
        request.group.disband()
        request.expected_ids.clear()  # the new vocabulary may lack them
    for request in requests:
        new.add(request)


def misfit(request: Request, info: EngineInfo, limits: Limits) -> str | None:
    """Explain why a live request cannot go on with an engine; None if it can."""
    num_tokens = len(request.token_ids)
    if num_tokens >= limits.max_model_len:
        return (
            f"the engine was restarted with max_model_len {limits.max_model_len}; "
            f"the request has {num_tokens} tokens already"
        )
    sampling = request.sampling
    bad_ids = (token_id for ids in sampling.bad_words_ids for token_id in ids)
    edited_ids = (*sampling.logit_bias, *sampling.allowed_ids)
    ids = [*request.token_ids, *sampling.stop_ids, *edited_ids, *bad_ids]
    if max(ids) >= info.vocab_size:
        return (
            f"the engine was restarted with a vocabulary of {info.vocab_size} tokens; "
            f"the request has token id {max(ids)}"
        )
    return None
