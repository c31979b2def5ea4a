"""Codes and texts become typed errors."""

import pytest

from charonia_client.errors import (
    Cancelled,
    CharoniaClientError,
    ConnectionFailed,
    ConnectionLost,
    InvalidRequest,
    QueueFull,
    ServerError,
    Timeout,
    Unavailable,
    from_grpc_status,
    from_http_status,
    from_text,
)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Exceeds maximum queue size. Maximum queue size of 8 is reached", QueueFull),
        ("Request timeout expired", Timeout),
        ("the request was cancelled", Cancelled),
        ("the engine is down and cannot be loaded: no memory", Unavailable),
        ("the engine is not ready yet", Unavailable),
        ("the engine is being restarted", Unavailable),
        ("the scheduler was restarted; the request is lost", Unavailable),
        ("the server is shutting down", Unavailable),
        ("Stub process 'scheduler_0_0' is not healthy.", Unavailable),
        ("internal error; the server's log has the details", ServerError),
        ("the request stops the engine each time it runs", ServerError),
        ("Request for unknown model: 'nope' is not found", InvalidRequest),
        ("top_p must be above 0 and at most 1, but is 7", InvalidRequest),
        ("n = 2 is not supported yet; use n = 1", InvalidRequest),
    ],
)
def test_a_known_text_has_its_type_also_behind_the_prefix_of_an_ensemble(
    text: str, kind: type[CharoniaClientError]
) -> None:
    for whole in (text, f"in ensemble 'llm', {text}"):
        error = from_text(whole)
        assert type(error) is kind
        assert str(error) == error.message == whole


def test_an_unknown_text_is_the_requests_fault_only_where_that_is_the_default() -> None:
    assert type(from_text("boom")) is InvalidRequest
    assert type(from_text("boom", default=ServerError)) is ServerError


@pytest.mark.parametrize(
    ("code", "text", "kind"),
    [
        ("UNAVAILABLE", "failed to connect to all addresses", ConnectionFailed),
        ("UNAVAILABLE", "Socket closed", ConnectionLost),
        ("UNAVAILABLE", "GRPC server is shutting down", Unavailable),
        ("UNAVAILABLE", "This protocol is restricted, expecting header 'x'", InvalidRequest),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", Timeout),
        ("CANCELLED", "Channel closed!", Cancelled),
        ("INVALID_ARGUMENT", "boom", InvalidRequest),
        ("INTERNAL", "boom", ServerError),
        ("UNKNOWN", "boom", ServerError),
    ],
)
def test_a_grpc_status_counts_where_its_text_is_not_known(
    code: str, text: str, kind: type[CharoniaClientError]
) -> None:
    assert type(from_grpc_status(code, text)) is kind


@pytest.mark.parametrize(
    ("status", "text", "kind"),
    [
        (400, "max_tokens must be at least 1, but is 0", InvalidRequest),
        (400, "Exceeds maximum queue size", QueueFull),
        (404, "Request for unknown model: 'x' is not found", InvalidRequest),
        (429, "slow down", Unavailable),
        (500, "boom", ServerError),
        (503, "try later", Unavailable),
        (504, "too slow", Timeout),
    ],
)
def test_an_http_status_counts_where_its_text_is_not_known(
    status: int, text: str, kind: type[CharoniaClientError]
) -> None:
    assert type(from_http_status(status, text)) is kind


def test_only_what_may_succeed_later_is_retryable() -> None:
    kinds = [
        Cancelled,
        ConnectionFailed,
        ConnectionLost,
        InvalidRequest,
        QueueFull,
        ServerError,
        Timeout,
    ]
    assert [kind for kind in kinds if kind.is_retryable] == [ConnectionFailed, QueueFull]
