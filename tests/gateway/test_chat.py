"""/v1/chat/completions is the completion of the rendered conversation, as messages."""

import json
from pathlib import Path
from typing import Any

import openai as sdk
import pytest
from openai import OpenAI

from charonia.launch.server.tritonserver import TritonServer
from charonia.text.tokenizer import Tokenizer
from support.e2e import infer_grpc, request_inputs
from support.gateway import Gateway, running_gateway

SAMPLED: dict[str, Any] = {"max_tokens": 24, "temperature": 1.2, "seed": 11}
MESSAGES: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
]
RENDERED = "<system>Be brief.</>\n<user>Hi</>\n"
BEGUN = RENDERED + "<assistant>"


@pytest.fixture
def openai(gateway: Gateway) -> OpenAI:
    return gateway.openai


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.from_dir(model)


def direct(server: TritonServer, prompt: str, **sampling: Any) -> list[str]:
    """What the scheduler makes of a prompt: the text of each sample."""
    inputs = request_inputs(prompt, sampling, exclude_input_in_output=True)
    return infer_grpc(server, inputs).outputs["text_output"]


def test_a_chat_is_the_completion_of_its_rendering(openai: OpenAI, server: TritonServer) -> None:
    answer = openai.chat.completions.create(model="small", messages=MESSAGES, n=2, **SAMPLED)
    assert [choice.message.content for choice in answer.choices] == direct(
        server, BEGUN, n=2, **SAMPLED
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert {choice.message.role for choice in answer.choices} == {"assistant"}
    assert answer.object == "chat.completion"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > 0


def test_a_stream_of_messages_is_the_whole_ones_piece_by_piece(openai: OpenAI) -> None:
    whole = openai.chat.completions.create(model="small", messages=MESSAGES, n=2, **SAMPLED)
    texts, roles, reasons = ["", ""], [[], []], ["", ""]  # type: ignore[var-annotated]
    *pieces, last = openai.chat.completions.create(
        model="small",
        messages=MESSAGES,
        n=2,
        stream=True,
        stream_options={"include_usage": True},
        **SAMPLED,
    )
    for piece in pieces:
        (choice,) = piece.choices
        texts[choice.index] += choice.delta.content or ""
        roles[choice.index].append(choice.delta.role)
        reasons[choice.index] = choice.finish_reason or ""
        assert piece.object == "chat.completion.chunk"
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    for own in roles:
        assert own == ["assistant"] + [None] * (len(own) - 1)
    assert last.choices == []
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens


def test_the_sdks_own_helper_reads_a_stream(openai: OpenAI, server: TritonServer) -> None:
    (text,) = direct(server, BEGUN, max_tokens=32, temperature=0, ignore_eos=True)
    sampling = {"max_tokens": 32, "temperature": 0, "stop": text[6:9]}
    with openai.chat.completions.stream(model="small", messages=MESSAGES, **sampling) as stream:  # type: ignore[arg-type]
        answer = stream.get_final_completion()
    assert [answer.choices[0].message.content] == direct(server, BEGUN, **sampling)


def test_log_probabilities_have_the_bytes_of_each_token(
    openai: OpenAI, server: TritonServer, tokenizer: Tokenizer
) -> None:
    answer = openai.chat.completions.create(
        model="small", messages=MESSAGES, logprobs=True, top_logprobs=3, **SAMPLED
    )
    inputs = request_inputs(
        BEGUN, SAMPLED | {"logprobs": 3}, return_logprobs=True, return_token_ids=True
    )
    response = infer_grpc(server, inputs)
    ids, positions = response.outputs["output_ids"], json.loads(response.one("logprobs"))
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == len(ids)
    for entry, token_id, position in zip(logprobs.content, ids, positions, strict=True):
        data = tokenizer.token_bytes(token_id)
        assert entry.bytes == list(data)
        assert entry.logprob == position[str(token_id)]["logprob"]
        spelled = "".join(f"\\x{byte:02x}" for byte in data)
        whole_text = data.decode(errors="replace")
        assert entry.token == (spelled if "\ufffd" in whole_text else whole_text)
        ranked = sorted(position.items(), key=lambda item: item[1]["rank"])[:3]
        assert [(top.bytes, top.logprob) for top in entry.top_logprobs] == [
            (list(tokenizer.token_bytes(int(one))), found["logprob"]) for one, found in ranked
        ]
    whole = b"".join(bytes(entry.bytes or ()) for entry in logprobs.content)
    assert whole.decode(errors="replace") == answer.choices[0].message.content
    alone = openai.chat.completions.create(
        model="small", messages=MESSAGES, logprobs=True, **SAMPLED
    )
    assert alone.choices[0].logprobs is not None
    assert alone.choices[0].logprobs.content is not None
    assert [entry.logprob for entry in alone.choices[0].logprobs.content] == [
        entry.logprob for entry in logprobs.content
    ]
    assert all(entry.top_logprobs == [] for entry in alone.choices[0].logprobs.content)


@pytest.mark.parametrize(
    ("messages", "more", "rendered"),
    [
        ([{"role": "developer", "content": "x"}], {}, "<system>x</>\n<assistant>"),
        ([{"role": "user", "content": "x", "name": "Jo"}], {}, "<user Jo>x</>\n<assistant>"),
        (
            [{"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]}],
            {},
            "<user>a\nb</>\n<assistant>",
        ),
        ([{"role": "user", "content": "x"}], {"add_generation_prompt": False}, "<user>x</>\n"),
        (
            [{"role": "user", "content": "x"}, {"role": "assistant", "content": "yes, "}],
            {"continue_final_message": True},
            "<user>x</>\n<assistant>yes, ",
        ),
        (
            [{"role": "user", "content": "x"}],
            {"chat_template_kwargs": {"mood": " glad"}},
            "<user>x</>\n<assistant glad>",
        ),
    ],
)
def test_messages_are_rendered_as_the_template_says(
    gateway: Gateway,
    tokenizer: Tokenizer,
    server: TritonServer,
    messages: list[Any],
    more: dict[str, Any],
    rendered: str,
) -> None:
    body = {"messages": messages, **more}
    answer = gateway.http.post("/tokenize", json=body).json()
    assert tokenizer.decode(answer["tokens"]) == rendered
    assert answer["count"] == len(answer["tokens"])
    sampling = {"max_completion_tokens": 5, "temperature": 0}
    reply = gateway.http.post("/v1/chat/completions", json={**body, **sampling})
    (choice,) = reply.json()["choices"]
    assert [choice["message"]["content"]] == direct(server, rendered, max_tokens=5, temperature=0)


def test_an_answer_may_come_back_as_a_message(openai: OpenAI) -> None:
    first = openai.chat.completions.create(model="small", messages=MESSAGES, max_tokens=3)
    history = [*MESSAGES, first.choices[0].message.model_dump(), *MESSAGES[1:]]
    again = openai.chat.completions.create(model="small", messages=history, max_tokens=3)
    assert again.choices[0].message.content
    history[-2]["provider_specific_fields"] = {"refusal": None}  # as LiteLLM sends it back
    again = openai.chat.completions.create(model="small", messages=history, max_tokens=3)
    assert again.choices[0].message.content


def test_prompt_logprobs_are_of_the_rendered_prompt(gateway: Gateway, server: TritonServer) -> None:
    body = {"messages": MESSAGES, "prompt_logprobs": 1, "max_tokens": 1}
    answer = gateway.http.post("/v1/chat/completions", json=body).json()
    inputs = request_inputs(BEGUN, {"prompt_logprobs": 1, "max_tokens": 1})
    assert answer["prompt_logprobs"] == json.loads(
        infer_grpc(server, inputs).one("prompt_logprobs")
    )


def test_fields_that_ask_for_nothing_are_accepted(gateway: Gateway) -> None:
    """As some clients send them with every request."""
    nothing: dict[str, Any] = {
        "best_of": 1,
        "functions": [],
        "logit_bias": {},
        "logprobs": False,
        "metadata": {},
        "modalities": ["text"],
        "parallel_tool_calls": True,
        "prompt_cache_key": "a",
        "reasoning_effort": "none",
        "response_format": {"type": "text"},
        "safety_identifier": "b",
        "service_tier": "auto",
        "stop": [],
        "store": False,
        "stream_options": None,
        "tool_choice": "none",
        "tools": [],
        "top_logprobs": 0,
        "user": "c",
        "verbosity": "medium",
    }
    body = {"messages": MESSAGES, "max_tokens": 4, "temperature": 0}
    plain = gateway.http.post("/v1/chat/completions", json=body).json()
    answer = gateway.http.post("/v1/chat/completions", json=body | nothing).json()
    assert answer.get("choices") == plain["choices"], answer


def test_what_the_template_refuses_is_refused_with_its_words(openai: OpenAI) -> None:
    with pytest.raises(sdk.BadRequestError, match="too many messages"):
        openai.chat.completions.create(model="small", messages=MESSAGES * 3)


def test_a_long_conversation_is_the_completion_of_its_rendering(
    gateway: Gateway, server: TritonServer
) -> None:
    content = "words and words " * 1000
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2, "temperature": 0}
    (choice,) = gateway.http.post("/v1/chat/completions", json=body).json()["choices"]
    rendered = f"<user>{content}</>\n<assistant>"
    assert [choice["message"]["content"]] == direct(server, rendered, max_tokens=2, temperature=0)


def test_a_model_without_a_template_completes_texts_alone(
    server: TritonServer, model: Path, tmp_path: Path
) -> None:
    with running_gateway([server.grpc_url], model, "--served-model-name", "m") as gateway:
        gateway.wait_line("gateway_without_chats", "no chat template")
        with pytest.raises(sdk.BadRequestError, match="no chat template") as caught:
            gateway.openai.chat.completions.create(model="m", messages=MESSAGES)
        assert caught.value.code == "no_chat_template"
        assert gateway.openai.completions.create(model="m", prompt="x", max_tokens=1).choices
    template = tmp_path / "mine.jinja"
    template.write_text("{{ messages[0].content }}")
    options = ("--served-model-name", "m", "--chat-template", str(template))
    with running_gateway([server.grpc_url], model, *options) as gateway:
        answer = gateway.openai.chat.completions.create(
            model="m", messages=MESSAGES, max_tokens=4, temperature=0
        )
        assert [answer.choices[0].message.content] == direct(
            server, "Be brief.", max_tokens=4, temperature=0
        )
