"""What can go wrong, as types, and how a server's answer becomes one of them.

Owns the error classes and the mapping from gRPC codes, HTTP codes and texts. Must not know
sockets, nor when to try again (`retry` asks `is_retryable`).

Triton gives no code with an error inside a gRPC stream, nor inside an SSE stream, and its HTTP
endpoint `generate` answers 400 whatever the model said. So the text decides where it is known,
and the code only where it means something. Texts are kept as the server sent them, with the
prefix that Triton gives to errors of an ensemble.
"""

import re
from typing import ClassVar


class CharoniaClientError(Exception):
    """Base class of all errors of this client.

    Attributes:
        message: what the server said, or what the client noticed.
        request_id: of the request, None where there is none (health, metrics).
        is_retryable: whether the same request may succeed a little later.
    """

    is_retryable: ClassVar[bool] = False

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message
        self.request_id: str | None = None


class InvalidRequest(CharoniaClientError):
    """The request itself is wrong, or asks for what the server cannot do."""


class Unavailable(CharoniaClientError):
    """The request is fine, but cannot be served now."""

    is_retryable = True


class QueueFull(Unavailable):
    """The server's bounded queue is full."""


class Timeout(CharoniaClientError):
    """The client's total or first-token timeout, or a deadline in the server, has passed."""


class Cancelled(CharoniaClientError):
    """The request was cancelled: by `cancel`, or by closing the stream from another thread."""


class ConnectionFailed(CharoniaClientError):
    """No connection to the server, or it broke."""

    is_retryable = True


class ServerError(CharoniaClientError):
    """The server failed, or its answer is incomplete or cannot be understood."""


# Looked for in this order, in any spelling of upper and lower case. Unknown texts fall to the
# default of `from_text`: those are, above all, the many ways to say that a request is malformed.
_KNOWN_TEXTS: tuple[tuple[type[CharoniaClientError], str], ...] = (
    (QueueFull, r"exceeds maximum queue size"),
    (Timeout, r"request timeout expired|deadline.*exceeded"),
    (Cancelled, r"request was cancelled"),
    (InvalidRequest, r"protocol is restricted|unknown model: '[^']*' is not found"),
    (
        Unavailable,
        r"shutting down|is not healthy|not ready|not at ready state|no available versions"
        r"|engine is (down|being restarted)|(engine|scheduler) was restarted|recovers from"
        r"|scheduler gave no answer|unavailable",
    ),
    (ServerError, r"internal error|stops the engine|incomplete"),
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
    "UNAVAILABLE": ConnectionFailed,
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
    """The error that `text` stands for; of class `default` where the text is not known."""
    for kind, pattern in _KNOWN_TEXTS:
        if re.search(pattern, text, re.IGNORECASE):
            return kind(text)
    return default(text)


def from_grpc_status(code: str, text: str) -> CharoniaClientError:
    """The error of an RPC that ended with a status.

    Triton itself puts a model's errors into the stream, so a status comes from Triton's front
    end or from the connection: UNAVAILABLE without a known text is the connection.

    Args:
        code: name of the status, such as "UNAVAILABLE".
    """
    return from_text(text, _GRPC_CODES.get(code, ServerError))


def from_http_status(status: int, text: str) -> CharoniaClientError:
    """The error of an HTTP response whose status is not 200."""
    default = InvalidRequest if 400 <= status < 500 else ServerError
    return from_text(text, _HTTP_CODES.get(status, default))
