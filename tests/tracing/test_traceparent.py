"""Which `traceparent` headers are valid."""

import pytest

from charonia.tracing.traceparent import TraceContext, parse_traceparent, trace_id_of

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(("flags", "is_sampled"), [("01", True), ("00", False), ("03", True)])
def test_a_valid_one_is_read(flags: str, is_sampled: bool) -> None:
    context = parse_traceparent(f"00-{TRACE}-{SPAN}-{flags}")
    assert context == TraceContext(int(TRACE, 16), int(SPAN, 16), is_sampled)
    assert trace_id_of(f" 00-{TRACE}-{SPAN}-{flags} ") == context.hex_trace_id == TRACE


def test_it_is_written_anew_without_what_a_client_has_added() -> None:
    for text in (f"00-{TRACE}-{SPAN}-01\xa0", f"cc-{TRACE}-{SPAN}-01-{'more' * 10_000}"):
        context = parse_traceparent(text)
        assert context is not None
        assert context.traceparent == f"00-{TRACE}-{SPAN}-01"


def test_a_later_version_may_have_more() -> None:
    assert parse_traceparent(f"01-{TRACE}-{SPAN}-01-more") == parse_traceparent(
        f"00-{TRACE}-{SPAN}-01"
    )


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "nonsense",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE[1:]}-{SPAN}-01",
        f"01-{TRACE}-{SPAN}-01-\xe9",
        f"01-{TRACE}-{SPAN}-01-a\tb",
    ],
)
def test_another_one_is_none(text: str | None) -> None:
    assert parse_traceparent(text) is None
    assert trace_id_of(text) is None
