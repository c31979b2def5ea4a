"""Typed errors of charonia, each with the status code a client sees.

Owns the vocabulary of failure. Must not know Triton: `serving` maps `code` to a Triton error
code of the same name. Messages name the offending value and what would be accepted; they never
contain a traceback or a path of the server.
"""

from typing import ClassVar


class CharoniaError(Exception):
    """Base class. `code` is the name of a Triton status code."""

    code: ClassVar[str] = "INTERNAL"


class InvalidRequestError(CharoniaError):
    """The request itself is wrong; sending it again cannot help."""

    code = "INVALID_ARG"


class NotSupportedError(CharoniaError):
    """The request asks for something charonia does not do (yet)."""

    code = "UNSUPPORTED"


class UnavailableError(CharoniaError):
    """The request is fine, but cannot be served now; a later try may succeed."""

    code = "UNAVAILABLE"


class QueueFullError(UnavailableError):
    """The bounded queue holds `max_queue_size` waiting requests."""


class RequestTimeoutError(UnavailableError):
    """The request waited or ran longer than its own `timeout` or `deadline_ms`."""


class RequestCancelledError(CharoniaError):
    """The client cancelled the request, or went away."""

    code = "CANCELLED"


class ConfigError(CharoniaError):
    """A configuration value is unknown, ill-typed or out of range."""

    code = "INVALID_ARG"


class CheckpointError(CharoniaError):
    """A checkpoint cannot be loaded: files, architecture or tensors are not as needed."""

    code = "INVALID_ARG"


class PlanRefusedError(CharoniaError):
    """The engine refuses a plan: no or wrong secret, out of sequence, or a value out of range."""

    code = "INVALID_ARG"


class StepFailedError(CharoniaError):
    """A step raised, but its engine lives. A new epoch brings it back."""


class EngineDiedError(CharoniaError):
    """The engine's process died, hangs, or stopped answering. It must be restarted."""

    code = "UNAVAILABLE"


class EngineUnloadedError(EngineDiedError):
    """The engine was unloaded on purpose; another one may follow."""


class EngineHungError(EngineDiedError):
    """The engine's process lives, but does not answer."""


class RankLostError(EngineDiedError):
    """A rank of the engine has ended or does not answer; the others cannot go on without it."""


_SHOWN = 80  # characters


def shown(value: object) -> str:
    """A value as it may stand in a message: its repr, shortened where a client made it long."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
