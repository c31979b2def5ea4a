"""Errors in the form that OpenAI's clients know.

Owns that form, and the status and code of each kind of a server's errors. Must not
know connections.
"""

import math
import re
from http import HTTPStatus
from typing import Any

from charonia.errors import CharoniaError, PromptTooLongError, shown
from charonia.protocol import SamplingParams
from charonia_client import (
    Cancelled,
    CharoniaClientError,
    ConnectionFailed,
    InvalidRequest,
    RateLimited,
    Timeout,
    Unavailable,
)

CLIENT_LEFT = 499
"""nginx's status for a client that left; it appears only in the log."""
INVALID = "invalid_request_error"
NOT_FOUND = "not_found_error"
SERVER = "server_error"
RATE_LIMIT = "rate_limit_error"
TIMEOUT = "timeout_error"
RETRY_AFTER_S = 1.0
"""Used if the server does not say when to try again."""
_PART = r"(?:each )?(?:(?:token id|range|start|end|priority|ttl_s) )?of "
_PROMPT_IDS = "input_ids "
"""Begins what the scheduler says of a prompt's token ids."""
_FIELD = re.compile(rf"(?:{_PART})?([a-z][a-z_]*)\b")


class ApiError(Exception):
    """An error as an answer.

    Args:
        kind: `type` in OpenAI's form. param: the field that is wrong. code: for programs.
        retry_after_s: when to try again, if that helps.
        allow: for 405, the methods that exist.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        allow: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.allow = allow

    @property
    def body(self) -> dict[str, Any]:
        """The error in OpenAI's form."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def headers(self) -> dict[str, str]:
        """Further headers."""
        headers = {}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
        if self.allow is not None:
            headers["allow"] = self.allow
        if self.status == HTTPStatus.UNAUTHORIZED:
            headers["www-authenticate"] = "Bearer"
        return headers


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The request is wrong."""
    return ApiError(HTTPStatus.BAD_REQUEST, message, param=param, code=code)


def too_long(message: str, param: str | None = None) -> ApiError:
    """The prompt does not fit into the model's context."""
    return invalid(message, param, "context_length_exceeded")


def unauthorized(message: str) -> ApiError:
    """The request has no API key that is known."""
    return ApiError(HTTPStatus.UNAUTHORIZED, message, code="invalid_api_key")


def wrong_tenant(named: str, tenant: str) -> ApiError:
    """The request names a tenant other than its key's."""
    return ApiError(
        HTTPStatus.FORBIDDEN,
        f"tenant must be {shown(tenant)}, that of the API key, or not be given, but is "
        f"{shown(named)}",
        param="tenant",
        code="wrong_tenant",
    )


def unavailable(message: str, retry_after_s: float = RETRY_AFTER_S) -> ApiError:
    """The request may succeed a little later."""
    return ApiError(
        HTTPStatus.SERVICE_UNAVAILABLE,
        message,
        kind=SERVER,
        code="unavailable",
        retry_after_s=retry_after_s,
    )


def no_such_model(name: str) -> ApiError:
    """The model is not served."""
    return ApiError(
        HTTPStatus.NOT_FOUND,
        f"The model {shown(name)} does not exist",
        param="model",
        code="model_not_found",
    )


def shutting_down() -> ApiError:
    """The gateway is shutting down."""
    error = unavailable("the gateway is shutting down")
    error.code = "shutting_down"
    return error


def internal() -> ApiError:
    """An internal error; the log has the details."""
    return ApiError(
        HTTPStatus.INTERNAL_SERVER_ERROR, "the gateway failed", kind=SERVER, code="internal"
    )


def of_any(error: ApiError | CharoniaClientError | CharoniaError) -> ApiError:
    """Convert whatever may end a request's work, other than a fault of the gateway."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, CharoniaClientError):
        return of_client_error(error)
    return of_own_error(error)


def of_client_error(error: CharoniaClientError) -> ApiError:
    """Convert an error of a server or of the connection to it."""
    message, code = error.message, error.kind
    match error:
        case InvalidRequest() if error.kind is None and "unknown model" in message:
            # The gateway chose the model's name, so it is not the client's fault.
            return ApiError(HTTPStatus.BAD_GATEWAY, message, kind=SERVER, code="no_scheduler")
        case InvalidRequest() if error.kind is None:
            # Triton refused what the gateway wrote, and charonia never saw it.
            return ApiError(HTTPStatus.BAD_GATEWAY, message, kind=SERVER, code="bad_gateway")
        case InvalidRequest() if error.kind == PromptTooLongError.kind:
            return too_long(message)
        case InvalidRequest() if message.startswith(_PROMPT_IDS):
            return invalid(f"the prompt {message.removeprefix(_PROMPT_IDS)}", "prompt", code)
        case InvalidRequest():
            return invalid(message, field_of(message), code)
        case RateLimited():
            wait = RETRY_AFTER_S if error.retry_after_s is None else error.retry_after_s
            return ApiError(
                HTTPStatus.TOO_MANY_REQUESTS,
                message,
                kind=RATE_LIMIT,
                code="rate_limit_exceeded",
                retry_after_s=wait,
            )
        case Unavailable() | ConnectionFailed():
            said = message if isinstance(error, Unavailable) else "the server cannot be reached"
            answer = unavailable(said, error.retry_after_s or RETRY_AFTER_S)
            answer.code = code or answer.code
            return answer
        case Timeout():
            return ApiError(
                HTTPStatus.GATEWAY_TIMEOUT,
                message,
                kind=TIMEOUT,
                code=code or "timeout",
                retry_after_s=error.retry_after_s,
            )
        case Cancelled():
            # Another client of the server did it: the gateway reads no answer that it cancels.
            return ApiError(
                HTTPStatus.INTERNAL_SERVER_ERROR, message, kind=SERVER, code="cancelled"
            )
        case _:
            return ApiError(
                HTTPStatus.INTERNAL_SERVER_ERROR, message, kind=SERVER, code=code or "internal"
            )


def of_own_error(error: CharoniaError) -> ApiError:
    """Convert an error of tokenizing a request or rendering its messages."""
    if isinstance(error, PromptTooLongError):
        return too_long(str(error))
    if error.code in ("INVALID_ARG", "UNSUPPORTED"):
        return invalid(str(error), field_of(str(error)), error.kind)
    return internal()


def field_of(message: str) -> str | None:
    """The sampling parameter that a message of the scheduler begins with."""
    found = _FIELD.match(message)
    return found[1] if found and found[1] in SamplingParams.__struct_fields__ else None
