"""A core on an echo engine, with a clock of its own: what the tests of this directory share."""

from collections import defaultdict
from collections.abc import Collection
from functools import partial
from typing import Any

from msgspec import structs
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from charonia.config import EngineArgs, SchedulerArgs, SpeculativeConfig
from charonia.core.engine_core import EngineCore
from charonia.core.gate.tenants import Tenants
from charonia.core.generation_request import GenerationRequest
from charonia.core.output.outputs import Chunk, OutputStream
from charonia.core.recording.journal import Journal
from charonia.core.recording.kv_events import KVEvents
from charonia.core.request_events import RequestEvents
from charonia.errors import CharoniaError
from charonia.protocol import SamplingParams
from charonia.text.tokenizer import Tokenizer
from support.echo import EchoExecutor, echo_run

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_tokenizer() -> Tokenizer:
    """One token per byte, so that an echo engine's tokens are arbitrary, mostly broken UTF-8."""
    backend = Backend(models.BPE({char: i for i, char in enumerate(ALPHABET)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


FIXED = SpeculativeConfig(model="echo-draft", num_speculative_tokens=3, adaptive=False)


class Unchanged:
    """A configuration that changes nothing, see `Configuration`."""

    def install(self) -> None:
        """Nothing."""

    def restore(self) -> None:
        """Nothing."""

    def settle(self) -> None:
        """Nothing."""


class Events(RequestEvents):
    """Passes the events of one request on to a bench."""

    def __init__(self, bench: "Bench", key: str) -> None:
        self.bench = bench
        self.key = key

    def on_chunk(self, chunk: Chunk) -> None:
        assert chunk.key == self.key, "another request's chunk"
        self.bench.on_chunk(chunk)

    def on_started(self) -> None:
        self.bench.on_started(self.key)

    def on_joined(self) -> None:
        self.bench.on_joined(self.key)


class Bench:
    """A core on an echo engine, with a clock of its own and the chunks by request.

    Attributes:
        live: what stands for the requests in the core, by key; the last one of each.
    """

    def __init__(
        self,
        executor: EchoExecutor | None = None,
        speculative_config=None,
        *,
        async_scheduling: bool = True,
        eviction_policy: str = "adaptive",
        scheduling_policy: str = "fcfs",
        tenants: Tenants | None = None,
        kv_events: KVEvents | None = None,
        journal: Journal | None = None,
        **args,
    ) -> None:
        self._kv_events = kv_events
        self._journal = journal
        self._tenants = tenants
        self.now = 0.0
        self.lines: list[str] = []
        self.chunks: dict[str, list[Chunk]] = defaultdict(list)
        self.ended_at: dict[str, float] = {}
        self.live: dict[str, Any] = {}
        self.executor = executor or EchoExecutor()
        self.executor.clock = lambda: self.now
        self.tokenizer = byte_tokenizer()
        self._engine_args = EngineArgs(
            model="echo",
            speculative_config=speculative_config,
            async_scheduling=async_scheduling,
            eviction_policy=eviction_policy,
            scheduling_policy=scheduling_policy,
        )
        self._scheduler_args = SchedulerArgs(**args)
        self.restart_scheduler()
        self.core.step()
        assert self.core.is_up

    def restart_scheduler(self) -> None:
        """Begin anew on the engine that is there."""
        self.core = EngineCore(
            self.executor,
            self._engine_args,
            self._scheduler_args,
            partial(OutputStream, tokenizer=self.tokenizer),
            clock=lambda: self.now,
            log=self.lines.append,
            tenants=self._tenants,
            kv_events=self._kv_events,
            journal=self._journal,
        )

    def on_chunk(self, chunk: Chunk) -> None:
        self.chunks[chunk.key].append(chunk)
        if chunk.is_final:
            self.ended_at[chunk.key] = self.now

    def on_started(self, key: str) -> None:
        """The first step of a request begins."""

    def on_joined(self, key: str) -> None:
        """A request gets another one's output."""

    def add(
        self, key: str, prompt: list[int] | None = None, timeout_s=None, draft_ids=(), **params
    ) -> None:
        params = {"max_tokens": 20, "seed": 5} | params
        request = GenerationRequest(
            key=key,
            request_id=f"id-{key}",
            prompt_ids=prompt or [ord(key[0])] * 10,
            params=SamplingParams(**params),
            timeout_s=timeout_s,
            draft_ids=list(draft_ids),
        )
        self.live[key] = self.core.add(request, Events(self, key))

    def cancel(self, key: str) -> None:
        """Cancel a request."""
        self.core.cancel(self.live[key])

    def cancel_samples(self, key: str, indexes: Collection[int]) -> None:
        """Cancel samples of a request."""
        self.core.cancel_samples(self.live[key], indexes)

    def run(self, num_steps: int = 10**6) -> None:
        while self.core.has_requests and num_steps:
            self.now += 0.01
            num_steps -= 1
            if not self.core.step() and not self.core.is_up:
                self.now += 60

    def step_and_wait(self) -> None:
        """A step, and seconds in which nothing happens."""
        self.core.step()
        self.now += 10

    def connects(self) -> bool:
        """Whether there is an engine after another look."""
        self.core.step()
        return self.core.is_up

    def tokens(self, key: str) -> list[int]:
        return [token_id for chunk in self.chunks[key] for token_id in chunk.token_ids]

    def text(self, key: str) -> str:
        return "".join(chunk.text for chunk in self.chunks[key])

    def error(self, key: str) -> CharoniaError | None:
        return self.chunks[key][-1].error


def expected(key: str, max_tokens: int = 20, seed: int = 5) -> list[int]:
    return echo_run([ord(key)] * 10, seed=seed, max_tokens=max_tokens, vocab_size=256)


class Hanging(EchoExecutor):
    """An engine whose step of this number never ends; the others say what they took.

    Attributes:
        waited_s: how long the one that hangs was waited for, by the bench's clock.
    """

    def __init__(self, hanging_step: int, **values) -> None:
        super().__init__(**values)
        self.hanging_step = hanging_step
        self.asked_at: float | None = None
        self.waited_s = 0.0
        self.bench: Bench | None = None

    def submit(self, plan):
        step, number = super().submit(plan), self.num_submitted - 1
        return _HangingStep(self, step, is_hanging=number == self.hanging_step)


class _HangingStep:
    def __init__(self, engine: Hanging, step, is_hanging: bool) -> None:
        self.engine = engine
        self.step = step
        self.is_hanging = is_hanging

    def result(self, timeout):
        if self.is_hanging:
            engine, now = self.engine, self.engine.bench.now
            engine.asked_at = now if engine.asked_at is None else engine.asked_at
            engine.bench.now += timeout
            engine.waited_s = engine.bench.now - engine.asked_at
            raise TimeoutError
        num_tokens = sum(row.num_tokens for row in self.step.plan.rows)
        return structs.replace(self.step.result(timeout), seconds=3.2 if num_tokens > 1 else 1.0)


def hanging_bench(hanging_step: int, **values) -> Bench:
    """A bench whose engine is given up after 7 s at the earliest."""
    engine = Hanging(hanging_step, **values)
    engine.bench = Bench(engine, min_step_deadline_s=7.0)
    return engine.bench
