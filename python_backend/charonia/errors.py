"""Typed errors of charonia, each with the kind and the status code that a client sees.

Owns the vocabulary of failure, and how it is written into an answer. Must not know Triton:
`serving` maps `code` to a Triton error code of the same name. Messages name the offending value and
what would be accepted; they never contain a traceback or a path of the server.

A status code gets lost on the way to many clients: Triton's streams carry none, and its HTTP
`generate` answers 400 for everything. So the text itself ends with the kind::

    text_input must not be empty [charonia:invalid_request]

It is put there last, so no value of a client's within the text can stand for it.
"""

import re
from typing import ClassVar


class CharoniaError(Exception):
    """The server failed.

    Attributes:
        kind: what went wrong, for programs. code: the name of a Triton status code.
        is_retryable: whether the same request may succeed a little later.
        is_clients_doing: whether the client or its tenant is the cause, and not the server.
        has_suffix: whether the text that a client gets ends with the kind.
    """

    kind: ClassVar[str] = "internal"
    code: ClassVar[str] = "INTERNAL"
    is_retryable: bool = False
    is_clients_doing: ClassVar[bool] = False
    has_suffix: ClassVar[bool] = True

    @property
    def answer(self) -> str:
        """The text that a client gets."""
        return f"{self} [charonia:{self.kind}]" if self.has_suffix else str(self)


class InvalidRequestError(CharoniaError):
    """The request itself is wrong."""

    kind = "invalid_request"
    code = "INVALID_ARG"
    is_clients_doing = True


class ExactTextError(InvalidRequestError):
    """The request is wrong in a way for which clients expect an exact text, without a kind."""

    has_suffix = False


class PromptTooLongError(InvalidRequestError):
    """The prompt has more tokens, or bytes, than the engine could ever take."""

    kind = "prompt_too_long"


class NotSupportedError(CharoniaError):
    """The request asks for something that charonia does not do (yet)."""

    kind = "not_supported"
    code = "UNSUPPORTED"
    is_clients_doing = True


class UnavailableError(CharoniaError):
    """The request is fine, but cannot be served now."""

    kind = "unavailable"
    code = "UNAVAILABLE"
    is_retryable = True


class QueueFullError(UnavailableError):
    """As many requests wait, or as many bytes of them, as the server holds."""

    kind = "queue_full"

    @classmethod
    def of(cls, maximum: str) -> "QueueFullError":
        """The error in the words that Triton's own queue has, by which clients know it."""
        return cls(_full_queue("is refused", maximum))

    @classmethod
    def of_leaver(cls, maximum: str, retry_after_s: float | None) -> "QueueFullError":
        """Likewise of a request that waited and gives way to another one.

        Args:
            retry_after_s: when those before it will have begun, as far as is known.
        """
        text = _full_queue("gives way to one that comes before it", maximum)
        return cls(_with_wait(text, retry_after_s))


class TenantQueueFullError(QueueFullError):
    """As many requests of the tenant wait, or as many prompt tokens of them, as it may have."""

    is_clients_doing = True


class RateLimitedError(UnavailableError):
    """The tenant has as many requests at once as it may have, or sends them too fast.

    Args:
        retry_after_s: when there is room for one, as far as is known; the message ends with it.
    """

    kind = "rate_limited"
    is_clients_doing = True

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(_with_wait(message, retry_after_s))


class OverloadedError(UnavailableError):
    """The server has more to do than it can, and takes no requests of low priority.

    Args:
        retry_after_s: when that may be over; the message ends with it.
    """

    kind = "overloaded"

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(_with_wait(message, retry_after_s))


class EngineDownError(UnavailableError):
    """There is no engine to serve the request."""

    kind = "engine_down"


class ShuttingDownError(UnavailableError):
    """The server is being stopped."""

    kind = "shutting_down"

    def __init__(self, message: str = "the server is shutting down") -> None:
        super().__init__(message)


class RequestTimeoutError(UnavailableError):
    """The request waited or ran longer than its own `timeout` or `deadline_ms`."""

    kind = "timeout"
    is_retryable = False

    @classmethod
    def of(cls, *, is_until_start: bool) -> "RequestTimeoutError":
        """The error in the words that clients know.

        Args:
            is_until_start: its `timeout` is over, in Triton's own words; else its `deadline_ms`.
        """
        return cls("Request timeout expired" if is_until_start else "deadline_ms has passed")


class LateRequestError(RequestTimeoutError):
    """The request cannot be answered before its `deadline_ms` any more, or would wait for longer.

    Args:
        retry_after_s: when it may be in time; the message ends with it. None where it never will
            be: then it is of no use to try again.
    """

    kind = "late"

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(_with_wait(message, retry_after_s))
        self.is_retryable = _WAIT.search(str(self)) is not None


class RequestCancelledError(CharoniaError):
    """The client cancelled the request, or went away."""

    kind = "cancelled"
    code = "CANCELLED"
    is_clients_doing = True


class RequestQuarantinedError(CharoniaError):
    """The request stops the engine each time it runs."""

    kind = "quarantined"


_WAIT = re.compile(r"; retry after [0-9]+\.[0-9]+ s\Z")


def _full_queue(what: str, maximum: str) -> str:
    return (
        f"Exceeds maximum queue size: the request {what}. "
        f"Maximum queue size of {maximum} is reached; try again later"
    )


def _with_wait(message: str, retry_after_s: float | None) -> str:
    if retry_after_s is None:
        return message
    return f"{message}; retry after {max(retry_after_s, 0.001):.3f} s"


KINDS: dict[str, type[CharoniaError]] = {
    error.kind: error
    for error in (
        CharoniaError,
        InvalidRequestError,
        PromptTooLongError,
        NotSupportedError,
        UnavailableError,
        QueueFullError,
        RateLimitedError,
        OverloadedError,
        EngineDownError,
        ShuttingDownError,
        RequestTimeoutError,
        LateRequestError,
        RequestCancelledError,
        RequestQuarantinedError,
    )
}
"""By the name of the kind, what a client of the public models gets."""

_SUFFIX = re.compile(r"(.*) \[charonia:([a-z_]+)\]", re.DOTALL)


def split_answer(text: str) -> tuple[str, str | None]:
    """The message and the kind of an answer's text; None where it has none."""
    match = _SUFFIX.fullmatch(text)
    return (match[1], match[2]) if match else (text, None)


def error_of(message: str, kind: str | None) -> CharoniaError:
    """The error that was told by its message and kind."""
    return KINDS.get(kind or "", CharoniaError)(message)


class ConfigError(CharoniaError):
    """A configuration value is unknown, ill-typed or out of range."""

    code = "INVALID_ARG"


class CheckpointError(CharoniaError):
    """A checkpoint cannot be loaded: files, architecture or tensors are not as needed."""

    code = "INVALID_ARG"


class PlanRefusedError(CharoniaError):
    """The engine refuses a plan: it is not the next one, or a value in it is out of range."""

    kind = "invalid_request"
    code = "INVALID_ARG"


class StepFailedError(CharoniaError):
    """A step raised, but its engine lives. A new epoch brings it back."""


class EngineDiedError(CharoniaError):
    """The engine's process died, hangs, or stopped answering. It must be restarted."""

    kind = "engine_down"
    code = "UNAVAILABLE"


class EngineUnloadedError(EngineDiedError):
    """The engine was unloaded on purpose; another one may follow."""


class ServerStoppingError(EngineDiedError):
    """The server takes no calls any more: it is shutting down."""


class ServerStartingError(EngineUnloadedError):
    """The server takes no calls yet: it is still loading models, the engine's perhaps, too."""


class EngineHungError(EngineDiedError):
    """The engine's process lives, but does not answer."""


class RankLostError(EngineDiedError):
    """A rank of the engine has ended or does not answer; the others cannot go on without it."""


class LaunchError(CharoniaError):
    """The server cannot be started, or does not stay up. Unlike other errors it may name paths:
    it is shown to the operator, never to a client."""


class LostError(LaunchError):
    """The server was lost after it had taken its first connections: a request may have ended it, so
    this does not say that it cannot be started."""


class CrashError(LaunchError):
    """The server crashed on its way up. On a busy machine it may, where waits.c is not in front of
    it; no other cause is known. So once is worth another try."""


class NotReadyError(LaunchError):
    """The server was not ready in time, perhaps for the same reason. So once is worth another try,
    and the error's notes say what was going on."""


_SHOWN = 80  # characters


def shown(value: object) -> str:
    """A value as it may stand in a message: its repr, shortened where a client made it long."""
    try:
        text = repr(value)
    except RecursionError:
        return f"a {type(value).__name__} that is nested too deeply to show"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
