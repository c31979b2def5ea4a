"""Requests on their way in: refused by their size, cancelled and timed wherever they are."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from charonia.config import EngineArgs, SchedulerArgs
from charonia.core.generation_request import GenerationRequest
from charonia.core.request_log import RequestLog
from charonia.core.service import EngineService
from charonia.errors import (
    EngineDiedError,
    EngineDownError,
    PromptTooLongError,
    QueueFullError,
    RequestCancelledError,
    RequestTimeoutError,
    ShuttingDownError,
)
from charonia.events import Log, level_of, parse_event
from charonia.protocol import EngineInfo
from charonia.serving.requests import intake
from charonia.serving.requests.cancellations import MAX_NAMES, Cancellations
from charonia.serving.requests.intake import Intake
from charonia.serving.requests.queue_limit import QueueLimit
from charonia.serving.requests.raw_request import RawRequest
from charonia.serving.requests.sessions import Sessions
from charonia.serving.requests.tensors import INTERNAL_ERROR
from charonia.serving.requests.tokenizing import INLINE_CHARACTERS, Tokenizing
from charonia.text.tokenizer import Tokenizer
from support.calls import SEALER
from support.checkpoints import make_tokenizer
from support.echo import EchoExecutor
from support.waiting import WAIT_S, eventually

LONG = "x" * (INLINE_CHARACTERS + 1)
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
CONTEXT = f"00-{TRACE_ID}-00f067aa0ba902b7-01"


class Gated(Tokenizer):
    """Tokenizes long texts, to a few ids, when it may; and bad words, noting in which threads."""

    def __init__(self) -> None:
        super().__init__(make_tokenizer())
        self.may_go_on = threading.Event()
        self.num_long = 0
        self.bad_word_threads: list[str] = []

    def encode_bad_words(self, words: Sequence[str]) -> list[list[int]]:
        if words:
            self.bad_word_threads.append(threading.current_thread().name)
        return super().encode_bad_words(words)

    def encode(self, text: str, *args: Any, **options: Any) -> list[int]:
        if len(text) > INLINE_CHARACTERS:
            self.num_long += 1
            assert self.may_go_on.wait(WAIT_S)
            text = text[:20]
        return super().encode(text, *args, **options)


class Bench:
    """An intake before an echoing engine."""

    def __init__(
        self,
        new_responder: Callable[[], Any],
        engine: EchoExecutor | None = None,
        wait_s: float = WAIT_S,
        tenants_file: Path | None = None,
    ) -> None:
        self.log: list[str] = []
        self.requests: list[str] = []
        request_log = RequestLog(Log(self.requests.append, lambda: "debug"))
        self.tokenizer = Gated()
        self.new_responder = new_responder
        self.service = EngineService(
            engine or EchoExecutor(max_model_len=2**13, num_blocks=2**10, vocab_size=384),
            EngineArgs(model="echo"),
            SchedulerArgs(tenants_file=None if tenants_file is None else str(tenants_file)),
            self.tokenizer,
            log=lambda line: None,
            request_log=request_log,
        )
        self.queue_limit = QueueLimit(8, 10**6)
        self.tokenizing = Tokenizing(1, QueueLimit(2, 10**6), log=self.log.append)
        self.sessions = Sessions(
            self.tokenizer,
            2,
            self.queue_limit,
            log=self.log.append,
        )
        self.intake = Intake(
            self.service,
            self.sessions,
            self.tokenizer,
            self.tokenizing,
            SEALER,
            is_forwarded=lambda name: name.startswith("X-"),
            request_log=request_log,
            log=self.log.append,
        )
        self.service.start(wait_s=wait_s)

    def take(
        self,
        text: str = LONG,
        *,
        request_id: str = "",
        flags: Mapping[str, Any] = {},
        traceparent: str | None = None,
        **parameters: Any,
    ) -> Any:
        """Take a request in; its responder."""
        responder = self.new_responder()
        tensors = {"text_input": np.array([text.encode()], dtype=object), **flags}
        raw = RawRequest(
            tensors,
            parameters,
            request_id=request_id,
            num_bytes=len(text),
            traceparent=traceparent,
        )
        self.intake.take(lambda: raw, responder)
        return responder

    def take_ids(self, num_ids: int, **parameters: Any) -> Any:
        responder = self.new_responder()
        raw = RawRequest({"input_ids": np.full(num_ids, 5, dtype=np.int32)}, parameters)
        self.intake.take(lambda: raw, responder)
        return responder

    def count(self, name: str, label: str = "") -> float:
        return self.service.metrics.counters[name, label]

    def close(self) -> None:
        self.tokenizer.may_go_on.set()
        self.tokenizing.close()
        self.service.close()
        self.sessions.close()


@pytest.fixture
def bench(new_responder: Callable[[], Any]) -> Iterator[Bench]:
    made = Bench(new_responder)
    yield made
    made.close()
    assert made.queue_limit.held == (0, 0)


def error_of(responder: Any) -> Exception:
    eventually(lambda: responder.failures)
    (error,) = responder.failures
    assert not responder.sent
    return error  # type: ignore[no-any-return]


def text_of(responder: Any) -> str:
    eventually(lambda: responder.sent or responder.failures)
    assert not responder.failures
    ((outputs, is_final),) = responder.sent
    assert is_final
    return outputs["text_output"][0]  # type: ignore[no-any-return]


def test_a_short_prompt_passes_while_long_ones_wait(bench: Bench) -> None:
    responders = [bench.take(LONG + str(index)) for index in range(2)]
    assert text_of(bench.take("short")).startswith("short")
    assert not any(responder.sent for responder in responders)
    bench.tokenizer.may_go_on.set()
    for index, responder in enumerate(responders):
        assert text_of(responder).startswith(LONG + str(index))


def test_too_many_long_prompts_are_refused_at_once(bench: Bench) -> None:
    waiting = [bench.take() for _ in range(2)]
    error = error_of(bench.take())
    assert isinstance(error, QueueFullError)
    assert "Exceeds maximum queue size" in str(error)
    assert bench.count("charonia_rejections_total", "queue_full") == 1
    bench.tokenizer.may_go_on.set()
    assert all(text_of(responder).startswith(LONG) for responder in waiting)


def test_a_tenant_that_has_all_it_may_have_is_refused_before_its_prompts_are_tokenized(
    new_responder: Callable[[], Any], tmp_path: Path
) -> None:
    args = {"a": {"max_queue_size": 1, "ttft_target_ms": 1e6}, "b": {"ttft_target_ms": 1e6}}
    limits = {"unknown": "refuse", "tenants": args}
    (tmp_path / "tenants.json").write_text(json.dumps(limits))
    bench = Bench(new_responder, tenants_file=tmp_path / "tenants.json")
    waiting = [bench.take(tenant="a")]
    eventually(lambda: bench.tokenizer.num_long == 1)
    assert "1 requests of tenant 'a'" in str(error_of(bench.take(tenant="a")))
    assert "'c' is not known" in str(error_of(bench.take(tenant="c")))
    waiting.append(bench.take(tenant="b"))  # there is still room for it
    assert "2 requests" in str(error_of(bench.take(tenant="b", deadline_ms=60_000)))
    for tenant, num in (("a", 1), ("b", 1), ("other", 0)):  # an unknown tenant is invalid
        assert bench.count("charonia_tenant_rejections_total", tenant) == num
    for metric in ("ttft_target", "deadline"):  # what the server has no room for, not the tenant
        eventually(lambda name=f"charonia_{metric}_missed_total": bench.count(name, "b") == 1)
        assert bench.count(f"charonia_{metric}_missed_total", "a") == 0
    bench.tokenizer.may_go_on.set()
    assert all(text_of(responder).startswith(LONG) for responder in waiting)
    assert bench.tokenizer.num_long == 2
    assert text_of(bench.take(tenant="a")).startswith(LONG)
    bench.close()


def test_a_prompt_that_is_tokenized_can_be_cancelled_by_its_id_and_by_leaving(
    bench: Bench,
) -> None:
    by_id, gone = bench.take(request_id="7"), bench.take()
    raw = RawRequest({"cancel": np.array([True])}, {}, request_id="7")
    bench.intake.take(lambda: raw, bench.new_responder())
    gone.has_gone = True
    assert isinstance(error_of(by_id), RequestCancelledError)
    assert isinstance(error_of(gone), RequestCancelledError)
    eventually(lambda: bench.count("charonia_cancellations_total") == 2)
    bench.tokenizer.may_go_on.set()
    assert text_of(bench.take("short")).startswith("short")


def test_a_request_that_was_cancelled_on_its_way_here_ends_when_it_comes(bench: Bench) -> None:
    def come(arrived_at: float, request_id: str) -> Any:
        ids = np.array([5, 6], dtype=np.int32)
        key = np.array([SEALER.new_key(ids, "", arrived_at).encode()], dtype=object)
        raw = RawRequest({"input_ids": ids, "request_key": key}, {}, request_id=request_id)
        responder = bench.new_responder()
        bench.intake.take(lambda: raw, responder)
        return responder

    before = time.monotonic()
    raw = RawRequest({"cancel": np.array([True])}, {}, request_id="7")
    bench.intake.take(lambda: raw, bench.new_responder())
    assert isinstance(error_of(come(before, "7")), RequestCancelledError)
    eventually(lambda: bench.count("charonia_cancellations_total") == 1)
    assert text_of(come(before, "8"))
    assert text_of(come(time.monotonic(), "7"))


def reasons_of(responder: Any) -> list[str]:
    eventually(lambda: responder.sent or responder.failures)
    assert not responder.failures
    ((outputs, is_final),) = responder.sent
    assert is_final
    return outputs["finish_reason"]  # type: ignore[no-any-return]


def cancel_of(request_id: str, samples: Sequence[int], tenant: str = "") -> RawRequest:
    tensors = {"cancel": np.array([True]), "cancel_samples": np.array(samples, dtype=np.int32)}
    return RawRequest(tensors, {"tenant": tenant}, request_id=request_id)


def test_a_sample_is_cancelled_while_its_prompt_is_tokenized(bench: Bench) -> None:
    flags = {"return_finish_reason": np.array([True])}
    responder = bench.take(request_id="7", flags=flags, n=3)
    for raw in (cancel_of("7", [1], "other"), cancel_of("8", [2]), cancel_of("7", [0, 3])):
        bench.intake.take(lambda raw=raw: raw, answer := bench.new_responder())
        assert answer.sent == [({"text_output": [""]}, True)]  # whether there was one or not
    bench.tokenizer.may_go_on.set()
    assert reasons_of(responder) == ["cancelled", "length", "length"]


def test_a_sample_that_was_cancelled_on_its_way_here_ends_when_it_comes(bench: Bench) -> None:
    before = time.monotonic()
    bench.intake.take(lambda: cancel_of("7", [1, 2]), bench.new_responder())
    ids = np.array([5, 6], dtype=np.int32)

    def come(arrived_at: float, num_samples: int) -> Any:
        tensors = {
            "input_ids": ids,
            "request_key": np.array([SEALER.new_key(ids, "", arrived_at).encode()], dtype=object),
            "return_finish_reason": np.array([True]),
        }
        raw = RawRequest(tensors, {"n": num_samples}, request_id="7")
        bench.intake.take(lambda: raw, responder := bench.new_responder())
        return responder

    assert reasons_of(come(before, 3)) == ["length", "cancelled", "cancelled"]
    assert reasons_of(come(before, 1)) == ["length"]
    assert reasons_of(come(time.monotonic(), 3)) == ["length"] * 3


def test_the_oldest_cancellation_is_forgotten() -> None:
    cancellations = Cancellations()
    before = time.monotonic()
    for index in range(MAX_NAMES + 1):
        cancellations.note(str(index), "")
    assert not cancellations.cover("0", "", before)
    assert cancellations.cover("1", "", before)
    assert not cancellations.cover("1", "other", before)
    cancellations.note("samples", "", range(3))
    assert cancellations.samples("samples", "", before, 2) == {0, 1}
    assert not cancellations.cover("samples", "", before)
    assert not cancellations.cover("3", "", before)
    assert cancellations.cover("4", "", before)


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"timeout": 50_000, "deadline_ms": 60_000}, "Request timeout expired"),
        ({"timeout": 60_000_000, "deadline_ms": 50}, "deadline_ms has passed"),
    ],
)
def test_the_time_of_a_prompt_that_is_tokenized_runs(
    bench: Bench, parameters: dict[str, int], text: str
) -> None:
    error = error_of(bench.take(request_id="7", **parameters))
    assert isinstance(error, RequestTimeoutError)
    assert str(error) == text
    ((name, fields),) = filter(None, map(parse_event, bench.requests))
    assert (name, fields["request_id"], fields["reason"]) == ("request_ended", "7", text)
    assert "level" not in fields
    assert bench.count("charonia_rejections_total", "timeout") == 1


@pytest.mark.parametrize("is_text", [True, False])
def test_bad_words_become_ids_once_and_where_that_holds_nobody_up(
    bench: Bench, is_text: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[GenerationRequest] = []
    submit = bench.service.submit

    def record(request: GenerationRequest, *options: Any) -> None:
        requests.append(request)
        submit(request, *options)

    monkeypatch.setattr(bench.service, "submit", record)
    few, many = ["x"], ["y" * 30] * 200
    for words in (few, many):
        take = partial(bench.take, "ab") if is_text else partial(bench.take_ids, 2)
        text_of(take(bad_words=words))
        assert requests[-1].bad_words_ids == bench.tokenizer.encode_bad_words(words)
    here, threads = threading.current_thread().name, bench.tokenizer.bad_word_threads
    assert threads == [here, here, "charonia-tokenizing-0", here]


def test_time_counts_from_a_requests_arrival(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted: list[float | None] = []
    submit = bench.service.submit

    def record(request: Any, sink: Any, arrived_at: float | None = None) -> None:
        submitted.append(arrived_at)
        submit(request, sink, arrived_at)

    monkeypatch.setattr(bench.service, "submit", record)
    responder = bench.take()
    after = time.monotonic()
    time.sleep(0.05)
    bench.tokenizer.may_go_on.set()
    text_of(responder)
    assert submitted[0] is not None
    assert submitted[0] <= after


def test_what_is_too_long_is_refused_by_its_size(new_responder: Callable[[], Any]) -> None:
    bench = Bench(new_responder, EchoExecutor(max_model_len=64, num_blocks=2**10, vocab_size=384))
    per_token = bench.tokenizer.max_bytes_per_token
    assert per_token is not None
    error = error_of(bench.take("x" * (63 * per_token + 1)))
    assert isinstance(error, PromptTooLongError)
    assert f"at most {63 * per_token} bytes" in str(error)
    assert bench.tokenizer.num_long == 0
    assert isinstance(error_of(bench.take_ids(64)), PromptTooLongError)
    assert isinstance(error_of(bench.take("x" * (63 * per_token))), PromptTooLongError)
    assert bench.count("charonia_rejections_total", "invalid") == 3
    bench.close()


def test_ids_that_nobody_has_are_not_looked_up_for_the_echo(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up: list[Any] = []
    monkeypatch.setattr(bench.tokenizer, "decode", lambda ids, **_: looked_up.append(ids) or "")
    responder = bench.new_responder()
    raw = RawRequest({"input_ids": np.array([2**31 - 1], dtype=np.int32)}, {})
    bench.intake.take(lambda: raw, responder)
    assert "2147483647 at place 0" in str(error_of(responder))
    assert not looked_up


def test_without_an_engine_nothing_is_tokenized(new_responder: Callable[[], Any]) -> None:
    class Lost(EchoExecutor):
        def info(self) -> EngineInfo:
            raise EngineDiedError("no weights")

    bench = Bench(new_responder, Lost(), wait_s=0.2)
    assert isinstance(error_of(bench.take()), EngineDownError)
    assert bench.tokenizer.num_long == 0
    bench.close()


def fields_of(lines: Sequence[str]) -> list[tuple[str, dict[str, str]]]:
    parsed = [parse_event(line) for line in lines]
    assert all(level_of(line) == "debug" for line in lines)
    return [one for one in parsed if one is not None]


@pytest.mark.parametrize(("text", "num_prompt"), [("short", "4"), (LONG, "20")])
def test_the_life_of_a_request_is_in_the_log_under_its_names_and_without_its_prompt(
    bench: Bench, text: str, num_prompt: str
) -> None:
    bench.tokenizer.may_go_on.set()
    text_of(bench.take(text, request_id="7", tenant="t", max_tokens=3, ignore_eos=True))
    found = fields_of(bench.requests)
    assert [name for name, _ in found] == [
        "request_received",
        "request_started",
        "request_first_token",
        "request_ended",
    ]
    assert {(one["request_id"], one["tenant"]) for _, one in found} == {("7", "t")}
    assert len({one["key"] for _, one in found}) == 1
    received, ended = found[0][1], found[-1][1]
    assert (received["max_tokens"], ended["tokens"], ended["outcome"]) == ("3", "3", "length")
    assert received["prompt_tokens"] == ended["prompt_tokens"] == num_prompt
    assert float(ended["total_seconds"]) >= float(ended["queue_seconds"]) >= 0
    assert not any(text[:5] in line for line in bench.requests)


def test_each_line_of_a_request_has_the_id_of_its_trace(bench: Bench) -> None:
    tensors = {"text_input": np.array([b"short"], dtype=object)}
    responders = [bench.new_responder() for _ in range(2)]
    for responder, max_tokens in zip(responders, (1, 0), strict=True):
        raw = RawRequest(tensors, {"max_tokens": max_tokens}, traceparent=CONTEXT)
        bench.intake.take(lambda raw=raw: raw, responder)
    text_of(responders[0])
    error_of(responders[1])
    found = fields_of(bench.requests)
    assert {name for name, _ in found} >= {"request_received", "request_refused", "request_ended"}
    assert {one["trace_id"] for _, one in found} == {TRACE_ID}


@pytest.mark.parametrize("text", ["short", LONG])
def test_a_request_that_fails_is_in_the_log_under_its_names(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """Once it is read, or once it is tokenized in another thread."""

    def fail(*arguments: Any) -> None:
        raise OSError("no such thing")

    monkeypatch.setattr(bench.service, "submit", fail)
    bench.tokenizer.may_go_on.set()
    error = error_of(bench.take(text, request_id="7", tenant="t", traceparent=CONTEXT))
    assert str(error) == INTERNAL_ERROR
    (found,) = filter(None, map(parse_event, bench.log))
    name, fields = found
    names = {"request_id": "7", "tenant": "t", "trace_id": TRACE_ID}
    assert (name, fields["level"]) == ("request_failed", "error")
    assert fields.items() >= names.items()
    assert "no such thing" in fields["traceback"]


def test_so_is_one_that_cannot_be_understood(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise OSError("no such thing")

    monkeypatch.setattr(intake, "parse", fail)
    assert str(error_of(bench.take("short", request_id="7", tenant="t"))) == INTERNAL_ERROR
    ((name, fields),) = filter(None, map(parse_event, bench.log))
    assert (name, fields["request_id"], fields["tenant"]) == ("request_failed", "7", "t")


def test_where_a_header_says_whose_a_request_is_lines_name_no_other(bench: Bench) -> None:
    bench.intake._tenant_header = "X-Tenant"
    error = error_of(bench.take("short", tenant="other", **{"X-Tenant": "mine"}))
    assert "tenant = 'other' is not what the header X-Tenant says" in str(error)
    error_of(bench.take("short", tenant="other"))
    refused = [fields for name, fields in filter(None, map(parse_event, bench.requests))]
    assert [fields.get("tenant") for fields in refused] == ["mine", None]


def test_a_prompt_that_cannot_be_tokenized_is_in_the_log_under_the_names_of_its_request(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise OSError("no such thing")

    monkeypatch.setattr(bench.tokenizer, "encode", fail)
    assert str(error_of(bench.take(request_id="7", tenant="t"))) == INTERNAL_ERROR
    ((name, fields),) = filter(None, map(parse_event, bench.log))
    assert (name, fields["request_id"], fields["tenant"]) == ("prompt_not_tokenized", "7", "t")


def test_a_refused_request_is_in_the_log_with_the_reason(bench: Bench) -> None:
    errors = [
        error_of(bench.take("short", request_id="8", max_tokens=0)),
        error_of(bench.take_ids(2**13)),
    ]
    found = fields_of(bench.requests)
    assert [name for name, _ in found] == ["request_refused"] * 2
    assert [one["reason"] for _, one in found] == list(map(str, errors))
    assert [one.get("request_id") for _, one in found] == ["8", None]
    assert [one["kind"] for _, one in found] == ["invalid_request", "prompt_too_long"]


def test_the_end_of_the_server_answers_what_is_tokenized(new_responder: Callable[[], Any]) -> None:
    bench = Bench(new_responder)
    responders = [bench.take() for _ in range(2)]
    eventually(lambda: bench.tokenizer.num_long)
    bench.tokenizing.close()
    assert all(isinstance(error_of(responder), ShuttingDownError) for responder in responders)
    assert isinstance(error_of(bench.take()), ShuttingDownError)
    bench.close()
