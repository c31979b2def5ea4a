"""Common parts of all workers: JSON lines on stdin and stdout, and the times of tokens.

    driver                                   worker, one per side, in that side's own Python
      │  {"model": …, "dtype": …}  ────────►  loads
      │  ◄──────── {"ready": {"versions": …, "notes": […]}}
      │  {"waves": [[{"prompt": ids, "max_tokens": n}, …], …], "sampling": …}
      │  ───────────────────────────────────►  completes one wave after the other
      │  ◄──────── {"waves": [{"seconds": …, "requests": […]}, …]}
      │  end of input ──────────────────────►  ends

A wave is a number of requests that are handed over at once; the next one begins when the last token
of the one before has come. Seconds are measured here, around the work and nothing else. The
engine's own lines go to stderr, so that stdout carries answers only. Standard library only.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol


class Request(NamedTuple):
    """A prompt, as token ids, and how many tokens are to follow it, whatever they are."""

    prompt: list[int]
    max_tokens: int


class Wave:
    """Times of the tokens of a wave's requests, in seconds since the wave was handed over."""

    def __init__(self, num_requests: int) -> None:
        self._requests: list[dict[str, list[Any]]] = [
            {"arrivals": [], "counts": [], "tokens": []} for _ in range(num_requests)
        ]
        self._started = time.perf_counter()
        self._ended = self._started

    def add(self, index: int, token_ids: Sequence[int]) -> None:
        """These tokens of that request were seen now."""
        self._ended = time.perf_counter()
        request = self._requests[index]
        request["arrivals"].append(self._ended - self._started)
        request["counts"].append(len(token_ids))
        request["tokens"].extend(token_ids)

    def as_answer(self) -> dict[str, Any]:
        """Return the answer of the protocol."""
        return {"seconds": self._ended - self._started, "requests": self._requests}


class Engine(Protocol):
    """One way to have prompts completed."""

    versions: dict[str, str]
    notes: list[str]

    def complete(self, wave: Wave, requests: list[Request], sampling: dict[str, Any]) -> None:
        """Complete the requests, all handed over at once, and tell the wave of every token.

        `sampling` is empty for greedy, or has `temperature`, `top_p` and `seed`.
        """
        ...


def serve_engine(load: Callable[[dict[str, Any]], Engine]) -> None:
    """Load an engine with the settings of the first line, then answer until input ends."""

    def prepare(settings: dict[str, Any]) -> tuple[dict[str, Any], Answer]:
        engine = load(settings)

        def answer(request: dict[str, Any]) -> dict[str, Any]:
            waves = []
            for asked in request["waves"]:
                requests = [Request(**each) for each in asked]
                wave = Wave(len(requests))
                engine.complete(wave, requests, request["sampling"])
                waves.append(wave.as_answer())
            return {"waves": waves}

        return {"versions": engine.versions, "notes": engine.notes}, answer

    serve(prepare)


Answer = Callable[[dict[str, Any]], dict[str, Any]]


def serve(prepare: Callable[[dict[str, Any]], tuple[dict[str, Any], Answer]]) -> None:
    """Prepare with the first line, say hello, then answer one line with one line."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    try:
        hello, answer = prepare(json.loads(sys.stdin.readline()))
        say({"ready": hello})
        for line in sys.stdin:
            say(answer(json.loads(line)))
    except Exception as error:
        say({"error": f"{type(error).__name__}: {error}"})
        raise
