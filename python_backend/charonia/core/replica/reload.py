"""Another engine under a living scheduler: what is asked for, and what is taken over.

Owns the order to change the engine, and moving live requests to a scheduler with other limits. Must
not know how an engine is loaded, nor who waits for it.

    waiting ──► [draining: live requests finish, new ones are held] ──► loading ──► done
                                                                           │
                             the old configuration is loaded again ◄───────┘──► failed
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from charonia.control import Limits, Request, Scheduler
from charonia.protocol import EngineInfo

Phase = Literal["waiting", "draining", "loading", "done", "failed"]


@dataclass
class Reload:
    """An order to go on with another engine, and what has become of it.

    Written by the thread that owns the engine, and read by any. Two words come from elsewhere:
    `is_cancelled`, and a `fail` of an order that was refused before that thread had seen it.

    Attributes:
        install: makes the new configuration the one that an engine is loaded with, or raises
            OSError and leaves the old one; restore: undoes that; settle: makes it last, once there
            is an engine of it. These two may raise OSError, too.
        drain: whether live requests finish on the old engine first.
        phase: how far it is. seconds: since the old engine stopped computing, once over.
        num_live: requests that must finish first, while draining; that went on, when done.
        num_held: requests that came since, while draining.
        reason: why it failed, or cannot succeed any more.
        is_cancelled: set by whoever gave the order, to have it undone while it is draining.
    """

    install: Callable[[], None]
    restore: Callable[[], object]
    settle: Callable[[], None]
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
        """Whether nothing comes of it any more."""
        return self.phase in ("done", "failed")

    def begin(self, now: float) -> None:
        """The old engine computes no more, and the new one is to be loaded."""
        self.phase = "loading"
        self._began_at = now

    def finish(self, now: float) -> None:
        """The new engine serves."""
        self._take_time(now)
        self.phase = "done"

    def undo(self, reason: str) -> str:
        """Restore the old configuration; returns the reason for that, and what hindered it."""
        try:
            self.restore()
        except OSError as error:
            return f"{reason}; the old configuration cannot be restored: {error.strerror}"
        return reason

    def fail(self, reason: str, now: float | None = None) -> None:
        """It did not come about."""
        if now is not None:
            self._take_time(now)
        self.reason = reason
        self.phase = "failed"

    def _take_time(self, now: float) -> None:
        if self._began_at is not None:
            self.seconds = now - self._began_at


def take_over(old: Scheduler, new: Scheduler) -> None:
    """Give a scheduler for another engine all live requests of an old one, in their order.

    Nothing that is cached is taken along. All requests must fit (see `misfit`).
    """
    old.reset()  # nothing is in flight, and no request has a row
    requests = sorted(old.requests, key=lambda request: request.number)
    for request in requests:
        request.group.disband()
        request.expected_ids.clear()  # they may be no tokens of this engine
    for request in requests:
        new.add(request)


def misfit(request: Request, info: EngineInfo, limits: Limits) -> str | None:
    """Why a live request cannot go on with an engine; None when it can."""
    num_tokens = len(request.token_ids)
    if num_tokens >= limits.max_model_len:
        return (
            f"the engine was restarted with max_model_len {limits.max_model_len}; "
            f"the request has {num_tokens} tokens already"
        )
    sampling = request.sampling
    bad_ids = (token_id for ids in sampling.bad_words_ids for token_id in ids)
    ids = [*request.token_ids, *sampling.stop_ids, *sampling.logit_bias, *bad_ids]
    if max(ids) >= info.vocab_size:
        return (
            f"the engine was restarted with a vocabulary of {info.vocab_size} tokens; "
            f"the request has token id {max(ids)}"
        )
    return None
