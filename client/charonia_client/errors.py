"""The client's errors as types, and how a server's answer becomes one of them.

Owns the error classes and the mapping from gRPC codes, HTTP codes and texts. Must not know
sockets, nor when to retry (`retry` asks `is_retryable`).

Triton gives no code with an error inside a gRPC stream or an SSE stream, and its HTTP
endpoint `generate` answers 400 whatever the model said. So charonia ends each text with its kind,
as in "text_input must not be empty [charonia:invalid_request]". The kind decides the type, and is
removed from the message. An error without a kind is Triton's or the connection's. Its code decides,
or a known text of Triton's if there is no code.
"""

import re


class CharoniaClientError(Exception):
    """Base class of all errors of this client.

    Attributes:
        message: what the server said, or what the client noticed.
        kind: the server's name of the error; None if it is not charonia's own error.
        request_id: of the request, None if there is none (health, metrics).
        is_retryable: whether the same request may succeed a little later.
        retry_after_s: seconds to wait, if the server knows them.
    """

    is_retryable: bool = False

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.kind: str | None = None
        self.request_id: str | None = None
        self.retry_after_s = retry_after_s


class InvalidRequest(CharoniaClientError):
    """The request itself is wrong, or asks for what the server cannot do."""


class Unavailable(CharoniaClientError):
    """The request is fine, but cannot be served now."""

    is_retryable = True


class QueueFull(Unavailable):
    """The server's bounded queue is full."""


class Overloaded(Unavailable):
    """The server is overloaded, and refuses requests of low priority."""


class RateLimited(Unavailable):
    """The tenant has too many requests at once or in the queue, or sends them too fast."""


class Timeout(CharoniaClientError):
    """The client's total or first-token timeout, or a deadline in the server, has passed."""


class Late(Timeout):
    """The server expects to miss the deadline.

    The same request may succeed later only if there is a `retry_after_s`.
    """

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message, retry_after_s)
        self.is_retryable = retry_after_s is not None


class Cancelled(CharoniaClientError):
    """The request was cancelled: by `cancel`, or by closing the stream or its client."""


class ConnectionFailed(CharoniaClientError):
    """No connection to the server."""

    is_retryable = True


class ConnectionLost(ConnectionFailed):
    """The connection broke after the request was sent; something may have been generated."""

    is_retryable = False


class ServerError(CharoniaClientError):
    """The server failed, or its answer is incomplete or malformed."""


KINDS: dict[str, type[CharoniaClientError]] = {
    "internal": ServerError,
    "invalid_request": InvalidRequest,
    "prompt_too_long": InvalidRequest,
    "not_supported": InvalidRequest,
    "unavailable": Unavailable,
    "queue_full": QueueFull,
    "tenant_queue_full": RateLimited,
    "rate_limited": RateLimited,
    "overloaded": Overloaded,
    "engine_down": Unavailable,
    "shutting_down": Unavailable,
    "timeout": Timeout,
    "late": Late,
    "cancelled": Cancelled,
    "quarantined": ServerError,
}
_SUFFIX = re.compile(r"(.*) \[charonia:([a-z_]+)\]\s*", re.DOTALL)
_RETRY_AFTER = re.compile(r"; retry after ([0-9]+\.[0-9]+) s\Z")

# Texts of Triton and gRPC, which have no kind. They are searched in this order, ignoring case.
# Unknown texts get the default of `from_text`.
_FOREIGN_TEXTS: tuple[tuple[type[CharoniaClientError], str], ...] = (
    (ConnectionFailed, r"failed to connect to all addresses|^errors resolving "),
    (Timeout, r"deadline exceeded"),
    (InvalidRequest, r"protocol is restricted|unknown model: '[^']*' is not found"),
    (
        Unavailable,
        r"server is shutting down|is not healthy|not ready|not at ready state"
        r"|no available versions",
    ),
)
_GRPC_CODES: dict[str, type[CharoniaClientError]] = {
    "INVALID_ARGUMENT": InvalidRequest,
    "NOT_FOUND": InvalidRequest,
    "ALREADY_EXISTS": InvalidRequest,
    "FAILED_PRECONDITION": InvalidRequest,
    "OUT_OF_RANGE": InvalidRequest,
    "PERMISSION_DENIED": InvalidRequest,
    "UNAUTHENTICATED": InvalidRequest,
    "UNIMPLEMENTED": InvalidRequest,
    "RESOURCE_EXHAUSTED": Unavailable,
    "DEADLINE_EXCEEDED": Timeout,
    "CANCELLED": Cancelled,
    "UNAVAILABLE": ConnectionLost,
}
_HTTP_CODES: dict[int, type[CharoniaClientError]] = {
    408: Timeout,
    429: Unavailable,
    499: Cancelled,
    502: Unavailable,
    503: Unavailable,
    504: Timeout,
}


def from_text(
    text: str, default: type[CharoniaClientError] = InvalidRequest
) -> CharoniaClientError:
    """Return the error for a text; of class `default` if neither its kind nor the text is known."""
    if match := _SUFFIX.fullmatch(text):
        wait = _RETRY_AFTER.search(match[1])
        error = KINDS.get(match[2], default)(match[1], float(wait[1]) if wait else None)
        error.kind = match[2]
        return error
    for known, pattern in _FOREIGN_TEXTS:
        if re.search(pattern, text, re.IGNORECASE):
            return known(text)
    return default(text)


def from_grpc_status(code: str, text: str) -> CharoniaClientError:
    """Return the error of an RPC that ended with a status.

    Triton puts a model's errors into the stream, so a status comes from Triton's front
    end or from the connection. UNAVAILABLE without a known text is a broken connection.

    Args:
        code: name of the status, such as "UNAVAILABLE".
    """
    return from_text(text, _GRPC_CODES.get(code, ServerError))


def from_http_status(status: int, text: str) -> CharoniaClientError:
    """Return the error of an HTTP response whose status is not 200."""
    default = InvalidRequest if 400 <= status < 500 else ServerError
    return from_text(text, _HTTP_CODES.get(status, default))
