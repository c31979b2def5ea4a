"""An answer cache above a core on an echo engine, with a clock of its own."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

from charonia.core.answers import AnswerCache
from charonia.core.engine_core import EngineCore
from charonia.core.gate.tenants import Tenants
from charonia.core.generation_request import GenerationRequest
from charonia.core.output.outputs import OutputStream
from charonia.core.replica.reload import Reload
from charonia.protocol import SamplingParams
from core.bench import Bench, Events, Unchanged
from support.echo import echo_run

LOTS = 2**20
PROMPT = [7] * 10
OTHER_PROMPT = [8] * 10


class Found(NamedTuple):
    """See `Match`."""

    vector: Any
    key: bytes | None
    similarity: float


class FirstTokens:
    """Finds similar prompts when it is told to: those with the same first token, by their lengths.

    Attributes:
        known: scope and prompt by key.
    """

    bytes_per_prompt = 100

    def __init__(self) -> None:
        self.known: dict[bytes, tuple[bytes, list[int]]] = {}
        self.waiting: list[Callable[[], None]] = []
        self.is_full = False
        self.is_unable = False

    def ask(self, scope: bytes, prompt_ids: Sequence[int], done: Callable[[Any], None]) -> bool:
        if self.is_full:
            return False
        self.waiting.append(lambda: done(self._find(scope, list(prompt_ids))))
        return True

    def _find(self, scope: bytes, prompt: list[int]) -> Found | None:
        if self.is_unable:
            return None
        similarities = {
            key: min(len(prompt), len(other)) / max(len(prompt), len(other))
            for key, (other_scope, other) in self.known.items()
            if other_scope == scope and other[0] == prompt[0]
        }
        best = max(similarities, key=similarities.__getitem__, default=None)
        return Found(prompt, best, similarities.get(best, 0.0))

    def keep(self, scope: bytes, key: bytes, vector: Any) -> None:
        self.known.setdefault(key, (scope, vector))

    def forget(self, key: bytes) -> None:
        self.known.pop(key, None)

    def answer(self) -> None:
        """Tell all who wait what there is."""
        waiting, self.waiting = self.waiting, []
        for tell in waiting:
            tell()


class AnswerBench(Bench):
    """A bench whose requests go through an answer cache.

    Attributes:
        similar: what finds similar prompts, with a `semantic_cache_threshold`.
        started, joined: keys in the order in which the cache told of them.
    """

    def __init__(self, *args: Any, answer_cache_bytes: int | None = LOTS, **values: Any) -> None:
        self.started: list[str] = []
        self.joined: list[str] = []
        self.similar = FirstTokens()
        super().__init__(*args, answer_cache_bytes=answer_cache_bytes, **values)

    def restart_scheduler(self) -> None:
        tenants = self._tenants or Tenants(log=self.lines.append)
        self.core = EngineCore(
            self.executor,
            self._engine_args,
            self._scheduler_args,
            partial(OutputStream, tokenizer=self.tokenizer),
            clock=lambda: self.now,
            log=self.lines.append,
            tenants=tenants,
        )
        self.answers = AnswerCache(
            self.core,
            self._scheduler_args,
            clock=lambda: self.now,
            log=self.lines.append,
            similar=self.similar if self._scheduler_args.semantic_cache_threshold else None,
        )

    def on_started(self, key: str) -> None:
        self.started.append(key)

    def on_joined(self, key: str) -> None:
        self.joined.append(key)

    def ask(self, key: str, prompt: list[int] | None = None, **values: Any) -> None:
        """Take a request in; what is no field of it is a sampling parameter."""
        of_request = {
            name: values.pop(name)
            for name in ("timeout_s", "return_cumulative_logprob", "draft_ids", "is_probe")
            if name in values
        }
        params = {"max_tokens": 20, "seed": 5} | values
        request = GenerationRequest(
            key=key,
            request_id=f"id-{key}",
            prompt_ids=[7] * 10 if prompt is None else prompt,
            params=SamplingParams(**params),
            **of_request,
        )
        self.core.check(request)
        digest = self.answers.digest_of(request)
        self.live[key] = self.answers.add(request, Events(self, key), self.now, digest)

    def cancel(self, key: str) -> None:
        """Cancel a request."""
        self.answers.cancel(self.live[key])

    def cancel_samples(self, key: str, indexes: Collection[int]) -> None:
        """Cancel samples of a request."""
        self.answers.cancel_samples(self.live[key], indexes)

    def step(self) -> bool:
        """What the service does in one turn."""
        self.answers.refresh()
        self.core.deliver()
        self.similar.answer()
        return self.core.step()

    def run(self, num_steps: int = 10**6) -> None:
        while (self.core.has_requests or self.similar.waiting) and num_steps:
            self.now += 0.01
            num_steps -= 1
            if not self.step() and not self.core.is_up:
                self.now += 60

    def hits(self, kind: str) -> float:
        return self.core.metrics.counters["charonia_answer_cache_hits_total", kind]

    @property
    def misses(self) -> float:
        return self.core.metrics.counters["charonia_answer_cache_misses_total", ""]

    @property
    def num_generated(self) -> float:
        return self.core.metrics.counters["charonia_generation_tokens_total", ""]

    def cached(self, key: str) -> object:
        timing = self.chunks[key][-1].timing
        assert timing is not None
        return timing.get("cached")


def alone(prompt=PROMPT, *, seed: int = 5, max_tokens: int = 20, vocab_size: int = 256):
    return echo_run(prompt, seed=seed, max_tokens=max_tokens, vocab_size=vocab_size)


def content(bench: Bench, key: str) -> list[tuple]:
    """All that a client can see of an answer, by sample, however it was cut into pieces."""
    samples = {}
    for chunk in bench.chunks[key]:
        parts = samples.setdefault(chunk.index, [])
        parts.append(chunk)
    return [
        (
            index,
            "".join(one.text for one in parts),
            [token_id for one in parts for token_id in one.token_ids],
            [entry for one in parts for entry in one.logprobs or ()],
            next((one.prompt_logprobs for one in parts if one.prompt_logprobs), None),
            parts[-1].cumulative_logprob,
            parts[-1].finish_reason,
            parts[-1].num_prompt_tokens,
        )
        for index, parts in sorted(samples.items())
    ]


def reload_(bench: AnswerBench) -> None:
    order = Reload(Unchanged())
    bench.core.reload(order)
    while not order.is_over:
        bench.now += 0.01
        bench.step()
    bench.step()
