"""Codes and texts become typed errors."""

import pytest

from charonia import errors as server_errors
from charonia_client.errors import (
    KINDS,
    Cancelled,
    CharoniaClientError,
    ConnectionFailed,
    ConnectionLost,
    InvalidRequest,
    Late,
    QueueFull,
    RateLimited,
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
        ("Stub process 'scheduler_0_0' is not healthy.", Unavailable),
        ("Server not ready", Unavailable),
        ("Request for unknown model: 'nope' is not found", InvalidRequest),
    ],
)
def test_a_text_of_tritons_own_has_its_type_also_behind_the_prefix_of_an_ensemble(
    text: str, kind: type[CharoniaClientError]
) -> None:
    for whole in (text, f"in ensemble 'llm', {text}"):
        error = from_text(whole)
        assert type(error) is kind
        assert str(error) == error.message == whole


@pytest.mark.parametrize("kind", server_errors.KINDS)
def test_every_kind_of_the_server_has_its_type_and_is_cut_off_from_the_message(kind: str) -> None:
    told = server_errors.KINDS[kind]("no: 'a\nb [charonia:timeout]'")
    error = from_text(f"in ensemble 'llm', {told.answer}")
    assert type(error) is KINDS[kind]
    assert str(error) == error.message == f"in ensemble 'llm', {told}"
    assert error.kind == kind
    assert error.is_retryable == told.is_retryable


def test_who_is_late_comes_again_where_the_server_names_a_time() -> None:
    for seconds in (None, 1.5):
        told = server_errors.LateRequestError("it would wait", retry_after_s=seconds)
        error = from_text(told.answer)
        assert isinstance(error, Late)
        assert isinstance(error, Timeout)
        assert error.retry_after_s == seconds
        again = server_errors.error_of(*server_errors.split_answer(told.answer))
        assert error.is_retryable == told.is_retryable == again.is_retryable == bool(seconds)


def test_every_kind_of_the_client_is_one_of_the_server() -> None:
    assert KINDS.keys() == server_errors.KINDS.keys()


@pytest.mark.parametrize(
    "value", ["shutting down", "Exceeds maximum queue size", "x [charonia:queue_full]"]
)
def test_a_value_within_the_text_makes_no_other_kind_of_it(value: str) -> None:
    told = server_errors.InvalidRequestError(f"stop must be a string, but is {value}")
    error = from_text(told.answer)
    assert type(error) is InvalidRequest
    assert not error.is_retryable


def test_a_kind_that_is_not_known_yet_leaves_the_code_to_decide() -> None:
    error = from_http_status(503, "the moon is full [charonia:moonstruck]")
    assert type(error) is Unavailable
    assert (error.message, error.kind) == ("the moon is full", "moonstruck")


def test_an_unknown_text_is_the_requests_fault_only_where_that_is_the_default() -> None:
    assert type(from_text("boom")) is InvalidRequest
    assert type(from_text("boom", default=ServerError)) is ServerError


@pytest.mark.parametrize(
    ("code", "text", "kind"),
    [
        ("UNAVAILABLE", "failed to connect to all addresses", ConnectionFailed),
        ("UNAVAILABLE", "errors resolving x:1: [Domain name not found]", ConnectionFailed),
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
        (400, "too much [charonia:queue_full]", QueueFull),
        (400, "too much of a tenant's [charonia:tenant_queue_full]", RateLimited),
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
