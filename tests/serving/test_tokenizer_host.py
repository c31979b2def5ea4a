"""The `tokenizer` model answers with ids, within the limits of the engine that there is now."""

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from charonia.events import parse_event
from charonia.serving.hosts.tokenizer import TokenizerHost
from charonia.serving.requests.queue_limit import QueueLimit
from charonia.serving.requests.tokenizing import INLINE_CHARACTERS
from support.checkpoints import make_tokenizer
from support.pb_utils import PbUtils, Sender, request_of
from support.waiting import WAIT_S

MANY = 2 * INLINE_CHARACTERS


class Bench:
    """A host, the model.json that it reads, and its answers."""

    def __init__(self, pb_utils: PbUtils, directory: Path) -> None:
        self._model_file = directory / "model.json"
        make_tokenizer().save(str(directory / "tokenizer.json"))
        self.queue_limit = QueueLimit(8, 10**6)
        self.configure(8)
        self.log: list[str] = []
        self.host = TokenizerHost(pb_utils, self._model_file, self.queue_limit, log=self.log.append)

    def configure(self, max_model_len: int) -> None:
        """As an engine is loaded that takes so many tokens."""
        values = {"model": str(self._model_file.parent), "max_model_len": max_model_len}
        self._model_file.write_text(json.dumps(values), encoding="utf-8")

    def send(self, timeout_us: int = 0, **arrays: Any) -> Sender:
        """Hand a request in; where its answer comes."""
        request = request_of(**arrays)
        request.timeout_us = timeout_us
        self.host.execute([request])
        return request.sender

    def hold_up(self) -> threading.Event:
        """Have long prompts wait for an event."""
        may_go_on = threading.Event()
        encode = self.host._tokenizer.encode

        def wait(text: str, **options: Any) -> list[int]:
            assert may_go_on.wait(WAIT_S)
            return encode(text, **options)

        self.host._tokenizer.encode = wait  # type: ignore[assignment]
        return may_go_on

    def ask(self, **arrays: Any) -> int | str:
        """How many ids a prompt has, or why there are none."""
        return answer_of(self.send(**arrays))


def answer_of(sender: Sender) -> int | str:
    response = sender.sent.get(timeout=WAIT_S)
    if response.has_error():
        return str(response.error().message())
    outputs = {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}
    return int(outputs["input_ids"].size)


@pytest.fixture
def bench(pb_utils: PbUtils, tmp_path: Path) -> Iterator[Bench]:
    made = Bench(pb_utils, tmp_path)
    yield made
    made.host.finalize()
    assert made.queue_limit.held == (0, 0)


@pytest.mark.parametrize("num", [10, MANY])
@pytest.mark.parametrize("kind", ["text_input", "input_ids"])
def test_a_prompt_may_be_as_long_as_the_engine_takes_now(
    bench: Bench, strings: Callable[..., Any], kind: str, num: int
) -> None:
    values = strings("7" * num) if kind == "text_input" else np.ones(num, dtype=np.int32)
    assert "at most" in str(bench.ask(**{kind: values}))
    bench.configure(num + 1)
    assert bench.ask(**{kind: values}) == num


@pytest.mark.parametrize(
    ("limit", "text"),
    [
        ({"timeout_us": 50_000}, "Request timeout expired"),
        ({"sampling_parameters": '{"deadline_ms": 50}'}, "deadline_ms has passed"),
    ],
)
def test_the_time_of_a_prompt_runs_while_it_waits(
    bench: Bench, strings: Callable[..., Any], limit: dict[str, Any], text: str
) -> None:
    if "sampling_parameters" in limit:
        limit = {name: strings(value) for name, value in limit.items()}
    bench.configure(2 * MANY)
    may_go_on = bench.hold_up()
    late = bench.send(text_input=strings("7" * MANY), **limit)
    patient = bench.send(text_input=strings("7" * MANY))
    assert text in str(answer_of(late))
    ((name, fields),) = filter(None, map(parse_event, bench.log))
    assert (name, fields["outcome"], fields["reason"]) == ("request_ended", "timeout", text)
    may_go_on.set()
    assert answer_of(patient) == MANY
