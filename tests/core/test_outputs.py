"""What a client gets of one request: chunks made of updates, whatever the engine did meanwhile."""

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from charonia.control import Request, Update
from charonia.core.output.outputs import Chunk, OutputStream
from charonia.errors import RequestCancelledError, ShuttingDownError
from charonia.protocol import RowSampling, SamplingParams, TokenLogprobs
from charonia.text.tokenizer import Tokenizer
from core.bench import byte_tokenizer

PROMPT = [10, 11, 12, 13, 14]


def make_request() -> Request:
    return Request(
        key="a",
        token_ids=list(PROMPT),
        num_prompt=len(PROMPT),
        sampling=RowSampling(seed=0),
        max_tokens=16,
        stop_ids=frozenset(),
        arrived_at=1.0,
    )


def make_stream(**params) -> OutputStream:
    return OutputStream(make_request(), SamplingParams(**params), byte_tokenizer())


def logprob_of(token_id: int) -> TokenLogprobs:
    return TokenLogprobs([token_id], [-1.0], 1)


def take(
    stream: OutputStream, text: str = "", *, first: int = 0, until: int = 0, reason=None
) -> Chunk | None:
    """Take a step that computed the prompt's positions first .. until - 1 and committed a text."""
    predicted = PROMPT[first + 1 : until + 1]
    ids = byte_tokenizer().encode(text)
    return stream.take(
        Update(
            request=stream.request,
            token_ids=ids,
            logprobs=[logprob_of(token_id) for token_id in ids],
            prompt_logprobs=[logprob_of(token_id) for token_id in predicted],
            prompt_offset=first,
            finish_reason=reason,
        ),
        2.0,
    )


@pytest.mark.parametrize(
    "steps",
    [
        [(0, 5)],
        [(0, 2), (2, 4), (4, 5)],
        [(0, 2), (2, 4), (0, 3), (3, 5)],
        [(0, 5), (0, 1), (1, 5)],
    ],
    ids=["at once", "in chunks", "preempted between chunks", "computed twice"],
)
def test_prompt_logprobs_come_whole_in_the_first_chunk_however_they_were_computed(steps):
    stream = make_stream(prompt_logprobs=0)
    for first, until in steps:
        assert take(stream, first=first, until=until) is None
    chunk = take(stream, "x", first=5)
    assert chunk is not None
    assert chunk.prompt_logprobs == [None, *(logprob_of(token_id) for token_id in PROMPT[1:])]
    assert take(stream, "y", first=6).prompt_logprobs is None


def test_tokens_and_logprobs_behind_a_stop_string_are_surplus():
    stream = make_stream(stop=("bc",), logprobs=0)
    assert take(stream, "ab").text == "a"
    last = take(stream, "cdef")
    assert (last.text, last.finish_reason) == ("", "stop")
    assert len(last.token_ids) == len(last.logprobs) == 1
    assert stream.num_tokens == 3
    assert last.cumulative_logprob == -3.0


def test_a_stop_string_within_the_last_token_counts_more_than_the_length():
    last = take(make_stream(stop=("b",)), "ab", reason="length")
    assert (last.text, last.finish_reason) == ("a", "stop")


def test_a_stop_string_that_the_detokenizer_holds_back_counts_more_than_the_length():
    """Bytes may be a part of a character until another token comes: Llama 2's line feed is one."""
    backend = Backend(models.BPE({"a": 0, "<0x0A>": 1}, []))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    stream = OutputStream(make_request(), SamplingParams(stop=("\n",)), Tokenizer(backend))
    last = stream.take(Update(stream.request, [0, 1], None, None, 0, "length"), 2.0)
    assert (last.text, last.finish_reason) == ("a", "stop")


def test_what_may_begin_a_stop_string_is_given_out_at_the_end():
    stream = make_stream(stop=("bc",))
    assert take(stream, "ab").text == "a"
    last = take(stream, "b", reason="length")
    assert (last.text, last.finish_reason) == ("bb", "length")


def test_who_cancels_gets_what_was_held_back():
    stream = make_stream(stop=("abc",), logprobs=0)
    chunk = take(stream, "xa", until=5)
    assert chunk is not None
    assert chunk.text == "x"
    assert take(stream, "b") is None
    cancelled = stream.fail(RequestCancelledError("the request was cancelled"), 3.0)
    assert (chunk.text + cancelled.text, cancelled.is_final) == ("xab", True)
    whole = Chunk.merge([chunk, cancelled])
    assert list(whole.token_ids) == byte_tokenizer().encode("xab")
    assert [one.token_ids[0] for one in whole.logprobs or ()] == list(whole.token_ids)
    assert cancelled.timing is not None
    assert stream.fail(ShuttingDownError(), 3.0).text == ""
