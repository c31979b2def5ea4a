"""A service on the echo engine, and a client of it."""

import threading
from collections import defaultdict

from charonia.config import EngineArgs, SchedulerArgs
from charonia.core.generation_request import GenerationRequest
from charonia.core.service import EngineService
from charonia.protocol import SamplingParams
from core.bench import byte_tokenizer
from support.echo import EchoExecutor
from support.waiting import WAIT_S, eventually

NUM_BLOCKS = 2**13
FOR_EVER = 10**5
"""Tokens that have room in so many blocks, and take minutes."""


class Client:
    """Collects the chunks of its requests and waits for their ends."""

    def __init__(self, service: EngineService) -> None:
        self.service = service
        self.chunks = defaultdict(list)
        self.ends = defaultdict(threading.Event)
        self.accepted = {}

    def submit(
        self,
        key: str,
        arrived_at: float | None = None,
        prompt_ids: list[int] | None = None,
        **params,
    ) -> None:
        params = {"max_tokens": 10, "seed": 1} | params
        request = GenerationRequest(
            key=key, prompt_ids=prompt_ids or list(key.encode()), params=SamplingParams(**params)
        )
        self.ends[key] = threading.Event()
        self.accepted[key] = self.service.submit(request, self._take, arrived_at)

    def cancel(self, key: str) -> None:
        self.accepted[key].cancel()

    def _take(self, chunk) -> None:
        self.chunks[chunk.key].append(chunk)
        if chunk.is_final:
            assert not self.ends[chunk.key].is_set(), "answered twice"
            self.ends[chunk.key].set()

    def wait(self, key: str):
        assert self.ends[key].wait(WAIT_S), f"{key} hangs"
        return self.chunks[key]


def make_service(executor: EchoExecutor, prompt_index=None, **args) -> EngineService:
    service = EngineService(
        executor,
        EngineArgs(model="echo"),
        SchedulerArgs(**args),
        byte_tokenizer(),
        log=lambda line: None,
        prompt_index=prompt_index,
    )
    service.start()
    return service


def wait_until_up(service: EngineService) -> None:
    eventually(lambda: service.metrics.gauges["charonia_engine_up", ""], "the service is up")


class Gated(EchoExecutor):
    """Makes its steps when it may."""

    def __init__(self, **size: int) -> None:
        super().__init__(**size)
        self.is_asked = threading.Event()
        self.may_step = threading.Event()

    def execute(self, plan):
        self.is_asked.set()
        assert self.may_step.wait(WAIT_S)
        return super().execute(plan)
