"""The REST API: answers are those of the scheduler, and a wrong entry of a batch fails alone."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from httpx_sse import EventSource

from charonia.gateway.figures import TOKENS_S, Figures
from charonia.gateway.rest.requests import AllSamplingFields, GenerateRequest
from charonia.launch.server.tritonserver import TritonServer
from charonia.protocol import SamplingParams
from charonia_client import Client, Load
from support.e2e import ENDLESS, scrape, wait_for, wait_idle
from support.gateway import Gateway, wait_metric

GENERATE, BATCH, COMPLETIONS = "/v1/generate", "/v1/batch", "/v1/completions"
SAMPLED: dict[str, Any] = {"temperature": 1.2, "seed": 3, "ignore_eos": True, "max_tokens": 12}
TEXT = "def f("


@pytest.fixture
def client(server: TritonServer) -> Iterator[Client]:
    with Client(server.grpc_url) as client:
        yield client


def post(gateway: Gateway, path: str, status: int = 200, **body: Any) -> dict[str, Any]:
    """The answer to a request."""
    reply = gateway.http.post(path, json=body)
    assert reply.status_code == status, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def test_every_sampling_parameter_of_the_scheduler_is_a_field() -> None:
    names = set(SamplingParams.__struct_fields__)
    assert AllSamplingFields.model_fields.keys() == names
    asked = GenerateRequest.model_construct(prompt="x", model="m", **dict.fromkeys(names, 1))
    assert asked.sampling() == dict.fromkeys(names, 1), "each one is handed on, and nothing else"


def test_a_prompt_is_completed_as_the_scheduler_does(gateway: Gateway, client: Client) -> None:
    wanted = client.generate(TEXT, SAMPLED, include=["token_ids", "num_tokens"])
    answer = post(gateway, GENERATE, prompt=TEXT, **SAMPLED)
    assert answer["text"] == wanted.text
    assert answer["token_ids"] == list(wanted.token_ids)
    assert answer["finish_reason"] == "length"
    assert (answer["prompt_tokens"], answer["generated_tokens"]) == (wanted.num_input_tokens, 12)
    rate = 1000 * answer["generated_tokens"] / answer["latency_ms"]
    assert answer["throughput_tokens_per_sec"] == pytest.approx(rate)
    assert answer["model"] == "small"
    assert "samples" not in answer
    ids = gateway.http.post("/tokenize", json={"prompt": TEXT}).json()["tokens"]
    assert post(gateway, GENERATE, prompt_tokens=ids, **SAMPLED)["text"] == wanted.text


def test_several_samples_and_log_probabilities(gateway: Gateway, client: Client) -> None:
    more: dict[str, Any] = {**SAMPLED, "n": 2, "logprobs": 1, "prompt_logprobs": 0}
    wanted = client.generate(TEXT, more, include=["token_ids"])
    answer = post(gateway, GENERATE, prompt=TEXT, **more)
    samples = answer["samples"]
    assert [one["text"] for one in samples] == [one.text for one in wanted.samples]
    assert answer["text"] == samples[0]["text"]
    assert answer["generated_tokens"] == 24
    for sample, expected in zip(samples, wanted.samples, strict=True):
        taken = [position[0] for position in sample["logprobs"]]
        assert [one["token_id"] for one in taken] == sample["token_ids"]
        assert expected.logprobs is not None
        logprobs = [position[0].logprob for position in expected.logprobs]
        assert [one["logprob"] for one in taken] == logprobs
    assert answer["prompt_logprobs"][0] is None
    assert len(answer["prompt_logprobs"]) == answer["prompt_tokens"]


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_is_the_whole_answer_in_pieces(gateway: Gateway, n: int) -> None:
    body = {"prompt": TEXT, "n": n, **SAMPLED}
    whole = post(gateway, GENERATE, **body)
    with gateway.http.stream("POST", GENERATE, json={**body, "stream": True}) as reply:
        events = [event.data for event in EventSource(reply).iter_sse()]
    assert events.pop() == "[DONE]"
    pieces = [json.loads(event) for event in events]
    samples = whole.get("samples", [whole])
    for index, sample in enumerate(samples):
        own = [piece for piece in pieces if piece.get("sample", 0) == index]
        assert "".join(piece["text"] for piece in own) == sample["text"]
        ids = [token_id for piece in own for token_id in piece["token_ids"]]
        assert ids == sample["token_ids"]
        assert [piece["finish_reason"] for piece in own][-1] == sample["finish_reason"]
        assert not any(piece["finish_reason"] for piece in own[:-1])
    assert ("sample" in pieces[0]) == (n > 1)
    last = pieces[-1]
    assert last["generated_tokens"] == whole["generated_tokens"]
    assert last["prompt_tokens"] == whole["prompt_tokens"]
    assert not any("generated_tokens" in piece for piece in pieces[:-1])
    assert len({piece["request_id"] for piece in pieces}) == 1


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        (GENERATE, {"prompt": "x", "temprature": 1}, "temprature", "Unrecognized"),
        (GENERATE, {}, "prompt", "exactly one of prompt and prompt_tokens must be given"),
        (GENERATE, {"prompt": "x", "prompt_tokens": [1]}, "prompt", "exactly one"),
        (GENERATE, {"prompt_tokens": [1, -1]}, "prompt_tokens", "must be a list of token ids"),
        (GENERATE, {"prompt_tokens": []}, "prompt_tokens", "must be a list of token ids"),
        (GENERATE, {"prompt": "x", "max_tokens": "4"}, "max_tokens", "valid integer"),
        (GENERATE, {"prompt": "x", "top_p": 2.0}, "top_p", "top_p"),
        (BATCH, {"requests": []}, "requests", "must be a list of requests"),
        (BATCH, {"requests": [{}] * 129}, "requests", "at most 128 entries, but has 129"),
        (BATCH, {"prompt": "x"}, "prompt", "Unrecognized"),
    ],
)
def test_a_wrong_request_is_refused(
    gateway: Gateway, path: str, body: dict[str, Any], param: str, says: str
) -> None:
    error = post(gateway, path, 400, **body)["error"]
    assert says in error["message"]
    assert error["param"] == param


ENTRIES: list[Any] = [
    {"prompt": TEXT, **SAMPLED},
    {"prompt": TEXT, "temprature": 1},
    {"prompt": "x", "model": "large"},
    17,
    {"prompt": TEXT, **SAMPLED, "max_tokens": 3},
    {"prompt": "x", "stream": True},
]


def check_batch(gateway: Gateway, responses: list[dict[str, Any]], ids: list[str]) -> None:
    """What each of `ENTRIES` is answered."""
    assert [one["request_id"] for one in responses] == ids
    alone = post(gateway, GENERATE, **ENTRIES[0])
    assert responses[0]["text"] == alone["text"]
    assert responses[4]["token_ids"] == alone["token_ids"][:3]
    found = [(responses[index]["error"]["status"], index) for index in (1, 2, 3, 5)]
    assert found == [(400, 1), (404, 2), (400, 3), (400, 5)]
    assert responses[1]["error"]["param"] == "temprature"
    assert "requests[3] must be a JSON object, but is 17" in responses[3]["error"]["message"]
    assert responses[5]["error"]["param"] == "stream"


def test_a_wrong_entry_of_a_batch_fails_alone_and_in_its_place(gateway: Gateway) -> None:
    answer = post(gateway, BATCH, requests=ENTRIES)
    check_batch(gateway, answer["responses"], answer["request_ids"])
    seconds = answer["total_latency_ms"] / 1000
    assert answer["batch_throughput_tokens_per_sec"] == pytest.approx(15 / seconds)


def test_a_streamed_batch_has_a_line_for_each_response_and_the_totals(gateway: Gateway) -> None:
    reply = gateway.http.post(BATCH, json={"requests": ENTRIES, "stream": True})
    assert reply.headers["content-type"] == "application/x-ndjson"
    *lines, totals = map(json.loads, reply.text.splitlines())
    responses = {line["index"]: line["response"] for line in lines}
    assert responses.keys() == set(range(len(ENTRIES)))
    check_batch(gateway, [responses[index] for index in sorted(responses)], totals["request_ids"])
    assert totals["batch_throughput_tokens_per_sec"] > 0


@pytest.mark.parametrize("stream", [False, True])
def test_an_operator_sees_what_failed_in_a_batch(gateway: Gateway, *, stream: bool) -> None:
    def count(status: int) -> float:
        name = f'charonia_gateway_batch_entries_total{{status="{status}"}}'
        return gateway.metrics().get(name, 0)

    def line(name: str, entries: list[Any]) -> str:
        body = {"requests": entries, "stream": stream}
        headers = {"x-request-id": f"{name}-{stream}"}
        assert gateway.http.post(BATCH, json=body, headers=headers).status_code == 200
        return gateway.wait_line(f"request_id={name}-{stream}")

    before = {status: count(status) for status in (200, 400, 404)}
    failed = line("failed", [{"prompt": "x", "model": "large"}, {"prompt": "x", "model": "large"}])
    assert "status=200" in failed
    assert "entries=2 failed=2" in failed
    assert "reason=\"The model 'large' does not exist\"" in failed
    mixed = line("mixed", ENTRIES)
    assert "entries=6 failed=4" in mixed
    assert "reason=" in mixed
    good = line("good", [{"prompt": "x", "max_tokens": 1}])
    assert "entries=1" in good
    assert "failed=" not in good
    assert "reason=" not in good
    grown = {status: count(status) - number for status, number in before.items()}
    assert grown == {200: 3, 400: 3, 404: 3}


def test_who_leaves_a_batch_leaves_nothing_behind(server: TritonServer, gateway: Gateway) -> None:
    before = wait_idle(server)["charonia_cancellations_total"]
    entry = {"prompt": "x", "ignore_eos": True, "max_tokens": ENDLESS}
    body = {"requests": [{"prompt": "x", "max_tokens": 1}, entry, entry], "stream": True}
    with gateway.http.stream("POST", BATCH, json=body) as reply:
        lines = reply.iter_lines()  # which closes the connection when it is dropped
        assert json.loads(next(lines))["index"] == 0
        wait_metric(server, "charonia_requests_running", 2)
    assert wait_idle(server)["charonia_cancellations_total"] == before + 2


def test_health_is_that_of_the_servers(gateway: Gateway) -> None:
    health = gateway.http.get("/v1/health")
    assert health.status_code == 200
    assert health.json()["live"] is True
    assert health.json()["status"] == "ready"
    assert [one["ready"] for one in health.json()["servers"]] == [True]


def test_figures_are_those_of_gateway_and_server(server: TritonServer, gateway: Gateway) -> None:
    def ask() -> dict[str, Any]:
        found: dict[str, Any] = gateway.http.get("/v1/metrics").json()
        return found

    def num_gaps() -> float:
        return gateway.metrics()["charonia_gateway_inter_token_seconds_count"]

    wait_idle(server)
    before, gaps_before = ask(), num_gaps()
    with gateway.http.stream(
        "POST", GENERATE, json={"prompt": TEXT, **SAMPLED, "stream": True}
    ) as reply:
        *events, end = [event.data for event in EventSource(reply).iter_sse()]
    assert end == "[DONE]"
    first = len(json.loads(events[0])["token_ids"])
    assert 0 < first <= 12
    assert num_gaps() - gaps_before == 12 - first
    post(gateway, BATCH, requests=[*[{"prompt": TEXT, **SAMPLED}] * 2, {"prompt": "x", "top_p": 9}])
    short = {"ignore_eos": True, "max_tokens": 2, "n": 2}
    post(gateway, COMPLETIONS, prompt=["a", "b", "c"], **short)
    with gateway.http.stream(
        "POST", COMPLETIONS, json={"prompt": ["a", "b"], **short, "stream": True}
    ) as reply:
        assert reply.read().endswith(b"[DONE]\n\n")
    generated = "charonia_generation_tokens_total"
    after = wait_for(  # both may be some tenths of a second old
        ask,
        lambda found: found["servers"][0]["load"]["generation_tokens"] == scrape(server)[generated],
    )
    assert after["total_requests"] - before["total_requests"] == 1 + 2 + 3 + 2
    tokens = 12 + 2 * 12 + 3 * 2 * 2 + 2 * 2 * 2
    assert after["total_tokens_generated"] - before["total_tokens_generated"] == tokens
    seconds = after["total_requests"] * after["avg_latency_ms"] / 1000
    rate = after["total_tokens_generated"] / seconds
    assert after["avg_throughput_tokens_per_sec"] == pytest.approx(rate)
    assert after["ttft_ms"]["p99"] >= after["ttft_ms"]["p50"] > 0
    assert after["uptime_s"] > before["uptime_s"]
    (found,) = after["servers"]
    assert (found["server"], found["is_up"], found["reason"]) == (server.grpc_url, True, None)
    load, metrics = found["load"], scrape(server)
    assert load["generation_tokens"] == metrics[generated]
    assert load.keys() == set(Load.__dataclass_fields__)
    assert load["kv_blocks_total"] == metrics['charonia_kv_blocks{state="total"}']
    rate = load["cache_hit_tokens"] / load["cache_queried_tokens"]
    assert after["cache_hit_rate"] == pytest.approx(rate)
    assert after["acceptance_rate"] is None, "nothing was drafted"


def test_rates_and_times_are_of_the_last_seconds() -> None:
    now = 100.0
    figures = Figures(lambda: now)
    assert (figures.tokens_per_s, figures.ttft_s, figures.latency_s, figures.throughput) == (
        0.0,
        None,
        None,
        None,
    )
    figures.note_tokens(30)
    figures.note_first_token(0.5)
    figures.note_answer(30, 2.0)
    now = 102.0
    assert figures.tokens_per_s == 15.0, "it runs for two seconds"
    assert figures.ttft_s == (0.5, 0.5)
    assert (figures.latency_s, figures.throughput) == (2.0, 15.0)
    now = 100.0 + TOKENS_S
    figures.note_tokens(50)
    figures.note_first_token(0.1)
    assert figures.tokens_per_s == 3.0, "this second is not over"
    now += 1
    assert figures.tokens_per_s == 5.0, "the first second is too long ago"
    assert figures.ttft_s == pytest.approx((0.3, 0.496))
    now = 165.0
    assert figures.ttft_s == (0.1, 0.1)
