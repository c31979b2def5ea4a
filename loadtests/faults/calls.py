"""Requests of clients, and the outcome of each call.

Owns the requests and how an answer is judged by itself. Must not know faults: whether an error was
to be expected is decided elsewhere.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from faults.recovery import Arrival
from support.live_stream import LiveStream, Protocol

WAYS_IN: Sequence[tuple[Protocol, str]] = (
    ("grpc", "scheduler"),
    ("grpc", "llm"),
    ("http", "scheduler"),
    ("unary", "generate"),
)
PROMPT_TOKENS = (1, 2, 5, 15, 16, 17, 33, 60, 100)
NEW_TOKENS = (250, 500)
FEW_NEW_TOKENS = (20, 60)
"""Range of new tokens of some requests, fewest and most. These are every other request to `llm`, so
that the tokenizer is busy, and unary ones, of which a client sees nothing before the end."""
_CLIENT_TIMEOUT_S = 3600.0  # the campaign decides what hangs, not the client


@dataclass(frozen=True)
class Request:
    """Content of a request, and its way in: the protocol and the model."""

    prompt_ids: Sequence[int]
    protocol: Protocol
    model: str
    sampling: dict[str, Any]


def make_requests(count: int, first_id: int, last_id: int, seed: int) -> list[Request]:
    """Requests that take turns in length and way in; half are greedy, half sample with a seed.

    Args:
        first_id, last_id: of the tokens that prompts are made of.
    """
    draw = random.Random(seed)
    requests = []
    for index in range(count):
        # Turns by twos, so that every way in has greedy and sampled requests.
        turn = index // 2
        protocol, model = WAYS_IN[turn % len(WAYS_IN)]
        is_short = model == "generate" or (model == "llm" and turn // len(WAYS_IN) % 2 == 0)
        length = PROMPT_TOKENS[index % len(PROMPT_TOKENS)]
        sampling = {
            "max_tokens": draw.randint(*(FEW_NEW_TOKENS if is_short else NEW_TOKENS)),
            "ignore_eos": True,
            "temperature": 0.8 * (index % 2),
            "seed": index,
        }
        prompt_ids = [draw.randint(first_id, last_id) for _ in range(length)]
        requests.append(Request(prompt_ids, protocol, model, sampling))
    return requests


@dataclass(frozen=True)
class Answer:
    """End of a call; times are `time.monotonic`.

    Attributes:
        who: name of the caller. entry: the model that was called.
        restarts: of the engine, that it outlived.
        error: message to the client, or the fault in the sequence of its responses.
        equals: its tokens, as many as came, are those of the undisturbed run.
    """

    who: str
    entry: str
    ended_at: float
    num_tokens: int
    restarts: int
    error: str | None
    equals: bool


class Call:
    """A request under way; it is sent when this is made.

    Args:
        who: calls. urls: by protocol.
        undisturbed: the tokens of the request when nothing happens.
    """

    def __init__(
        self, who: str, request: Request, urls: dict[str, str], undisturbed: Sequence[int]
    ) -> None:
        self._who = who
        self._request = request
        self._undisturbed = undisturbed
        self._stream = LiveStream(
            urls[request.protocol],
            request.prompt_ids,
            protocol=request.protocol,
            model=request.model,
            timeout=_CLIENT_TIMEOUT_S,
            **request.sampling,
        )

    @property
    def is_over(self) -> bool:
        """True if it has been answered."""
        return self._stream.is_over

    @property
    def ended_at(self) -> float | None:
        """Time of the end of its answer; None before."""
        return self._stream.ended_at

    @property
    def token_ids(self) -> list[int]:
        """Token ids that have come so far."""
        return self._stream.token_ids

    def arrivals(self) -> Iterator[Arrival]:
        """Responses with tokens."""
        before = 0
        for came_at, total in list(self._stream.arrivals):
            yield came_at, total - before
            before = total

    def answer(self) -> Answer:
        """Describe the end of a call that is over."""
        stream = self._stream
        error = stream.error
        if error is None and stream.finish_reason != "length":
            error = f"ended for the reason {stream.finish_reason}"
        if error is None and stream.num_empty:
            error = f"{stream.num_empty} responses without a token"
        num_tokens = len(stream.token_ids)
        assert stream.ended_at is not None
        return Answer(
            self._who,
            self._request.model,
            stream.ended_at,
            num_tokens,
            int(stream.timing.get("restarts", 0)),
            error,
            stream.token_ids == self._undisturbed[: num_tokens if error else None],
        )
