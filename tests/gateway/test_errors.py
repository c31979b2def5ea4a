"""What goes wrong is told in OpenAI's form, with the status and the code that clients go by."""

import contextlib
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai as sdk
import pytest

from charonia.errors import InvalidRequestError, PromptTooLongError
from charonia.gateway.errors import of_client_error, of_own_error
from charonia.launch.server.processes import ReservedPorts
from charonia.launch.server.run import running_server
from charonia.launch.server.tritonserver import TritonServer
from charonia_client import Client
from charonia_client import errors as client_errors
from support.e2e import (
    ENDLESS,
    ONE_THREAD,
    endless_request,
    one_torch_thread,
    wait_idle,
)
from support.gateway import Gateway, asking, running_gateway, wait_metric
from support.long import long

PROMPT = "def f("
ENDLESS_STREAM = {"prompt": "x", "stream": True, "max_tokens": ENDLESS, "ignore_eos": True}
TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"


def error_of(reply: httpx.Response) -> dict[str, Any]:
    """The error in an answer, which has OpenAI's four fields."""
    assert reply.headers["content-type"] == "application/json"
    error: dict[str, Any] = reply.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    return error


USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        (TEXT, {"prompt": "x", "colour": 1}, "colour", "Unrecognized request argument supplied"),
        (TEXT, {}, "prompt", "must be given"),
        (TEXT, {"prompt": 5}, "prompt", "must be a text, a list of texts, a list of token ids"),
        (TEXT, {"prompt": []}, "prompt", "must be a text"),
        (TEXT, {"prompt": [[1], "a"]}, "prompt", "must be a text"),
        (TEXT, {"prompt": [1, True]}, "prompt", "must be a text"),
        (TEXT, {"prompt": [-1]}, "prompt", "must be a text"),
        (TEXT, {"prompt": [[1], []]}, "prompt", "must be a text"),
        (TEXT, {"prompt": ["x", ""]}, "prompt", "the prompt must have at least one token"),
        (TEXT, {"prompt": [1, 10**6]}, "prompt", "the prompt has token id 1000000 at place 1; the"),
        (TEXT, {"prompt": ["x"] * 200}, "prompt", "at most 128 entries, but has 200"),
        (TEXT, {"prompt": "x", "max_tokens": "9"}, "max_tokens", "valid integer; it is '9'"),
        (TEXT, {"prompt": "x", "max_tokens": 0}, "max_tokens", "at least 1, but is 0"),
        (TEXT, {"prompt": "x", "temperature": -1}, "temperature", "but is -1.0"),
        (TEXT, {"prompt": "x", "top_p": 7}, "top_p", "at most 1, but is 7.0"),
        (TEXT, {"prompt": "x", "n": 1000}, "n", "from 1 to 128, but is 1000"),
        (TEXT, {"prompt": "x", "n": 3, "best_of": 2}, "best_of", "from 3 to 128"),
        (TEXT, {"prompt": "x", "best_of": 2, "stream": True}, "best_of", "cannot be streamed"),
        (TEXT, {"prompt": "x", "logprobs": 50}, "logprobs", "from 0 to 20"),
        (TEXT, {"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias", "token id"),
        (TEXT, {"prompt": "x", "logit_bias": {"1": 101}}, "logit_bias", "from -100.0 to 100.0"),
        (TEXT, {"prompt": "x", "stop": [1]}, "stop", "string"),
        (TEXT, {"prompt": "x", "stop": [""]}, "stop", "non-empty"),
        (TEXT, {"prompt": "x", "priority": 1}, "priority", "no effect with scheduling_policy"),
        (TEXT, {"prompt": "x", "cache_priority": 101}, "cache_priority", "from 0 to 100"),
        (TEXT, {"prompt": "x", "cache_priority": "9"}, "cache_priority", "valid integer, or"),
        (TEXT, {"prompt": "x", "cache_priority": [{"end": 5}]}, "cache_priority", "priority of ca"),
        (
            TEXT,
            {"prompt": "x", "cache_priority": [{"priority": 5, "color": 1}]},
            "cache_priority",
            "each range of cache_priority must be an object with start, end",
        ),
        (TEXT, {"prompt": "x", "cache_ttl_s": 5}, "cache_ttl_s", "no effect without a cache_prior"),
        (TEXT, {"prompt": "x", "use_answer_cache": 1}, "use_answer_cache", "valid boolean; it is"),
        (TEXT, {"prompt": "x", "stream_options": {}}, "stream_options", "needs stream = true"),
        (
            TEXT,
            {"prompt": "x", "stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options",
            "needs include_usage",
        ),
        (TEXT, {"prompt": "x", "stream_options": {"a": 1}}, "stream_options.a", "Unrecognized"),
        (TEXT, {"prompt": "x", "stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "stream"),
        (TEXT, {"prompt": "x", "suffix": "y"}, "suffix", "not supported"),
        (TEXT, {"prompt": "x", "allowed_token_ids": []}, "allowed_token_ids", "at least one token"),
        (TEXT, {"prompt": "x", "allowed_token_ids": [384]}, "allowed_token_ids", "ids 0 to 383"),
        (
            TEXT,
            {"prompt": "x", "allowed_token_ids": [1] * 4097},
            "allowed_token_ids",
            "at most 4096",
        ),
        (TEXT, {"prompt": "x", "allowed_token_ids": "1"}, "allowed_token_ids", "valid list"),
        (
            TEXT,
            {"prompt": "x", "response_format": {"type": "json_object"}},
            "response_format",
            "accepted is {'type': 'text'}",
        ),
        (TEXT, {"prompt": "x", "structured_outputs": {}}, "structured_outputs", "not supported"),
        (TEXT, {"prompt": "x", "tenant": "a"}, "tenant", "Unrecognized"),
        (TEXT, {"prompt": "x", "stop": ["y"] * 70_000}, "stop", "at most 65536 values"),
        (TEXT, {"prompt": "x", "c" * 5000: 1}, "c" * 100, "Unrecognized"),
        (CHAT, {"messages": []}, "messages", "at least one"),
        (CHAT, {"messages": "x"}, "messages", "valid list"),
        (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, "messages", "'system'"),
        (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages", "content must be"),
        (CHAT, {"messages": [{"role": "user", "content": 1}]}, "messages", "messages[0].content"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages",
            "messages[0].content[0]",
        ),
        (CHAT, {"messages": [USER], "tools": [{"type": "function"}]}, "tools", "not supported"),
        (CHAT, {"messages": [USER], "moderation": {}}, "moderation", "not supported"),
        (
            CHAT,
            {"messages": [USER], "prompt_cache_retention": "24h"},
            "prompt_cache_retention",
            "accepted is 'in_memory'",
        ),
        (
            CHAT,
            {"messages": [USER], "stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options",
            "stream_options.include_obfuscation: input should be False",
        ),
        (CHAT, {"messages": [USER], "tool_choice": "auto"}, "tool_choice", "accepted is 'none'"),
        (CHAT, {"messages": [USER], "chat_template": "{{ x }}"}, "chat_template", "not supported"),
        (CHAT, {"messages": [USER], "top_logprobs": 3}, "top_logprobs", "needs logprobs"),
        (
            CHAT,
            {"messages": [USER], "max_tokens": 1, "max_completion_tokens": 2},
            "max_tokens",
            "1",
        ),
        (
            CHAT,
            {"messages": [USER], "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "cannot both be true",
        ),
        (
            CHAT,
            {"messages": [USER], "chat_template_kwargs": {"tools": []}},
            "chat_template_kwargs",
            "must not have 'tools'",
        ),
        (
            CHAT,
            {"messages": [USER], "chat_template_kwargs": {"raise_exception": True}},
            "chat_template_kwargs",
            "must not have 'raise_exception'",
        ),
        ("/tokenize", {}, "prompt", "must be given"),
        ("/tokenize", {"prompt": "x", "messages": [USER]}, "prompt", "not both"),
        ("/detokenize", {"tokens": [-4]}, "tokens", "must be a list of token ids"),
    ],
)
def test_a_wrong_field_is_named(
    gateway: Gateway, path: str, body: dict[str, Any], param: str, says: str
) -> None:
    reply = gateway.http.post(path, json=body)
    error = error_of(reply)
    assert reply.status_code == 400
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert says in error["message"]


@pytest.mark.parametrize(
    "more",
    [
        {"response_format": {"type": "text"}, "store": False, "service_tier": "auto"},
        {"stream": True, "stream_options": {"include_obfuscation": False}},
        {"tools": None, "stop": None, "logprobs": None, "stream": None, "logit_bias": None},
    ],
)
def test_what_asks_for_nothing_is_taken(gateway: Gateway, more: dict[str, Any]) -> None:
    more = {name: value for name, value in more.items() if name != "tools"}
    reply = gateway.http.post(TEXT, json={"prompt": "x", "max_tokens": 1, **more})
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "not valid JSON"),
        (b'{"prompt": ', "not valid JSON"),
        (b'{"prompt": "\xff"}', "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"prompt": "x", "temperature": NaN}', "not valid JSON"),
        (b"[1]", "must be a JSON object"),
        (b'{"prompt": "\\ud800"}', "not valid JSON"),
    ],
)
def test_a_body_that_is_no_json_object_is_refused(gateway: Gateway, body: bytes, says: str) -> None:
    reply = gateway.http.post(TEXT, content=body)
    assert reply.status_code == 400
    assert says in error_of(reply)["message"]


def test_what_is_not_there_is_not_found(gateway: Gateway) -> None:
    cases = [
        (gateway.http.post(TEXT, json={"model": "nope", "prompt": "x"}), "model_not_found"),
        (gateway.http.get("/v1/models/nope"), "model_not_found"),
        (gateway.http.get("/v1/nope"), "not_found"),
        (gateway.http.post("/v1/embeddings", json={"input": "x"}), "no_embedding_model"),
    ]
    for reply, code in cases:
        assert (reply.status_code, error_of(reply)["code"]) == (404, code)
    with pytest.raises(sdk.NotFoundError) as caught:
        gateway.openai.completions.create(model="nope", prompt="x")
    assert caught.value.code == "model_not_found"
    reply = gateway.http.get(TEXT)
    assert (reply.status_code, reply.headers["allow"]) == (405, "POST")
    error_of(reply)


def test_models_are_listed_by_their_first_name_and_served_by_all(gateway: Gateway) -> None:
    assert [model.id for model in gateway.openai.models.list()] == ["small"]
    alias = gateway.openai.models.retrieve("alias")
    assert (alias.id, alias.object) == ("alias", "model")
    (listed,) = gateway.http.get("/v1/models").json()["data"]
    assert listed["max_model_len"] == 65536
    # `vllm bench serve` without --model reads both.
    assert (listed["id"], listed["root"]) == ("small", "small")
    assert gateway.http.get("/v1/models/alias").json()["root"] == "small"


def test_a_body_that_is_too_large_is_refused(server: TritonServer, model: Path) -> None:
    with running_gateway([server.grpc_url], model, "--max-body-bytes", "1000") as gateway:
        body = json.dumps({"prompt": "x" * 2000}).encode()
        announced = gateway.http.post(TEXT, content=body)
        in_chunks = gateway.http.post(TEXT, content=iter([body[:500], body[500:]]))
        for reply in (announced, in_chunks):
            assert reply.status_code == 413
            assert error_of(reply)["code"] == "request_too_large"
        reply = gateway.http.post(TEXT, json={"prompt": "x", "max_tokens": 1})
        assert reply.status_code == 200


@long
def test_bodies_have_a_limit_together(narrow_server: TritonServer, model: Path) -> None:
    limits = ("--max-held-bytes", "1000")
    with running_gateway([narrow_server.grpc_url], model, *limits) as gateway:
        body = {"prompt": "x" * 600, "stream": True, "max_tokens": ENDLESS, "ignore_eos": True}
        with gateway.http.stream("POST", TEXT, json=body) as reply:
            assert reply.status_code == 200
            refused = gateway.http.post(TEXT, json=body)
            assert refused.status_code == 503
            assert "as many bytes" in error_of(refused)["message"]
        wait_idle(narrow_server)
        again = gateway.http.post(TEXT, json=body | {"stream": False, "max_tokens": 1})
        assert again.status_code == 200


def test_a_body_that_does_not_come_is_not_waited_for(server: TritonServer, model: Path) -> None:
    with (
        running_gateway([server.grpc_url], model, "--read-timeout", "0.2") as gateway,
        _connected(gateway) as connection,
    ):
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\ncontent-length: 10\r\n\r\n{")
        assert connection.recv(12) == b"HTTP/1.1 408"


def test_a_head_that_is_too_long_is_refused(gateway: Gateway) -> None:
    reply = gateway.http.get("/health/live", headers={"x": "y" * 100_000})
    assert reply.status_code == 400


@contextlib.contextmanager
def _connected(gateway: Gateway) -> Any:
    host, _, port = gateway.url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=120) as connection:
        yield connection


def test_a_full_queue_is_503_with_a_time_to_come_back(
    narrow_server: TritonServer, model: Path
) -> None:
    with (
        running_gateway([narrow_server.grpc_url], model) as gateway,
        endless_request(narrow_server),
    ):
        reply = gateway.http.post(TEXT, json={"prompt": ["x"] * 3, "max_tokens": 1})
        assert reply.status_code == 503
        assert error_of(reply)["code"] == "queue_full"
        assert int(reply.headers["retry-after"]) >= 1
    wait_idle(narrow_server)


def test_a_full_queue_is_passed_by_where_another_server_has_room(
    narrow_server: TritonServer, server: TritonServer, model: Path
) -> None:
    """The other server has more to do, so that the full one is asked first."""
    urls = [narrow_server.grpc_url, server.grpc_url]
    with contextlib.ExitStack() as stack:
        gateway = stack.enter_context(running_gateway(urls, model))
        filling = stack.enter_context(running_gateway(urls[:1], model))
        for name, number in (("running", 1), ("waiting", 1), ("waiting", 2)):
            stack.enter_context(asking(filling, prompt="x"))
            wait_metric(narrow_server, f"charonia_requests_{name}", number)
        loading = stack.enter_context(running_gateway(urls[1:], model))
        for number in range(1, 5):
            stack.enter_context(asking(loading, prompt="x"))
            wait_metric(server, "charonia_requests_running", number)
        for _ in range(4):
            reply = gateway.http.post(TEXT, json={"prompt": "x", "max_tokens": 1})
            assert reply.status_code == 200, reply.text
        name = f'charonia_gateway_retries_total{{server="{urls[0]}"}}'
        assert gateway.metrics()[name] >= 1
        assert gateway.metrics()[f'charonia_gateway_server_resting{{server="{urls[0]}"}}'] == 0
    wait_idle(narrow_server)
    wait_idle(server)


def test_as_many_requests_as_the_gateway_holds_and_no_more(
    narrow_server: TritonServer, model: Path
) -> None:
    with (
        running_gateway([narrow_server.grpc_url], model, "--max-requests", "1") as gateway,
        gateway.http.stream("POST", TEXT, json=ENDLESS_STREAM),
    ):
        reply = gateway.http.post(TEXT, json={"prompt": "x", "max_tokens": 1})
        assert reply.status_code == 503
        assert "1 requests, its most" in error_of(reply)["message"]
    wait_idle(narrow_server)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_is_504(
    narrow_server: TritonServer, model: Path, *, stream: bool
) -> None:
    """It waits behind another one, so nothing has come."""
    with (
        running_gateway([narrow_server.grpc_url], model, "--request-timeout", "0.3") as gateway,
        endless_request(narrow_server),
    ):
        reply = gateway.http.post(TEXT, json={"prompt": "x", "stream": stream})
        assert reply.status_code == 504
        assert error_of(reply)["type"] == "timeout_error"
    wait_idle(narrow_server)


def test_what_others_cancel_at_the_server_has_failed(
    server: TritonServer, gateway: Gateway
) -> None:
    """499 is for the log: its client has left, and these have not."""
    wait_idle(server)
    headers = {"x-request-id": "cancelled"}
    with Client(server.grpc_url) as client:
        with ThreadPoolExecutor(1) as pool:
            body = {**ENDLESS_STREAM, "stream": False}
            asked = pool.submit(gateway.http.post, TEXT, json=body, headers=headers)
            wait_metric(server, "charonia_requests_running", 1)
            client.cancel("cancelled-0")
            reply = asked.result()
        assert reply.status_code == 500
        assert error_of(reply)["code"] == "cancelled"
        with gateway.http.stream("POST", TEXT, json=ENDLESS_STREAM, headers=headers) as stream:
            lines = stream.iter_lines()
            assert "error" not in next(lines)
            client.cancel("cancelled-0")
            *_, last, done = [line for line in lines if line]
    assert done == "data: [DONE]"
    error = json.loads(last.removeprefix("data: "))["error"]
    assert (error["type"], error["code"]) == ("server_error", "cancelled")


def test_a_server_that_is_not_there_is_503(model: Path) -> None:
    with contextlib.closing(ReservedPorts("127.0.0.1", 1)) as ports:
        url = f"127.0.0.1:{ports.ports[0]}"
        with running_gateway([url], model) as gateway:
            for stream in (False, True, False, True):  # the breaker opens among these
                reply = gateway.http.post(TEXT, json={"prompt": "x", "stream": stream})
                assert reply.status_code == 503
                assert error_of(reply)["code"] == "unavailable"
                assert int(reply.headers["retry-after"]) >= 1
            assert gateway.metrics()[f'charonia_gateway_server_resting{{server="{url}"}}'] == 1
            ready = gateway.http.get("/health/ready")
            assert (ready.status_code, ready.json()["status"]) == (503, "not ready")
            assert gateway.http.get("/health/live").status_code == 200


def test_a_context_ends_where_it_ends(model: Path) -> None:
    """A prompt that is too long is refused; an answer without a limit is as long as fits."""
    settings = (ONE_THREAD, "max_model_len=64", "num_gpu_blocks_override=64")
    with (
        one_torch_thread(),
        running_server(model=model, settings=settings) as server,
        running_gateway([server.grpc_url], model, "--served-model-name", "m") as gateway,
    ):
        for prompt in ("x" * 64, "x" * 10_000, [5] * 64, ["x", "x" * 100]):
            with pytest.raises(sdk.BadRequestError) as caught:
                gateway.openai.completions.create(model="m", prompt=prompt)  # type: ignore[arg-type]
            assert caught.value.code == "context_length_exceeded"
            assert "maximum context length is 64 tokens" in str(caught.value)
        for limit in (None, 1000):
            answer = gateway.openai.completions.create(
                model="m", prompt=[5] * 40, max_tokens=limit, extra_body={"ignore_eos": True}
            )
            assert answer.choices[0].finish_reason == "length"
            assert answer.usage is not None
            assert answer.usage.total_tokens == 64
        assert gateway.http.post("/tokenize", json={"prompt": "ab"}).json()["max_model_len"] == 64


@long
def test_who_sends_too_fast_is_429_and_told_when_to_come_back(model: Path, tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.json"
    tenants.write_text(json.dumps({"default": {"requests_per_s": 0.001, "burst": 1}}))
    settings = (ONE_THREAD, "num_gpu_blocks_override=64", f"scheduler.tenants_file={tenants}")
    with (
        one_torch_thread(),
        running_server(model=model, settings=settings) as server,
        running_gateway([server.grpc_url], model, "--served-model-name", "m") as gateway,
    ):
        gateway.openai.completions.create(model="m", prompt="x", max_tokens=1)
        with pytest.raises(sdk.RateLimitError) as caught:
            gateway.openai.completions.create(model="m", prompt="x", max_tokens=1)
        assert caught.value.code == "rate_limit_exceeded"
        assert int(caught.value.response.headers["retry-after"]) > 1
        assert gateway.http.get("/health/ready").status_code == 200


@pytest.mark.parametrize(
    ("text", "status", "code"),
    [
        ("n must be from 1 to 128 [charonia:invalid_request]", 400, "invalid_request"),
        ("x is for beam search [charonia:not_supported]", 400, "not_supported"),
        ("the prompt has 9 tokens [charonia:prompt_too_long]", 400, "context_length_exceeded"),
        ("too many [charonia:rate_limited]", 429, "rate_limit_exceeded"),
        ("its queue is full [charonia:tenant_queue_full]", 429, "rate_limit_exceeded"),
        ("too much [charonia:overloaded]", 503, "overloaded"),
        ("full [charonia:queue_full]", 503, "queue_full"),
        ("no engine [charonia:engine_down]", 503, "engine_down"),
        ("bye [charonia:shutting_down]", 503, "shutting_down"),
        ("late [charonia:late]", 504, "late"),
        ("expired [charonia:timeout]", 504, "timeout"),
        ("cancelled [charonia:cancelled]", 500, "cancelled"),
        ("it kills [charonia:quarantined]", 500, "quarantined"),
        ("oh [charonia:internal]", 500, "internal"),
        ("Request for unknown model: 'x' is not found", 502, "no_scheduler"),
        ("inference input 'x' is not found", 502, "bad_gateway"),
        ("failed to connect to all addresses", 503, "unavailable"),
    ],
)
def test_each_kind_of_a_servers_error_has_its_status(text: str, status: int, code: str) -> None:
    error = of_client_error(client_errors.from_text(text))
    assert (error.status, error.code) == (status, code)
    assert ("retry-after" in error.headers) == (status in (429, 503))


def test_a_server_says_when_to_come_back() -> None:
    error = of_client_error(
        client_errors.from_text("too fast; retry after 2.100 s [charonia:rate_limited]")
    )
    assert error.headers == {"retry-after": "3"}


def test_errors_of_the_gateways_own_work_are_the_clients() -> None:
    assert of_own_error(InvalidRequestError("stop must be x")).param == "stop"
    assert of_own_error(PromptTooLongError("long")).code == "context_length_exceeded"
