"""Typed errors of charonia, each with the kind and the status code that a client sees.

Owns the vocabulary of failure, and how it is written into an answer. Knows nothing about Triton:
`serving` maps `code` to the Triton error code of the same name. Messages name the offending value
and what would be accepted; they never contain a traceback or a path of the server.

Many clients never see the status code: Triton's streams carry none, and its HTTP `generate` answers
400 for everything. So the text itself ends with the kind::

    text_input must not be empty [charonia:invalid_request]

The kind comes last, so a client's own value within the text cannot be mistaken for it.
"""

import re
from typing import ClassVar


class CharoniaError(Exception):
    """The server failed.

    Attributes:
        kind: what went wrong, for programs. code: the name of a Triton status code.
        is_retryable: whether the same request may succeed a little later.
        is_clients_doing: whether the client or its tenant is the cause, not the server.
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
    """The request is wrong, and clients expect an exact text for that error, without a kind."""

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
    """The queue is full: its limit of requests, prompt tokens or bytes is reached."""

    kind = "queue_full"

    @classmethod
    def of(cls, maximum: str) -> "QueueFullError":
        """The error in the words of Triton's own queue, by which clients recognize it."""
        return cls(_full_queue("is refused", maximum))

    @classmethod
    def of_leaver(cls, maximum: str, retry_after_s: float | None) -> "QueueFullError":
        """The same for a request that waited and gives way to another one.

        Args:
            retry_after_s: estimated time until the requests before it have begun; None if unknown.
        """
        text = _full_queue("gives way to one that comes before it", maximum)
        return cls(_with_wait(text, retry_after_s))


class TenantQueueFullError(QueueFullError):
    """The tenant's own limit of waiting requests or their prompt tokens is reached."""

    kind = "tenant_queue_full"
    is_clients_doing = True


class RateLimitedError(UnavailableError):
    """The tenant exceeds its limit of concurrent requests, or its rate limit.

    Args:
        retry_after_s: estimated time until there is room for one; None if unknown. The message
            ends with it.
    """

    kind = "rate_limited"
    is_clients_doing = True

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(_with_wait(message, retry_after_s))


class OverloadedError(UnavailableError):
    """The server is overloaded and takes no requests of low priority.

    Args:
        retry_after_s: when the overload may be over; the message ends with it.
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
            is_until_start: whether its `timeout` has expired, in Triton's own words; otherwise its
                `deadline_ms`.
        """
        return cls("Request timeout expired" if is_until_start else "deadline_ms has passed")


class LateRequestError(RequestTimeoutError):
    """The request can no longer meet its `deadline_ms`, or would wait longer than that.

    Args:
        retry_after_s: when a retry may be in time; the message ends with it. None if it never will
            be; then the error is not retryable.
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
        TenantQueueFullError,
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
"""Errors that a client of the public models may get, by kind."""

_SUFFIX = re.compile(r"(.*) \[charonia:([a-z_]+)\]", re.DOTALL)


def split_answer(text: str) -> tuple[str, str | None]:
    """Split an answer's text into the message and the kind; None if it has none."""
    match = _SUFFIX.fullmatch(text)
    return (match[1], match[2]) if match else (text, None)


def error_of(message: str, kind: str | None) -> CharoniaError:
    """Make the error of a message and a kind."""
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
    """The server takes no calls yet: it is still loading models, perhaps also the engine."""


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
    """A value's repr for a message, shortened if it is long."""
    try:
        text = repr(value)
    except RecursionError:
        return f"a {type(value).__name__} that is nested too deeply to show"
    except ValueError:  # an integer of thousands of digits
        return f"a value of type {type(value).__name__} that is too long to show"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
