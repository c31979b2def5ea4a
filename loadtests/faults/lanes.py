"""The streams that run while things break: each lane repeats one request without an end.

Owns the requests, what came of each, and when tokens came. Must not know faults.
"""

import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from faults.recovery import Arrival
from support.live_stream import LiveStream

WAYS_IN: Sequence[tuple[Literal["grpc", "http"], str]] = (
    ("grpc", "scheduler"),
    ("grpc", "llm"),
    ("http", "scheduler"),
    ("grpc", "scheduler"),
)
PROMPT_TOKENS = (1, 2, 5, 15, 16, 17, 33, 60, 100)
NEW_TOKENS = (250, 500)
_CLIENT_TIMEOUT_S = 3600.0  # the campaign decides what hangs, not the client
_WAIT_TURN_S = 0.01
_PAUSE_AFTER_ERROR_S = 0.5


@dataclass(frozen=True)
class Request:
    """What one lane asks for, and the way in."""

    prompt_ids: Sequence[int]
    protocol: Literal["grpc", "http"]
    model: str
    sampling: dict[str, Any]

    def send(self, urls: dict[str, str]) -> LiveStream:
        """Send it. Args: urls: by protocol."""
        return LiveStream(
            urls[self.protocol],
            self.prompt_ids,
            protocol=self.protocol,
            model=self.model,
            timeout=_CLIENT_TIMEOUT_S,
            **self.sampling,
        )


def make_requests(count: int, first_id: int, last_id: int, seed: int) -> list[Request]:
    """Requests that take turns in length and way in; half are greedy, half sample with a seed.

    Args:
        first_id, last_id: of the tokens that prompts are made of.
    """
    draw = random.Random(seed)
    requests = []
    for index in range(count):
        length = PROMPT_TOKENS[index % len(PROMPT_TOKENS)]
        # Turns by twos, so that every way in has greedy and sampled requests.
        protocol, model = WAYS_IN[index // 2 % len(WAYS_IN)]
        sampling = {
            "max_tokens": draw.randint(*NEW_TOKENS),
            "ignore_eos": True,
            "temperature": 0.8 * (index % 2),
            "seed": index,
        }
        prompt_ids = [draw.randint(first_id, last_id) for _ in range(length)]
        requests.append(Request(prompt_ids, protocol, model, sampling))
    return requests


@dataclass(frozen=True)
class Answer:
    """How a request ended.

    Attributes:
        ended_at: `time.monotonic`. restarts: of the engine, that it outlived.
        error: what the client was told, or what is wrong with the sequence of its responses.
        equals: its tokens are those of the undisturbed run.
    """

    lane: int
    ended_at: float
    num_tokens: int
    restarts: int
    error: str | None
    equals: bool


class Lane:
    """One request that is sent again as soon as it has been answered, by a thread of its own.

    Args:
        undisturbed: the tokens of the request when nothing happens.

    Attributes:
        answers: of the requests that ended.
    """

    def __init__(
        self, index: int, request: Request, urls: dict[str, str], undisturbed: Sequence[int]
    ) -> None:
        self.index = index
        self.answers: list[Answer] = []
        self._request = request
        self._urls = urls
        self._undisturbed = list(undisturbed)
        self._watched: list[LiveStream] = []
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"lane-{index}", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether the last request has been answered; see `end`."""
        return not self._thread.is_alive()

    @property
    def is_streaming(self) -> bool:
        """Whether a request is under way whose first token has come."""
        return any(stream.token_ids and not stream.is_over for stream in self._watched)

    def watch(self) -> None:
        """Forget arrivals of requests that have ended."""
        del self._watched[:-1]  # in place: the lane's thread appends

    def arrivals(self) -> Iterator[Arrival]:
        """Responses with tokens since `watch`, and those before it of the request under way."""
        for stream in list(self._watched):
            before = 0
            for came_at, total in list(stream.arrivals):
                yield came_at, total - before
                before = total

    def end(self) -> None:
        """Send no more; the request under way goes on to its end."""
        self._is_ending.set()

    def _run(self) -> None:
        while not self._is_ending.is_set():
            stream = self._request.send(self._urls)
            self._watched.append(stream)
            while not stream.is_over:
                time.sleep(_WAIT_TURN_S)
            self.answers.append(self._judge(stream))
            if stream.error is not None:
                self._is_ending.wait(_PAUSE_AFTER_ERROR_S)

    def _judge(self, stream: LiveStream) -> Answer:
        error = stream.error
        if error is None and stream.finish_reason != "length":
            error = f"ended for the reason {stream.finish_reason}"
        if error is None and stream.num_empty:
            error = f"{stream.num_empty} responses without a token"
        assert stream.ended_at is not None
        return Answer(
            self.index,
            stream.ended_at,
            len(stream.token_ids),
            int(stream.timing.get("restarts", 0)),
            error,
            stream.token_ids == self._undisturbed,
        )
