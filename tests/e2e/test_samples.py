"""Several samples of one prompt over the real server: each way in, streamed and whole."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from httpx_sse import EventSource

from charonia.launch.server.tritonserver import TritonServer
from support.e2e import (
    ANSWER_TIMEOUT_S,
    ENDLESS,
    GrpcStream,
    Response,
    error_of,
    generate,
    generate_stream,
    generate_url,
    infer_grpc,
    one_response,
    request_inputs,
    stream_grpc,
    wait_idle,
    wait_running,
)

PROMPT = list(range(30, 67))
NUM_SAMPLES = 3
SEED = 21
SAMPLING = {"max_tokens": 12, "ignore_eos": True, "seed": SEED}
WISHES = {
    "return_token_ids": True,
    "return_finish_reason": True,
    "return_num_output_tokens": True,
    "return_timing": True,
    "exclude_input_in_output": True,
}


def split(outputs: dict[str, Any]) -> list[list[int]]:
    """The tokens of each sample of one response."""
    ids, counts = outputs["output_ids"], outputs["num_output_tokens"]
    parts, first = [], 0
    for count in counts:
        parts.append(ids[first : first + count])
        first += count
    assert first == len(ids)
    return parts


@pytest.fixture(scope="module")
def alone(server: TritonServer) -> list[Response]:
    """What requests with the samples' seeds give."""
    return [
        infer_grpc(server, request_inputs(PROMPT, SAMPLING | {"seed": SEED + i}, **WISHES))
        for i in range(NUM_SAMPLES)
    ]


def check_whole(outputs: dict[str, Any], alone: list[Response]) -> None:
    assert split(outputs) == [one.outputs["output_ids"] for one in alone]
    assert outputs["text_output"] == [one.one("text_output") for one in alone]
    assert outputs["finish_reason"] == ["length"] * NUM_SAMPLES
    timing = json.loads(outputs["timing"][0])
    assert timing["computed_tokens"] + timing["cached_tokens"] == NUM_SAMPLES * len(PROMPT)


def test_a_whole_answer_has_an_element_for_each_sample(
    server: TritonServer, alone: list[Response]
) -> None:
    inputs = request_inputs(PROMPT, SAMPLING | {"n": NUM_SAMPLES}, **WISHES)
    check_whole(infer_grpc(server, inputs).outputs, alone)
    for model in ("scheduler", "llm"):
        check_whole(one_response(stream_grpc(server, inputs, model)).outputs, alone)


@pytest.mark.parametrize("model", ["scheduler", "llm"])
def test_a_stream_gives_the_same_in_however_many_pieces(
    server: TritonServer, alone: list[Response], model: str
) -> None:
    """Tokens that wait to be sent are merged, so how many pieces there are depends on speed."""
    wishes = {name: True for name in WISHES if name != "exclude_input_in_output"}
    inputs = request_inputs(PROMPT, SAMPLING | {"n": NUM_SAMPLES}, stream=True, **wishes)
    responses = stream_grpc(server, inputs, model)
    ids: list[list[int]] = [[] for _ in range(NUM_SAMPLES)]
    texts = [""] * NUM_SAMPLES
    for response in responses:
        assert len(response.outputs["text_output"]) == NUM_SAMPLES
        assert sum(response.outputs["num_output_tokens"]) >= 1
        for sample, new in enumerate(split(response.outputs)):
            ids[sample] += new
            texts[sample] += response.outputs["text_output"][sample]
    assert ids == [one.outputs["output_ids"] for one in alone]
    assert texts == [one.one("text_output") for one in alone]
    assert responses[-1].outputs["finish_reason"] == ["length"] * NUM_SAMPLES


def test_http_gives_lists(server: TritonServer, alone: list[Response]) -> None:
    body = {"input_ids": PROMPT, **SAMPLING, "n": NUM_SAMPLES, "exclude_input_in_output": True}
    reply = generate(server, body).json()
    assert reply["text_output"] == [one.one("text_output") for one in alone]
    body = {"input_ids": PROMPT, **SAMPLING, "n": NUM_SAMPLES, "stream": True}
    events = generate_stream(server, body)
    texts = ["".join(parts) for parts in zip(*(e["text_output"] for e in events), strict=True)]
    assert texts == [one.one("text_output") for one in alone]


def test_the_best_come_first_and_are_not_streamed(server: TritonServer) -> None:
    best = SAMPLING | {"n": 2, "best_of": 4}
    wishes = WISHES | {"return_cumulative_logprob": True}
    every = infer_grpc(server, request_inputs(PROMPT, SAMPLING | {"n": 4}, **wishes))
    answer = infer_grpc(server, request_inputs(PROMPT, best, **wishes))
    ranked = sorted(
        zip(every.outputs["cumulative_logprob"], split(every.outputs), strict=True), reverse=True
    )
    assert split(answer.outputs) == [ids for _, ids in ranked[:2]]
    assert answer.outputs["cumulative_logprob"] == [score for score, _ in ranked[:2]]
    inputs = request_inputs(PROMPT, best, stream=True)
    error = error_of(lambda: stream_grpc(server, inputs, "scheduler"))
    assert "best_of = 4 with n = 2 cannot be streamed" in str(error)


@pytest.mark.parametrize(
    ("sampling", "says"),
    [
        ({"n": 129}, "n must be from 1 to 128, but is 129"),
        ({"n": 3, "best_of": 2}, "best_of must be from 3 to 128, but is 2"),
        ({"use_beam_search": True}, "use_beam_search = true is for beam search"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(
    server: TritonServer, sampling: dict[str, Any], says: str
) -> None:
    inputs = request_inputs(PROMPT, sampling)
    assert says.lower() in str(error_of(lambda: infer_grpc(server, inputs))).lower()


@pytest.mark.parametrize("model", ["scheduler", "llm"])
def test_whoever_cancels_ends_all_samples(server: TritonServer, model: str) -> None:
    wait_idle(server)
    sampling = {"n": NUM_SAMPLES, "max_tokens": ENDLESS, "ignore_eos": True}
    inputs = request_inputs(PROMPT, sampling, stream=True)
    with GrpcStream(server, model) as stream:
        stream.send(inputs, request_id="samples").next()
        wait_running(server, NUM_SAMPLES)
        infer_grpc(server, {"cancel": True}, request_id="samples")
        assert "cancelled" in str(error_of(lambda: list(stream)))
    wait_idle(server)


def test_whoever_leaves_leaves_nothing_of_any_sample_behind(server: TritonServer) -> None:
    wait_idle(server)
    body = {"input_ids": PROMPT, "n": NUM_SAMPLES, "max_tokens": ENDLESS, "ignore_eos": True}
    url = generate_url(server, "scheduler", stream=True)
    with httpx.stream("POST", url, json=body | {"stream": True}) as reply:
        events = EventSource(reply).iter_sse()  # whoever drops it hangs up
        next(events)
        wait_running(server, NUM_SAMPLES)
    wait_idle(server)


def reasons_of(response: Response) -> list[str]:
    return list(response.outputs["finish_reason"])


def follow(stream: GrpcStream, reasons: list[str], ids: list[list[int]]) -> Response:
    """Take responses until the samples stand so; their tokens are added to `ids`."""
    while True:
        response = stream.next()
        for sample, new in enumerate(split(response.outputs)):
            ids[sample] += new
        if reasons_of(response) == reasons:
            return response
        assert not response.is_final, response


@pytest.mark.parametrize("model", ["scheduler", "llm"])
def test_a_sample_is_cancelled_alone(server: TritonServer, model: str) -> None:
    wait_idle(server)
    sampling = {"max_tokens": ENDLESS, "ignore_eos": True, "seed": SEED}
    wishes = {name: True for name in WISHES if name != "exclude_input_in_output"}
    inputs = request_inputs(PROMPT, sampling | {"n": NUM_SAMPLES}, stream=True, **wishes)
    ids: list[list[int]] = [[] for _ in range(NUM_SAMPLES)]
    with GrpcStream(server, model) as stream:
        stream.send(inputs, request_id="alone")
        wait_running(server, NUM_SAMPLES)
        cancel = {"cancel": True, "cancel_samples": [1]}
        stream_grpc(server, cancel, model, request_id="alone")
        follow(stream, ["None", "cancelled", "None"], ids)
        wait_running(server, NUM_SAMPLES - 1)
        num_then = len(ids[1])
        while min(len(ids[0]), len(ids[2])) < num_then + 40:
            follow(stream, ["None", "cancelled", "None"], ids)
        infer_grpc(server, {"cancel": True, "cancel_samples": [2, 0]}, request_id="alone")
        last = follow(stream, ["cancelled"] * NUM_SAMPLES, ids)
        while not last.is_final:  # two samples end, perhaps in two responses
            last = follow(stream, ["cancelled"] * NUM_SAMPLES, ids)
    assert len(ids[1]) == num_then
    assert "timing" in last.outputs
    wait_idle(server)
    for index, given in enumerate(ids):
        some = given[:200]
        alone = sampling | {"seed": SEED + index, "max_tokens": max(len(some), 1)}
        expected = infer_grpc(server, request_inputs(PROMPT, alone, return_token_ids=True))
        assert some == expected.outputs["output_ids"][: len(some)]


def test_samples_are_cancelled_over_http(server: TritonServer) -> None:
    wait_idle(server)
    body = {"id": "http", "input_ids": PROMPT, "n": NUM_SAMPLES, "max_tokens": ENDLESS}
    body |= {"ignore_eos": True, "return_finish_reason": True}
    cancel = {"id": "http", "cancel": True}
    with ThreadPoolExecutor(1) as pool:
        whole = pool.submit(generate, server, body, "generate")
        wait_running(server, NUM_SAMPLES)
        assert generate(server, cancel | {"cancel_samples": 2}).status_code == 200
        wait_running(server, NUM_SAMPLES - 1)
        assert not whole.done()
        generate(server, cancel | {"cancel_samples": [0, 1]}, "llm")
        reply = whole.result().json()
    assert reply["finish_reason"] == ["cancelled"] * NUM_SAMPLES
    assert len(reply["text_output"]) == NUM_SAMPLES
    url = generate_url(server, "llm", stream=True)
    with httpx.stream("POST", url, json=body | {"stream": True}, timeout=ANSWER_TIMEOUT_S) as reply:
        reasons: list[str] = []
        for event in EventSource(reply).iter_sse():
            before, reasons = reasons, event.json()["finish_reason"]
            if not before:
                generate(server, cancel | {"cancel_samples": 1}, "generate")
            if before != reasons == ["None", "cancelled", "None"]:
                wait_running(server, NUM_SAMPLES - 1)
                generate(server, cancel | {"cancel_samples": [0, 2]})
    assert reasons == ["cancelled"] * NUM_SAMPLES
    wait_idle(server)


def test_who_guesses_wrongly_cancels_nothing_and_learns_nothing(server: TritonServer) -> None:
    wait_idle(server)
    sampling = {"n": NUM_SAMPLES, "max_tokens": ENDLESS, "ignore_eos": True, "tenant": "a"}
    inputs = request_inputs(PROMPT, sampling, stream=True, return_finish_reason=True)

    def cancel(request_id: str, samples: list[int], tenant: str) -> dict[str, Any]:
        tensors = {"cancel": True, "cancel_samples": samples}
        tensors["sampling_parameters"] = {"tenant": tenant}
        return dict(infer_grpc(server, tensors, request_id=request_id).outputs)

    with GrpcStream(server) as stream:
        stream.send(inputs, request_id="own").next()
        answers = [
            cancel("other", [0], "a"),
            cancel("own", [0], ""),
            cancel("own", [0], "b"),
            cancel("own", [NUM_SAMPLES, 127], "a"),
            cancel("own", [1], "a"),
            cancel("own", [1], "a"),
        ]
        assert answers == [{"text_output": [""]}] * len(answers)
        ended = next(one for one in stream if "cancelled" in reasons_of(one))
        assert reasons_of(ended) == ["None", "cancelled", "None"]
        wait_running(server, NUM_SAMPLES - 1)
        error = error_of(lambda: cancel("own", [0, 128], "a"))
        assert "cancel_samples must be indexes from 0 to 127, but has 128" in str(error)
        cancel("own", [0, 2], "a")
        assert reasons_of(list(stream)[-1]) == ["cancelled"] * NUM_SAMPLES
    wait_idle(server)
