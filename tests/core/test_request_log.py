"""Lines about the life of requests: when there are any, and what they show of a prompt."""

import pytest

from charonia.core.generation_request import GenerationRequest
from charonia.core.output.outputs import Chunk
from charonia.core.request_log import FollowedRequest, RequestLog
from charonia.errors import (
    CharoniaError,
    EngineDownError,
    QueueFullError,
    RequestCancelledError,
    RequestQuarantinedError,
    RequestTimeoutError,
)
from charonia.events import Level, Log, parse_event
from charonia.protocol import SamplingParams

REQUEST = GenerationRequest(
    key="k", request_id="7", prompt_ids=list(range(65, 91)), trace_id="4bf9" * 8
)


class Bench:
    """A log that can change its level."""

    def __init__(self, level: Level = "debug", max_prompt: int = 0) -> None:
        self.level = level
        self.lines: list[str] = []
        log = Log(self.lines.append, lambda: self.level)
        self.num_decoded = 0
        self.log = RequestLog(log, max_prompt=max_prompt, decode=self._decode)

    def _decode(self, token_ids: list[int]) -> str:
        self.num_decoded += len(token_ids)
        return "".join(map(chr, token_ids))

    def follow(self, request: GenerationRequest = REQUEST) -> FollowedRequest:
        followed = self.log.follow(request, 0.0)
        assert followed is not None
        return followed

    def names(self) -> list[str]:
        return [line.split()[0] for line in self.lines]


def test_nothing_is_made_where_nobody_wants_details() -> None:
    bench = Bench("info", max_prompt=5)
    followed = bench.follow()
    followed.note_started()
    followed.note(Chunk("k", "a", (1,), num_open=1))
    followed.note(Chunk("k", "b", (2,), finish_reason="stop"))
    for error in (RequestCancelledError("its client has gone"), RequestQuarantinedError("no")):
        bench.follow().note(Chunk("k", error=error))  # these have lines of their own
    bench.log.note_refused(QueueFullError("full"), REQUEST.log_fields)
    assert (bench.lines, bench.num_decoded) == ([], 0)


def test_probes_are_not_followed() -> None:
    bench = Bench()
    probe = GenerationRequest(key="p", prompt_ids=[1], is_probe=True)
    assert bench.log.follow(probe, 0.0) is None
    assert bench.lines == []


def test_each_line_has_the_names_of_the_request() -> None:
    bench = Bench()
    followed = bench.follow()
    followed.note_started()
    followed.note_started()  # another sample
    for chunk in (
        Chunk("k", "a", (1, 2), num_open=1),
        Chunk("k", "b", (3,), finish_reason="stop", num_open=1),
        Chunk("k", "c", (4,), finish_reason="length", index=1, num_prompt_tokens=26),
    ):
        followed.note(chunk)
    assert bench.names() == [
        "request_received",
        "request_started",
        "request_first_token",
        "request_ended",
    ]
    for line in bench.lines:
        assert f" key=k request_id=7 trace_id={'4bf9' * 8} " in line
    assert "outcome=length prompt_tokens=26 tokens=4" in bench.lines[-1]


@pytest.mark.parametrize("level", ["info", "debug"])
@pytest.mark.parametrize(
    ("error", "of_line"),
    [
        (QueueFullError("a b" * 500), None),
        (RequestTimeoutError("a b" * 500), None),
        (EngineDownError("a b" * 500), "warning"),
        (CharoniaError("a b" * 500), "error"),
    ],
)
def test_a_request_that_fails_says_why_at_any_level(
    level: Level, error: CharoniaError, of_line: Level | None
) -> None:
    bench = Bench(level)
    followed = bench.follow()
    followed.note(Chunk("k", "a", (1,), num_open=1))
    followed.note(Chunk("k", error=error))
    found = parse_event(bench.lines[-1])
    assert found is not None
    name, fields = found
    assert (name, fields.get("level"), fields["outcome"]) == ("request_ended", of_line, error.kind)
    assert (len(fields["reason"]), fields["tokens"]) == (500, "1")
    assert (fields["request_id"], fields["trace_id"]) == ("7", REQUEST.trace_id)


def test_a_level_that_changes_meanwhile_ends_the_lines() -> None:
    bench = Bench()
    followed = bench.follow()
    bench.level = "info"
    followed.note(Chunk("k", "a", (1,), finish_reason="stop"))
    assert bench.names() == ["request_received"]


def test_a_prompt_is_shown_only_where_it_is_asked_for_and_then_cut() -> None:
    silent, shown = Bench(), Bench(max_prompt=5)
    for bench in (silent, shown):
        bench.follow()
    assert "prompt=" not in silent.lines[0]
    assert silent.num_decoded == 0
    assert shown.lines[0].endswith(" prompt=ABCDE")
    assert shown.num_decoded == 5


def test_what_a_request_asks_for_is_shown_where_it_is_unusual() -> None:
    bench = Bench()
    params = SamplingParams(max_tokens=9, n=2, priority=3, deadline_ms=50, tenant="t")
    request = GenerationRequest(key="k", prompt_ids=[1, 2], params=params)
    bench.follow(request)
    assert bench.lines == [
        "request_received level=debug key=k tenant=t prompt_tokens=2 max_tokens=9 samples=2"
        " priority=3 deadline_ms=50"
    ]
