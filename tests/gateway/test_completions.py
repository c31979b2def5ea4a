"""/v1/completions through OpenAI's client is what the scheduler gives to who asks it directly."""

import json
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from charonia.gateway.openai.completions import TextForm
from charonia.gateway.openai.logprobs import Spelling
from charonia.gateway.openai.requests import CompletionRequest
from charonia.gateway.prompts import Prompt
from charonia.launch.server.tritonserver import TritonServer
from charonia.text.tokenizer import Tokenizer
from charonia_client import Chunk, TokenLogprob
from support.e2e import ids_of, infer_grpc, request_inputs, stream_grpc, text_of
from support.gateway import Gateway

PROMPT = "def f("
SAMPLED: dict[str, Any] = {"max_tokens": 24, "temperature": 1.2, "seed": 11}


@pytest.fixture
def openai(gateway: Gateway) -> OpenAI:
    return gateway.openai


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.from_dir(model)


def direct(server: TritonServer, prompt: str | list[int], **sampling: Any) -> str:
    """What the scheduler streams of a prompt."""
    return text_of(stream_grpc(server, request_inputs(prompt, sampling, stream=True)))


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"temperature": 0},
        {"top_p": 0.7},
        {"presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"top_k": 5},
        {"min_p": 0.2},
        {"repetition_penalty": 1.8},
        {"logit_bias": {"88": 30, "221": 30}},
        {"bad_words": ["s", "Z"]},
        {"allowed_token_ids": [88, 91, 97, 221]},
        {"allowed_token_ids": [88, 91, 97], "logit_bias": {"88": 3, "221": 100}, "temperature": 0},
        {"ignore_eos": True, "max_tokens": 64},
        {"stop_token_ids": [88], "logit_bias": {"88": 12}},
        {"min_tokens": 20, "stop": ["e", "t"]},
        {"skip_special_tokens": False, "ignore_eos": True, "logit_bias": {"0": 100}},
    ],
    ids=lambda more: "-".join(more) or "plain",
)
def test_every_parameter_has_the_schedulers_effect(
    openai: OpenAI, server: TritonServer, more: dict[str, Any]
) -> None:
    sampling = SAMPLED | more
    answer = openai.completions.create(
        model="small", prompt=PROMPT, extra_body=sampling | {"user": "u"}
    )
    (choice,) = answer.choices
    assert choice.text == direct(server, PROMPT, **sampling)
    assert answer.object == "text_completion"
    assert answer.model == "small"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_the_parameters_of_that_test_each_have_an_effect(server: TritonServer) -> None:
    plain = direct(server, PROMPT, **SAMPLED)
    for more in (
        {"top_p": 0.3},
        {"top_k": 2},
        {"repetition_penalty": 1.8},
        {"bad_words": ["s", "Z"]},
        {"allowed_token_ids": [88, 91, 97, 221]},
    ):
        assert direct(server, PROMPT, **SAMPLED | more) != plain, more


def test_a_stream_is_the_whole_answer_in_however_many_pieces(openai: OpenAI) -> None:
    whole = openai.completions.create(model="alias", prompt=PROMPT, **SAMPLED)
    pieces = list(
        openai.completions.create(
            model="alias",
            prompt=PROMPT,
            stream=True,
            stream_options={"include_usage": True},
            **SAMPLED,
        )
    )
    *texts, last = pieces
    assert "".join(piece.choices[0].text for piece in texts) == whole.choices[0].text
    reasons = [piece.choices[0].finish_reason for piece in texts]
    assert reasons == [None] * (len(texts) - 1) + [whole.choices[0].finish_reason]
    assert last.choices == []
    assert [piece.usage for piece in texts] == [None] * len(texts)
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens == 24
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens == 5
    assert len({piece.id for piece in pieces}) == 1


def test_each_chunk_has_the_usage_so_far_where_that_is_asked_for(openai: OpenAI) -> None:
    *pieces, last = openai.completions.create(
        model="small",
        prompt=PROMPT,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},  # type: ignore[typeddict-unknown-key]
        **SAMPLED,
    )
    counts = [piece.usage.completion_tokens for piece in pieces if piece.usage is not None]
    assert len(counts) == len(pieces)
    assert counts == sorted(counts)
    assert last.usage is not None
    assert counts[-1] == last.usage.completion_tokens == 24


def test_an_event_is_one_line_to_every_library(gateway: Gateway) -> None:
    """httpx' own lines end at characters that are none of JSON's."""
    prompt = "a\u2028b\u2029c\x85d\x0be\x1cf\r\ng"
    body = {"prompt": prompt, "echo": True, "stream": True, "max_tokens": 40, "seed": 1}
    with gateway.http.stream("POST", "/v1/completions", json=body) as reply:
        *events, done = [line for line in reply.iter_lines() if line]
    assert done == "data: [DONE]"
    texts = [json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in events]
    assert "".join(texts).startswith(prompt)


def test_without_stream_options_no_chunk_speaks_of_usage(gateway: Gateway) -> None:
    reply = gateway.http.post(
        "/v1/completions", json={"prompt": PROMPT, "stream": True, "max_tokens": 3}
    )
    *events, done, end = reply.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    assert all("usage" not in json.loads(event.removeprefix("data: ")) for event in events)
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"


def test_several_prompts_with_several_samples_come_in_their_order(
    openai: OpenAI, server: TritonServer
) -> None:
    prompts = [PROMPT, "class A", "import"]
    more = {"ignore_eos": True}
    wanted = [
        direct(server, prompt, **SAMPLED | more | {"seed": seed})
        for prompt in prompts
        for seed in (11, 12)
    ]
    answer = openai.completions.create(
        model="small", prompt=prompts, n=2, extra_body=more, **SAMPLED
    )
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text for choice in answer.choices] == wanted
    texts = [""] * 6
    for piece in openai.completions.create(
        model="small", prompt=prompts, n=2, stream=True, extra_body=more, **SAMPLED
    ):
        texts[piece.choices[0].index] += piece.choices[0].text
    assert texts == wanted
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6 * 24


def test_prompts_may_be_token_ids(
    openai: OpenAI, server: TritonServer, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode(PROMPT)
    wanted = direct(server, PROMPT, **SAMPLED)
    one = openai.completions.create(model="small", prompt=ids, **SAMPLED)
    two = openai.completions.create(model="small", prompt=[ids, [5, 6]], echo=True, **SAMPLED)
    assert one.choices[0].text == wanted
    assert two.choices[0].text == PROMPT + wanted
    assert two.choices[1].text == tokenizer.decode([5, 6]) + direct(server, [5, 6], **SAMPLED)


def test_log_probabilities_are_the_schedulers_and_tokens_spell_the_text(
    openai: OpenAI, server: TritonServer, tokenizer: Tokenizer
) -> None:
    sampling = SAMPLED | {"logprobs": 3}
    answer = openai.completions.create(model="small", prompt=PROMPT, **sampling)
    found = answer.choices[0].logprobs
    inputs = request_inputs(
        PROMPT, sampling, exclude_input_in_output=True, return_logprobs=True, return_token_ids=True
    )
    response = infer_grpc(server, inputs)
    positions = json.loads(response.one("logprobs"))
    ids = response.outputs["output_ids"]
    assert found is not None
    assert found.token_logprobs == [
        position[str(token_id)]["logprob"]
        for token_id, position in zip(ids, positions, strict=True)
    ]
    data = [tokenizer.token_bytes(token_id) for token_id in ids]
    assert [bytes_of(token) for token in found.tokens or ()] == data
    assert b"".join(data).decode(errors="replace") == answer.choices[0].text
    assert any(token.startswith("bytes:") for token in found.tokens or ()), "tests nothing else"
    for top, position in zip(found.top_logprobs or (), positions, strict=True):
        assert max(top.values()) == max(one["logprob"] for one in position.values())
    streamed = [
        piece.choices[0].logprobs
        for piece in openai.completions.create(
            model="small", prompt=PROMPT, stream=True, **sampling
        )
    ]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        parts = [entry for piece in streamed for entry in getattr(piece, name)]
        assert parts == getattr(found, name)


def bytes_of(token: str) -> bytes:
    """What a token of the answer stands for."""
    if token.startswith("bytes:"):
        return bytes.fromhex(token.removeprefix("bytes:").replace("\\x", ""))
    return token.encode()


def test_offsets_say_where_tokens_begin(openai: OpenAI) -> None:
    answer = openai.completions.create(
        model="small", prompt="déf fö(", echo=True, logprobs=0, temperature=0, max_tokens=8
    )
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.text_offset is not None
    for token, offset in zip(found.tokens or (), found.text_offset, strict=True):
        if not token.startswith("bytes:"):
            assert answer.choices[0].text[offset:].startswith(token)


@pytest.mark.parametrize("skips", [True, False])
def test_offsets_say_where_tokens_begin_behind_special_ones(
    gateway: Gateway, *, skips: bool
) -> None:
    body = {"prompt": "a<|endoftext|>b c", "echo": True, "logprobs": 0, "max_tokens": 8}
    body |= {"temperature": 0, "skip_special_tokens": skips}
    (choice,) = gateway.http.post("/v1/completions", json=body).json()["choices"]
    found = choice["logprobs"]
    assert found["tokens"][1] == "<|endoftext|>"
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        if not token.startswith("bytes:"):
            assert choice["text"][offset:].startswith(token)


def test_a_token_that_the_tokenizer_adds_takes_no_room_in_an_echo(tokenizer: Tokenizer) -> None:
    ids = [0, *tokenizer.encode("déf"), 0]
    offsets = Spelling(tokenizer).offsets(skip_special_tokens=False)
    spelled = [tokenizer.token_bytes(token_id) for token_id in ids[1:-1]]
    begins = [
        len(b"".join(spelled[:index]).decode(errors="ignore")) for index in range(len(spelled))
    ]
    assert offsets.echo(ids, "déf") == [0, *begins, 3]
    assert [offsets.next(0), offsets.next(0)] == [3, 3 + len("<|endoftext|>")]


def test_every_sample_of_a_stream_begins_with_the_scored_prompt(openai: OpenAI) -> None:
    sampling = SAMPLED | {"n": 3, "logprobs": 1, "echo": True}
    whole = openai.completions.create(model="small", prompt=PROMPT, **sampling)
    pieces = openai.completions.create(model="small", prompt=PROMPT, stream=True, **sampling)
    texts, logprobs = [""] * 3, [[], [], []]  # type: ignore[var-annotated]
    for piece in pieces:
        (choice,) = piece.choices
        texts[choice.index] += choice.text
        logprobs[choice.index] += choice.logprobs.token_logprobs or ()
    assert texts == [choice.text for choice in whole.choices]
    assert logprobs == [
        choice.logprobs.token_logprobs for choice in whole.choices if choice.logprobs is not None
    ]


def test_a_sample_that_comes_first_waits_for_the_scored_prompt(tokenizer: Tokenizer) -> None:
    """The scheduler scores the prompt in sample 0, whose first token may be no whole character."""
    ids = tokenizer.encode("ab")
    request = CompletionRequest(prompt="ab", echo=True, logprobs=0, n=2)
    form = TextForm(Spelling(tokenizer), request, [Prompt(ids, "ab")], ["ab"], "id", "small")

    def chunk(index: int, scored: bool) -> Chunk:
        position = (TokenLogprob(token_id=ids[-1], logprob=-1.0, rank=1, text="b"),)
        prompt = (None, *[position] * (len(ids) - 1)) if scored else None
        return Chunk(
            text="b",
            index=index,
            token_ids=(ids[-1],),
            logprobs=(position,),
            prompt_logprobs=prompt,
        )

    assert form.pieces(0, chunk(1, scored=False)) == []
    choices = [piece.choices[0] for piece in form.pieces(0, chunk(0, scored=True))]
    assert [choice.index for choice in choices] == [0, 1]
    for choice in choices:
        assert choice.text == "abb"
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs == [None, *[-1.0] * len(ids)]
    (later,) = form.pieces(0, chunk(1, scored=False))
    assert later.choices[0].text == "b"


def test_a_prompt_is_scored_without_an_answer(openai: OpenAI, server: TritonServer) -> None:
    """As lm-eval asks for log-likelihoods."""
    answer = openai.completions.create(
        model="small", prompt=PROMPT, echo=True, logprobs=1, max_tokens=0, temperature=0
    )
    inputs = request_inputs(PROMPT, {"max_tokens": 1, "prompt_logprobs": 1})
    scored = json.loads(infer_grpc(server, inputs).one("prompt_logprobs"))
    (choice,) = answer.choices
    assert choice.text == PROMPT
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs == [
        None,
        *(next(iter(position.values()))["logprob"] for position in scored[1:]),
    ]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0
    with_one = openai.completions.create(
        model="small", prompt=PROMPT, echo=True, logprobs=1, max_tokens=1, temperature=0
    )
    assert with_one.choices[0].logprobs is not None
    assert (with_one.choices[0].logprobs.token_logprobs or [])[:-1] == (
        choice.logprobs.token_logprobs
    )
    streamed = list(
        openai.completions.create(
            model="small", prompt=PROMPT, echo=True, logprobs=1, max_tokens=0, stream=True
        )
    )
    assert "".join(piece.choices[0].text for piece in streamed) == PROMPT


def test_prompt_logprobs_come_in_vllms_form(gateway: Gateway, server: TritonServer) -> None:
    body = {"prompt": PROMPT, "max_tokens": 1, "prompt_logprobs": 2}
    (choice,) = gateway.http.post("/v1/completions", json=body).json()["choices"]
    inputs = request_inputs(PROMPT, {"max_tokens": 1, "prompt_logprobs": 2})
    assert choice["prompt_logprobs"] == json.loads(
        infer_grpc(server, inputs).one("prompt_logprobs")
    )


@pytest.mark.parametrize("includes", [False, True])
def test_a_stop_string_ends_the_text(
    openai: OpenAI, server: TritonServer, *, includes: bool
) -> None:
    plain = direct(server, PROMPT, **SAMPLED)
    stop = plain[7:9]
    answer = openai.completions.create(
        model="small",
        prompt=PROMPT,
        stop=["never", stop],
        extra_body={"include_stop_str_in_output": includes},
        **SAMPLED,
    )
    end = plain.index(stop) + (len(stop) if includes else 0)
    assert answer.choices[0].text == plain[:end]
    assert answer.choices[0].finish_reason == "stop"


def test_the_best_of_several_come_first(openai: OpenAI, server: TritonServer) -> None:
    answer = openai.completions.create(
        model="small", prompt=PROMPT, n=2, best_of=4, seed=3, max_tokens=6
    )
    sampling = {"n": 2, "best_of": 4, "seed": 3, "max_tokens": 6}
    inputs = request_inputs(PROMPT, sampling, exclude_input_in_output=True)
    wanted = infer_grpc(server, inputs).outputs["text_output"]
    assert [choice.text for choice in answer.choices] == wanted


@pytest.mark.parametrize("num_samples", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_what_was_cached_of_a_prompt_is_told(
    openai: OpenAI, *, num_samples: int, stream: bool
) -> None:
    salt = {"cache_salt": f"{num_samples} {stream}"}
    prompt = list(range(40, 90))

    def ask() -> Any:
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        answer: Any = openai.completions.create(  # type: ignore[call-overload]
            model="small", prompt=prompt, n=num_samples, max_tokens=2, extra_body=salt, **options
        )
        return list(answer)[-1].usage if stream else answer.usage

    details = [ask().prompt_tokens_details for _ in range(2)]
    assert [one.cached_tokens for one in details] == [0, 48]


def test_ids_of_a_whole_answer_are_those_of_a_stream(server: TritonServer) -> None:
    """What the tests here compare with does not depend on how it is asked for."""
    streamed = stream_grpc(
        server, request_inputs(PROMPT, SAMPLED, stream=True, return_token_ids=True)
    )
    whole = infer_grpc(server, request_inputs(PROMPT, SAMPLED, return_token_ids=True))
    assert ids_of(streamed) == whole.outputs["output_ids"]
