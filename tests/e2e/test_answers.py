"""Answers that were given before, on the real server: through every way in, and never too far."""

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from charonia.errors import LaunchError
from charonia.launch.commands.cli import main
from charonia.launch.server.run import running_server
from charonia.launch.server.tritonserver import TritonServer
from support.e2e import (
    ENDLESS,
    ENDLESS_BLOCKS,
    MAX_MODEL_LEN,
    ONE_THREAD,
    Response,
    generate,
    generate_stream,
    ids_of,
    infer_grpc,
    infer_http,
    one_torch_thread,
    request_inputs,
    scrape,
    stream_grpc,
    text_of,
    wait_for,
    wait_idle,
)
from support.embedding import make_bert
from support.live_stream import LiveStream
from support.long import long

GENERATED = "charonia_generation_tokens_total"
WISHES = {"return_timing": True, "return_token_ids": True, "return_finish_reason": True}
NUM_TOKENS = 40
PROMPTS = count(1000)
"""A new one for each test: [n, n, n]."""


@pytest.fixture(scope="module")
def shared_server(endless_checkpoint: Path) -> Iterator[TritonServer]:
    """It keeps answers, and has TensorRT-LLM's models."""
    settings = (
        ONE_THREAD,
        ENDLESS_BLOCKS,
        "max_num_seqs=16",
        f"scheduler.answer_cache_bytes={2**20}",
    )
    with (
        one_torch_thread(),
        running_server(
            model=endless_checkpoint, settings=settings, facades=("tensorrt-llm",)
        ) as server,
    ):
        yield server


@pytest.fixture(scope="module")
def embedding_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def similar_server(small_checkpoint: Path, embedding_model: Path) -> Iterator[TritonServer]:
    """Texts of one language are all alike to a random model, but not quite."""
    settings = (
        ONE_THREAD,
        "num_gpu_blocks_override=256",
        f"scheduler.answer_cache_bytes={2**20}",
        "scheduler.semantic_cache_threshold=0.3",
        f"scheduler.semantic_cache_model={embedding_model}",
    )
    with one_torch_thread(), running_server(model=small_checkpoint, settings=settings) as server:
        yield server


@pytest.fixture
def prompt() -> list[int]:
    number = next(PROMPTS)
    return [number // 200, number % 200, 7, 9]


def sampling(**values: Any) -> dict[str, Any]:
    return {"max_tokens": NUM_TOKENS, "ignore_eos": True, "seed": 5} | values


def cached(timing: str) -> Any:
    return json.loads(timing).get("cached")


def ask(server: TritonServer, prompt: list[int], **values: Any) -> Response:
    """A whole answer of `scheduler`."""
    inputs = request_inputs(prompt, sampling(**values), exclude_input_in_output=True, **WISHES)
    (response,) = stream_grpc(server, inputs)
    return response


def num_generated(server: TritonServer) -> float:
    return wait_idle(server)[GENERATED]


def check_same(outputs: Mapping[str, Any], first: Response) -> None:
    """An answer of HTTP's `generate`, of which one sample's text is no list."""
    assert outputs["text_output"] == first.text
    assert outputs["output_ids"] == first.outputs["output_ids"]
    assert cached(outputs["timing"]) == "exact"


def test_an_equal_request_gets_the_answer_through_every_way_in(
    shared_server: TritonServer, prompt: list[int]
) -> None:
    first = ask(shared_server, prompt)
    assert cached(first.one("timing")) is None
    before = num_generated(shared_server)
    whole = request_inputs(prompt, sampling(), exclude_input_in_output=True, **WISHES)
    streamed = request_inputs(prompt, sampling(), stream=True, **WISHES)
    for model in ("scheduler", "llm"):
        for inputs in (whole, streamed):
            responses = stream_grpc(shared_server, inputs, model)
            assert text_of(responses) == first.text
            assert ids_of(responses) == first.outputs["output_ids"]
            assert responses[-1].one("finish_reason") == "length"
            assert cached(responses[-1].one("timing")) == "exact"
    for infer in (infer_grpc, infer_http):
        answer = infer(shared_server, whole)
        assert answer.text == first.text
        assert cached(answer.one("timing")) == "exact"
    body = {"input_ids": prompt, **sampling(), "exclude_input_in_output": True, **WISHES}
    for model in ("scheduler", "generate", "llm"):
        check_same(generate(shared_server, body, model).json(), first)
    events = generate_stream(shared_server, body | {"stream": True, **WISHES}, "scheduler")
    assert "".join(event["text_output"] for event in events) == first.text
    facade = {
        "input_ids": prompt,
        "input_lengths": len(prompt),
        "request_output_len": NUM_TOKENS,
        "random_seed": 5,
    }
    assert num_generated(shared_server) == before
    replies = [generate(shared_server, facade, "tensorrt_llm").json() for _ in range(2)]
    assert replies[0]["output_ids"] == replies[1]["output_ids"]
    assert num_generated(shared_server) == before + NUM_TOKENS


def test_the_texts_way_in_does_not_matter(shared_server: TritonServer) -> None:
    greedy = {"max_tokens": 12, "ignore_eos": True, "temperature": 0}
    body = {"text_input": "Once more", **greedy, **WISHES, "exclude_input_in_output": True}
    replies = [generate(shared_server, body, model).json() for model in ("llm", "scheduler")]
    assert replies[0]["text_output"] == replies[1]["text_output"]
    assert [cached(reply["timing"]) for reply in replies] == [None, "exact"]
    echoed = generate(shared_server, body | {"exclude_input_in_output": False}).json()
    assert echoed["text_output"] == "Once more" + replies[0]["text_output"]


def test_no_other_tenant_or_salt_gets_it(shared_server: TritonServer, prompt: list[int]) -> None:
    wishes: list[dict[str, Any]] = [
        {},
        {"tenant": "a"},
        {"tenant": "b"},
        {"tenant": "a", "cache_salt": "s"},
        {"cache_salt": "a"},
    ]
    before = num_generated(shared_server)
    answers = [ask(shared_server, prompt, **wish) for wish in wishes]
    assert num_generated(shared_server) == before + len(wishes) * NUM_TOKENS
    assert len({answer.text for answer in answers}) == 1
    assert {cached(answer.one("timing")) for answer in answers} == {None}
    for wish in wishes:
        assert cached(ask(shared_server, prompt, **wish).one("timing")) == "exact"


def test_a_request_may_do_without(shared_server: TritonServer, prompt: list[int]) -> None:
    first = ask(shared_server, prompt)
    before = num_generated(shared_server)
    again = ask(shared_server, prompt, use_answer_cache=False)
    assert again.text == first.text
    assert cached(again.one("timing")) is None
    assert num_generated(shared_server) == before + NUM_TOKENS
    wrong = generate(shared_server, {"input_ids": prompt, "use_answer_cache": "maybe"})
    assert "use_answer_cache must be true or false, but is" in wrong.json()["error"]


def test_equal_requests_at_once_are_computed_once(
    shared_server: TritonServer, prompt: list[int]
) -> None:
    """Whether one joins or comes when the answer is there: it is computed once."""
    before = wait_idle(shared_server)
    num_tokens, num_clients = 400, 12

    def one(index: int) -> tuple[list[int], Any]:
        inputs = request_inputs(
            prompt, sampling(max_tokens=num_tokens), stream=index % 2 == 0, **WISHES
        )
        responses = stream_grpc(shared_server, inputs, "llm" if index % 3 else "scheduler")
        return ids_of(responses), cached(responses[-1].one("timing"))

    with ThreadPoolExecutor(num_clients) as pool:
        answers = list(pool.map(one, range(num_clients)))
    after = wait_idle(shared_server)
    assert after[GENERATED] == before[GENERATED] + num_tokens
    assert len({tuple(ids) for ids, _ in answers}) == 1
    assert len(answers[0][0]) == num_tokens
    assert [kind for _, kind in answers].count(None) == 1
    finished = 'charonia_finished_total{reason="length"}'
    assert after[finished] == before[finished] + num_clients


def test_who_came_first_may_leave(shared_server: TritonServer, prompt: list[int]) -> None:
    url = shared_server.grpc_url
    endless = sampling(max_tokens=ENDLESS)
    first = LiveStream(url, prompt, **endless)
    first.wait_tokens(1)
    second = LiveStream(url, prompt, **endless)
    second.wait_tokens(len(first.token_ids))
    first.leave()
    running = 'charonia_answer_cache_hits_total{kind="joined"}'
    assert scrape(shared_server)[running] >= 1
    second.wait_tokens(len(second.token_ids) + 50)
    third = LiveStream(url, prompt, **endless)
    third.wait_tokens(len(second.token_ids))
    second.leave()
    third.wait_tokens(len(third.token_ids) + 50)
    together = min(len(second.token_ids), len(third.token_ids))
    assert second.token_ids[:together] == third.token_ids[:together]
    assert scrape(shared_server)["charonia_requests_running"] == 1
    third.leave()
    wait_idle(shared_server)


def test_answers_outlive_the_engine(shared_server: TritonServer, prompt: list[int]) -> None:
    first = ask(shared_server, prompt)
    restarts = "charonia_engine_restarts_total"
    before = wait_idle(shared_server)
    (pid,) = shared_server.pids("engine")
    running = LiveStream(shared_server.grpc_url, prompt, **sampling(max_tokens=ENDLESS))
    joined = LiveStream(shared_server.grpc_url, prompt, **sampling(max_tokens=ENDLESS))
    for stream in (running, joined):
        stream.wait_tokens(5)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: scrape(shared_server)[restarts], lambda num: num == before[restarts] + 1)
    for stream in (running, joined):
        stream.wait_tokens(len(stream.token_ids) + 20)
        stream.leave()
    after = wait_idle(shared_server)
    together = min(len(running.token_ids), len(joined.token_ids))
    assert running.token_ids[:together] == joined.token_ids[:together]
    again = ask(shared_server, prompt)
    assert cached(again.one("timing")) == "exact"
    assert again.outputs["output_ids"] == first.outputs["output_ids"]
    assert num_generated(shared_server) == after[GENERATED]


def test_the_page_says_how_much_is_kept(shared_server: TritonServer, prompt: list[int]) -> None:
    before = wait_idle(shared_server)
    ask(shared_server, prompt)
    answers, kept = "charonia_answer_cache_answers", "charonia_answer_cache_bytes"
    after = wait_for(
        lambda: scrape(shared_server), lambda page: page[answers] == before[answers] + 1
    )
    assert before[kept] < after[kept] <= 2**20
    misses = "charonia_answer_cache_misses_total"
    assert after[misses] == before[misses] + 1


def reload_model(server: TritonServer, path: Path) -> None:
    assert main(["reload", "--url", server.grpc_url, "--model", str(path)]) == 0


@long
def test_another_model_answers_itself_be_it_at_the_same_place(
    shared_server: TritonServer,
    checkpoint: Callable[..., Path],
    endless_checkpoint: Path,
    tmp_path: Path,
    prompt: list[int],
) -> None:
    """The answers of the one before are out of reach, until it serves again."""
    other = checkpoint("LlamaForCausalLM", max_position_embeddings=MAX_MODEL_LEN, seed=1)
    place = tmp_path / "model"
    answers = []
    try:
        for source in (endless_checkpoint, other, endless_checkpoint):
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(source, place)
            reload_model(shared_server, place)
            answers.append(ask(shared_server, prompt))
            again = ask(shared_server, prompt)
            assert cached(again.one("timing")) == "exact"
            assert again.outputs["output_ids"] == answers[-1].outputs["output_ids"]
    finally:
        reload_model(shared_server, endless_checkpoint)
    kinds = [cached(answer.one("timing")) for answer in answers]
    assert kinds == [None, None, "exact"]
    ids = [answer.outputs["output_ids"] for answer in answers]
    assert ids[0] == ids[2] != ids[1]


# ---------------------------------------------------------------------- similar prompts


def ask_text(server: TritonServer, text: str, model: str, **values: Any) -> dict[str, Any]:
    """A whole answer to a text, with its timing as an object."""
    body = {"text_input": text, **sampling(**values), "exclude_input_in_output": True, **WISHES}
    reply: dict[str, Any] = generate(server, body, model).json()
    return reply | {"timing": json.loads(reply["timing"])}


def test_a_similar_prompt_gets_the_answer_and_is_told(similar_server: TritonServer) -> None:
    """Through every way in; never of another tenant, nor with other parameters."""
    first = ask_text(similar_server, "the cat sat on the mat", "scheduler")
    assert "cached" not in first["timing"]
    before = num_generated(similar_server)
    texts = ("a cat sat on the mat", "the cat sat on a mat", "the big cat sat on the mat")
    for text, model in zip(texts, ("scheduler", "llm", "generate"), strict=True):
        answer = ask_text(similar_server, text, model)
        assert answer["timing"]["cached"] == "semantic"
        assert 0.3 <= answer["timing"]["similarity"] < 1.0
        assert answer["output_ids"] == first["output_ids"]
        assert answer["text_output"] == first["text_output"]
    assert num_generated(similar_server) == before
    others: list[dict[str, Any]] = [
        {"tenant": "a"},
        {"cache_salt": "s"},
        {"seed": 6},
        {"use_answer_cache": False},
    ]
    for other in others:
        answer = ask_text(similar_server, texts[0], "scheduler", **other)
        assert "cached" not in answer["timing"], other
        assert answer["output_ids"] != first["output_ids"], other
    assert num_generated(similar_server) == before + len(others) * NUM_TOKENS
    hits = 'charonia_answer_cache_hits_total{kind="semantic"}'
    assert scrape(similar_server)[hits] == len(texts)


def test_a_prompt_that_the_embedding_model_does_not_read_whole_is_computed(
    similar_server: TritonServer,
) -> None:
    long = "the dog " * 20
    for end in ("ran", "sat"):
        assert "cached" not in ask_text(similar_server, long + end, "scheduler")["timing"]
    assert ask_text(similar_server, long + "sat", "llm")["timing"]["cached"] == "exact"


@long
def test_an_embedding_model_that_cannot_be_had_fails_the_start_and_is_named(
    small_checkpoint: Path, tmp_path: Path
) -> None:
    make_bert(tmp_path / "other", model_type="mpnet")
    settings = (
        ONE_THREAD,
        f"scheduler.answer_cache_bytes={2**20}",
        "scheduler.semantic_cache_threshold=0.9",
        f"scheduler.semantic_cache_model={tmp_path / 'other'}",
    )
    with (
        pytest.raises(LaunchError, match=r"model_type must be bert, but is 'mpnet'"),
        running_server(model=small_checkpoint, settings=settings),
    ):
        raise AssertionError("it must not start")
