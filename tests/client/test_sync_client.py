"""`Client` against a real tritonserver, over both protocols."""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from charonia.launch.server.tritonserver import TritonServer
from charonia_client import (
    Cancelled,
    Client,
    ConnectionFailed,
    InvalidRequest,
    QueueFull,
    RetryPolicy,
    ServerError,
    Timeout,
    Timeouts,
    Unavailable,
)
from charonia_client.values import Protocol
from client.conftest import LATE_S, REPOSITORY, endless, metrics_of, script, settings
from support.e2e import wait_for

QUICK = RetryPolicy(max_attempts=3, initial_backoff_s=0.01)

FULL = "[charonia:queue_full]"


def test_a_stream_gives_each_chunk_and_ends_after_the_final_one(client: Client) -> None:
    prompt = script(chunks=["one ", "two"], token_ids=[[1, 2], [3]], finish="length")
    with client.stream(prompt) as stream:
        chunks = list(stream)
    assert [chunk.text for chunk in chunks] == ["one ", "two"]
    assert [chunk.token_ids for chunk in chunks] == [(1, 2), (3,)]
    assert [chunk.is_final for chunk in chunks] == [False, True]
    assert chunks[-1].finish_reason == "length"


def test_a_stream_of_several_samples_gives_chunks_of_each(client: Client) -> None:
    prompt = script(
        chunks=[["a", ""], ["", "b"], ["c", ""]],
        token_ids=[[]] * 3,
        reasons=[["None", "None"], ["None", "length"], ["stop", "length"]],
    )
    with client.stream(prompt, n=2) as stream:
        chunks = list(stream)
    assert [(chunk.index, chunk.text) for chunk in chunks] == [(0, "a"), (1, "b"), (0, "c")]
    assert [chunk.finish_reason for chunk in chunks] == [None, "length", "stop"]
    assert [chunk.is_final for chunk in chunks] == [False, False, True]
    assert [one.text for one in client.generate(prompt, n=2).samples] == ["ac", "b"]


def test_an_error_after_some_samples_have_ended_is_an_error(client: Client) -> None:
    prompt = script(
        chunks=[["a", "b"]], token_ids=[[]], reasons=[["None", "stop"]], error=f"no {FULL}"
    )
    stream = client.stream(prompt, n=2)
    assert [next(stream).index, next(stream).index] == [0, 1]
    with pytest.raises(QueueFull):
        next(stream)


def test_closing_between_the_last_chunks_of_samples_leaves_the_answer_complete(
    client: Client, outcome: Callable[[str], str]
) -> None:
    prompt = script(chunks=[["a", "b"]], token_ids=[[]], reasons=[["stop", "stop"]])
    with client.stream(prompt, n=2) as stream:
        assert not next(stream).is_final
    assert outcome(stream.request_id) == "done"


@pytest.mark.parametrize(
    "text", ["a\u2028b\u2029c\x85d", "\r\n\n\rdata: x\n\n", "\x00\x1c\v\f", "語🐚"]
)
def test_text_arrives_as_it_was_sent_whatever_it_holds(client: Client, text: str) -> None:
    assert client.generate(script(chunks=[text, text])).text == text * 2


def test_all_outputs_of_the_last_response_are_read(client: Client) -> None:
    raw = {
        "cumulative_logprob": [-1.5],
        "logprobs": ['[{"7": {"logprob": -1.5, "rank": 2, "decoded_token": "a"}}]'],
        "num_input_tokens": [4],
        "num_output_tokens": [1],
        "timing": ['{"queue_seconds": 0.25, "restarts": 1}'],
    }
    completion = client.generate(script(chunks=["a"], raw=raw))
    assert completion.cumulative_logprob == -1.5
    assert completion.logprobs is not None
    assert completion.logprobs[0][0].rank == 2
    assert (completion.num_input_tokens, completion.num_output_tokens) == (4, 1)
    assert completion.timing == {"queue_seconds": 0.25, "restarts": 1}


def test_outputs_that_are_present_and_empty_are_as_if_absent(client: Client) -> None:
    raw: dict[str, list[str]] = {"cumulative_logprob": [], "logprobs": [], "num_output_tokens": []}
    completion = client.generate(script(chunks=["a"], raw=raw))
    assert completion.cumulative_logprob is completion.logprobs is None


def test_the_server_gets_what_was_asked_for(client: Client) -> None:
    params = {"max_tokens": 5, "stop": ["x"]}
    answer = client.generate([5, 6], params, request_id="mine", max_tokens=7)  # type: ignore[arg-type]
    seen = json.loads(answer.text)
    assert answer.request_id == seen["id"] == "mine"
    assert seen["inputs"]["input_ids"] == [5, 6]
    assert json.loads(seen["inputs"]["sampling_parameters"]) == {"max_tokens": 7, "stop": ["x"]}


def test_one_response_in_all_is_asked_for_only_where_nothing_is_lost(
    client: Client, protocol: Protocol
) -> None:
    def is_streaming(timeouts: Timeouts | None, best_of: int | None = None) -> bool:
        answer = client.generate(script(echo=True), timeouts=timeouts, best_of=best_of)
        return bool(json.loads(answer.text)["inputs"]["stream"])

    assert is_streaming(None) == (protocol == "http")
    assert is_streaming(Timeouts(first_token_s=60)) is True
    assert is_streaming(Timeouts(first_token_s=60), best_of=2) is False  # which has no stream


def test_many_threads_stream_from_one_client(client: Client) -> None:
    def run(index: int) -> str:
        texts = [f"{index} ", "a", "b"]
        return "".join(chunk.text for chunk in client.stream(script(chunks=texts, delay_s=0.01)))

    with ThreadPoolExecutor(32) as threads:
        assert list(threads.map(run, range(64))) == [f"{index} ab" for index in range(64)]


def test_one_thread_holds_several_streams_open(client: Client) -> None:
    streams = [client.stream(script(chunks=[str(i), str(i)], delay_s=0.01)) for i in range(4)]
    rounds = [[next(stream).text for stream in streams] for _ in range(2)]
    assert rounds == [["0", "1", "2", "3"]] * 2


def test_leaving_with_cancels_the_request(client: Client, outcome: Callable[[str], str]) -> None:
    with client.stream(endless()) as stream:
        for number, _ in enumerate(stream):
            if number == 2:
                break
    assert outcome(stream.request_id) == "cancelled"
    with pytest.raises(Cancelled, match="the stream was closed"):
        next(stream)


def test_dropping_a_stream_cancels_the_request(
    client: Client, outcome: Callable[[str], str]
) -> None:
    stream = client.stream(endless())
    request_id = stream.request_id
    next(stream)
    del stream
    assert outcome(request_id) == "cancelled"


@pytest.mark.parametrize("closed", ["stream", "client"])
def test_closing_from_another_thread_wakes_the_one_that_waits(
    client: Client, outcome: Callable[[str], str], closed: str
) -> None:
    stream = client.stream(script(chunks=["a", "b"], delays_s=[0, LATE_S]))
    next(stream)

    def close_once_it_waits() -> None:
        while not stream._control._is_receiving:
            time.sleep(0.01)
        (stream if closed == "stream" else client).close()

    closing = threading.Thread(target=close_once_it_waits)
    closing.start()
    started = time.monotonic()
    with pytest.raises(Cancelled, match="closed"):
        next(stream)
    assert time.monotonic() - started < LATE_S / 2
    assert outcome(stream.request_id) == "cancelled"
    closing.join()


def test_a_closed_client_says_so(client: Client) -> None:
    client.close()
    with pytest.raises(Cancelled, match="the client was closed"):
        client.generate(script(chunks=["a"]))


@pytest.mark.parametrize("seconds", [float("inf"), 1e300, 1e10])
def test_a_timeout_beyond_all_clocks_is_no_limit(client: Client, seconds: float) -> None:
    timeouts = Timeouts(total_s=seconds, first_token_s=seconds)
    assert client.generate(script(chunks=["a", "b"]), timeouts=timeouts).text == "ab"


def test_a_stream_that_was_never_read_sends_nothing(
    client: Client, outcome: Callable[[str], str]
) -> None:
    stream = client.stream(endless())
    stream.close()
    assert client.generate(script(report=stream.request_id)).text == "unknown"


def test_cancel_ends_a_request_by_its_id(client: Client) -> None:
    with client.stream(endless()) as stream:
        next(stream)
        client.cancel(stream.request_id)
        with pytest.raises(Cancelled, match="the request was cancelled") as caught:
            list(stream)
    assert caught.value.request_id == stream.request_id


def test_closing_after_the_last_chunk_leaves_the_answer_complete(
    client: Client, outcome: Callable[[str], str]
) -> None:
    with client.stream(script(chunks=["a", "b"])) as stream:
        for chunk in stream:
            if chunk.is_final:
                break
    assert outcome(stream.request_id) == "done"


def test_an_error_before_the_first_chunk_has_its_type_and_text(client: Client) -> None:
    text = "in ensemble 'llm', top_p must be above 0 and at most 1, but is 7"
    with pytest.raises(InvalidRequest) as caught:
        client.generate(script(error=text, code="INVALID_ARG"))
    assert str(caught.value) == text
    assert caught.value.request_id


def test_an_error_in_mid_stream_comes_after_the_chunks_before_it(client: Client) -> None:
    stream = client.stream(script(chunks=["a", "b"], error="boom"))
    assert [next(stream).text, next(stream).text] == ["a", "b"]
    for _ in range(2):  # whoever reads on must not take the answer for a complete one
        with pytest.raises(ServerError, match="boom") as caught:
            next(stream)
        assert caught.value.request_id == stream.request_id


def test_closing_from_another_thread_between_chunks_does_not_end_the_stream_silently(
    client: Client,
) -> None:
    with client.stream(script(chunks=["a", "b"])) as stream:
        texts = [next(stream).text]
        closing = threading.Thread(target=stream.close)
        closing.start()
        closing.join()
        with pytest.raises(Cancelled, match="the stream was closed") as caught:
            texts.extend(chunk.text for chunk in stream)
    assert texts == ["a"]
    assert caught.value.request_id == stream.request_id


@pytest.mark.parametrize("chunks", [[], ["a"]])
def test_a_stream_that_ends_before_its_last_chunk_is_an_error(
    client: Client, chunks: list[str]
) -> None:
    with pytest.raises(ServerError, match="ended before its last chunk"):
        client.generate(script(chunks=chunks, finish=None))


def test_an_unknown_model_is_an_invalid_request(scripted: TritonServer, protocol: Protocol) -> None:
    with (
        Client(**settings(scripted, protocol) | {"model": "nope"}) as client,
        pytest.raises(InvalidRequest, match="unknown model"),
    ):
        client.generate("hi")


@pytest.mark.parametrize(
    ("timeouts", "text"),
    [
        (Timeouts(total_s=0.3), "no complete answer within 0.3 s"),
        (Timeouts(first_token_s=0.3), "no first token within 0.3 s"),
        (Timeouts(total_s=LATE_S, first_token_s=0.3), "no first token within 0.3 s"),
    ],
)
def test_a_timeout_before_the_first_token_is_kept(
    client: Client, timeouts: Timeouts, text: str
) -> None:
    started = time.monotonic()
    with pytest.raises(Timeout, match=text):
        client.generate(script(chunks=["a"], delay_s=LATE_S), timeouts=timeouts)
    assert 0.28 < time.monotonic() - started < LATE_S / 2


def test_the_total_timeout_holds_in_mid_stream(
    client: Client, outcome: Callable[[str], str]
) -> None:
    for total_s in (0.4, 1.6, 6.4, 25.6):
        started = time.monotonic()
        stream = client.stream(endless(0.05), timeouts=Timeouts(total_s=total_s))
        chunks = []
        with pytest.raises(Timeout, match=f"no complete answer within {total_s} s"):
            chunks += stream
        assert 0.95 * total_s < time.monotonic() - started < total_s + LATE_S / 2
        if chunks:  # a slow machine may have begun too late
            assert outcome(stream.request_id) == "cancelled"
            return
    pytest.fail("nothing came within 25.6 s")


def test_the_first_token_timeout_ends_with_the_first_token(client: Client) -> None:
    for first_token_s in (0.5, 2.0, 8.0, 32.0):  # a slow machine may take longer to the first
        prompt = script(chunks=["a"] * 3, delays_s=[0, 0, 2 * first_token_s])
        with contextlib.suppress(Timeout):
            timeouts = Timeouts(first_token_s=first_token_s)
            assert client.generate(prompt, timeouts=timeouts).text == "aaa"
            return
    pytest.fail("it holds for the other tokens, too")


def test_a_full_queue_is_tried_again_until_it_takes_the_request(
    scripted: TritonServer, protocol: Protocol
) -> None:
    prompt = script(chunks=[], error=f"no {FULL}", code="UNAVAILABLE", failures=2)
    with Client(**settings(scripted, protocol), retry=QUICK) as client:
        # Two failures, then the answer, which has no chunks: the third attempt was made.
        with pytest.raises(ServerError, match="ended before"):
            client.generate(prompt)
        with pytest.raises(QueueFull):
            client.generate(prompt.replace("2", "3"))


def test_nothing_is_tried_again_once_a_chunk_was_received(
    scripted: TritonServer, protocol: Protocol
) -> None:
    prompt = script(chunks=["a"], error=f"no {FULL}", failures=1)
    with Client(**settings(scripted, protocol), retry=QUICK) as client:
        stream = client.stream(prompt)
        next(stream)
        with pytest.raises(QueueFull):
            next(stream)


def test_health_and_metrics_are_the_servers(client: Client) -> None:
    assert wait_for(lambda: client.health().is_serving, bool)
    assert client.health(["scripted", "nope"]).models == {"scripted": True, "nope": False}
    client.generate(script(chunks=["a"]))
    metrics = metrics_of(client)
    assert metrics.value("nv_inference_request_success", model="scripted") >= 1
    assert "nv_inference_request_success" in metrics.families
    with pytest.raises(KeyError, match="nonsense"):
        metrics.value("nonsense")


@pytest.fixture
def mortal(protocol: Protocol) -> Iterator[TritonServer]:
    """A server of its own, for a test to kill."""
    with TritonServer(REPOSITORY) as server:
        server.wait_ready()
        yield server


def test_a_server_that_dies_is_an_error_in_mid_stream_and_a_retry_away_when_it_is_back(
    mortal: TritonServer, protocol: Protocol
) -> None:
    patient = RetryPolicy(max_attempts=10_000, initial_backoff_s=0.1, max_backoff_s=0.1)
    with Client(**settings(mortal, protocol), retry=patient) as client:
        stream = client.stream(endless())
        next(stream)
        mortal.kill()
        with pytest.raises(ConnectionFailed):
            list(stream)
        assert client.health().is_live is False
        with pytest.raises(Unavailable):
            client.metrics()
        with pytest.raises((ConnectionFailed, Timeout)):  # whichever ends the last attempt
            client.generate(endless(), timeouts=Timeouts(total_s=0.3))
        mortal.start()
        assert client.generate(script(chunks=["back"])).text == "back"
        mortal.wait_ready()


def test_a_name_without_an_address_is_no_lost_connection() -> None:
    """Nothing was sent, so the request may be retried."""
    with Client("a..b:8001", retry=RetryPolicy(max_attempts=1)) as client:
        with pytest.raises(ConnectionFailed, match="resolving") as caught:
            client.generate("hi")
        assert caught.value.is_retryable


def test_an_unknown_protocol_is_refused() -> None:
    with pytest.raises(ValueError, match="grpc"):
        Client(protocol="smtp")  # type: ignore[arg-type]
