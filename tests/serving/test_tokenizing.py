"""Long prompts are tokenized beside everything else, and each request among them ends once."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from charonia.errors import (
    CharoniaError,
    InvalidRequestError,
    QueueFullError,
    RequestCancelledError,
    RequestTimeoutError,
    ShuttingDownError,
)
from charonia.serving.requests.queue_limit import QueueLimit
from charonia.serving.requests.tokenizing import Prompt, Tokenizing
from support.waiting import WAIT_S, eventually

MAX_COUNT, MAX_BYTES = 4, 100
Outcome = list[int] | CharoniaError


class Bench:
    """One thread that tokenizes, and what became of each prompt."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.queue_limit = QueueLimit(MAX_COUNT, MAX_BYTES)
        self.tokenizing = Tokenizing(1, self.queue_limit, log=self.log.append)
        self.outcomes: list[tuple[str, Outcome]] = []
        self.prompts: dict[str, Prompt[list[int]]] = {}
        self.may_go_on = threading.Event()

    def submit(
        self,
        key: str,
        encode: Callable[[], list[int]] = lambda: [1],
        *,
        num_bytes: int = 10,
        expires_in_s: float | None = None,
    ) -> None:
        prompt = self.prompts[key] = Prompt(
            encode=encode,
            num_bytes=num_bytes,
            expires_at=None if expires_in_s is None else time.monotonic() + expires_in_s,
            done=lambda outcome: self.outcomes.append((key, outcome)),
        )
        self.tokenizing.submit(prompt)

    def cancel(self, key: str) -> bool:
        return self.tokenizing.cancel(self.prompts[key])

    def slow(self) -> list[int]:
        assert self.may_go_on.wait(WAIT_S)
        return [2]

    def block(self) -> None:
        """Have the thread busy with a prompt `slow`."""
        self.submit("slow", self.slow)
        eventually(lambda: not self.tokenizing._queue)

    def outcome(self, key: str) -> Outcome:
        eventually(lambda: any(name == key for name, _ in self.outcomes))
        (found,) = [outcome for name, outcome in self.outcomes if name == key]
        return found


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.may_go_on.set()
    made.tokenizing.close()
    assert made.queue_limit.held == (0, 0)


def test_prompts_become_ids_and_hold_nothing_afterwards(bench: Bench) -> None:
    for key in "abc":
        bench.submit(key)
    assert [bench.outcome(key) for key in "abc"] == [[1]] * 3
    eventually(lambda: bench.queue_limit.held == (0, 0))


def test_what_an_encoder_raises_is_its_requests_error(bench: Bench) -> None:
    def refuse() -> list[int]:
        raise InvalidRequestError("too long")

    def fail() -> list[int]:
        raise OSError("at /usr/lib/x.py")

    bench.submit("refused", refuse)
    bench.submit("failed", fail)
    bench.submit("fine")
    assert str(bench.outcome("refused")) == "too long"
    assert str(bench.outcome("failed")) == "internal error; the server's log has the details"
    assert bench.outcome("fine") == [1]
    assert bench.log[0].startswith("prompt_not_tokenized level=error ")
    assert "OSError" in bench.log[0]


def test_what_is_over_the_limits_is_refused_at_once(bench: Bench) -> None:
    bench.block()
    bench.submit("large", num_bytes=90)
    with pytest.raises(QueueFullError, match=r"Exceeds maximum.*Maximum queue size of 100 bytes"):
        bench.submit("more", num_bytes=1)
    bench.submit("nothing", num_bytes=0)
    bench.submit("nothing either", num_bytes=0)
    with pytest.raises(QueueFullError, match="Maximum queue size of 4 requests"):
        bench.submit("one too many", num_bytes=0)
    assert not bench.outcomes
    bench.may_go_on.set()
    assert bench.outcome("nothing either") == [1]
    eventually(lambda: bench.queue_limit.held == (0, 0))
    bench.submit("very large", num_bytes=10 * MAX_BYTES)  # alone it may have more
    assert bench.outcome("very large") == [1]


def test_a_request_can_be_cancelled_while_it_waits_and_while_it_is_tokenized(bench: Bench) -> None:
    bench.block()
    bench.submit("waiting")
    assert bench.cancel("waiting")
    assert isinstance(bench.outcome("waiting"), RequestCancelledError)
    assert bench.queue_limit.held == (1, 10)
    assert bench.cancel("slow")
    assert isinstance(bench.outcome("slow"), RequestCancelledError)
    assert not bench.cancel("slow")
    bench.may_go_on.set()
    eventually(lambda: bench.queue_limit.held == (0, 0))
    assert len(bench.outcomes) == 2


def test_time_is_over_while_a_prompt_waits_and_while_it_is_tokenized(bench: Bench) -> None:
    bench.submit("slow", bench.slow, expires_in_s=0.05)
    bench.submit("waiting", expires_in_s=0.05)
    bench.submit("patient")
    for key in ("slow", "waiting"):
        outcome = bench.outcome(key)
        assert isinstance(outcome, RequestTimeoutError)
        assert str(outcome) == "Request timeout expired"
    bench.may_go_on.set()
    assert bench.outcome("patient") == [1]


def test_whoever_finds_a_request_gone_finds_it_where_it_was_brought(bench: Bench) -> None:
    arrived = threading.Event()
    is_there = threading.Event()

    def done(outcome: Outcome) -> None:
        arrived.set()
        time.sleep(0.05)
        is_there.set()

    prompt: Prompt[list[int]] = Prompt(lambda: [1], 1, None, done)
    bench.tokenizing.submit(prompt)
    assert arrived.wait(WAIT_S)
    assert not bench.tokenizing.cancel(prompt)
    assert is_there.is_set()


def test_a_request_counts_until_it_is_answered(bench: Bench) -> None:
    counts: list[int] = []

    def submit(encode: Callable[[], list[int]]) -> Prompt[list[int]]:
        def done(outcome: Outcome) -> None:
            counts.append(bench.queue_limit.held[0])

        prompt = Prompt(encode, 1, None, done)
        bench.tokenizing.submit(prompt)
        return prompt

    submit(bench.slow)
    eventually(lambda: not bench.tokenizing._queue)
    bench.tokenizing.cancel(submit(lambda: [1]))
    assert (counts, bench.queue_limit.held[0]) == ([2], 1)
    bench.may_go_on.set()
    eventually(lambda: bench.queue_limit.held[0] == 0)
    assert counts == [2, 1]


def test_closing_answers_all_that_wait_and_takes_no_more() -> None:
    bench = Bench()
    bench.block()
    bench.submit("waiting")
    bench.tokenizing.close()
    assert isinstance(bench.outcome("waiting"), ShuttingDownError)
    assert isinstance(bench.outcome("slow"), ShuttingDownError)
    assert bench.queue_limit.held == (1, 10)  # nobody waited for the one that is being tokenized
    with pytest.raises(ShuttingDownError):
        bench.submit("late")
    bench.may_go_on.set()
    eventually(lambda: bench.queue_limit.held == (0, 0))
    assert len(bench.outcomes) == 2
