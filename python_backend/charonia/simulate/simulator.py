"""One run: traffic through the real engine core, and what became of each request.

Owns whose turn it is, the traffic's or the core's, and the notes on each request. Must not know how
the traffic was made, nor what is reported. It has what `core/service.py` has, without the
thread: admission control, load shedding, and the core behind them. Only the
engine, the clock, and the outputs, which have no text, are its own.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from charonia.config import EngineArgs, SchedulerArgs
from charonia.control import Request, Update
from charonia.core.engine_core import RESULT_WAIT_S, EngineCore
from charonia.core.gate.degradation import Degradation
from charonia.core.gate.gate import Gate
from charonia.core.gate.queue_order import Entry
from charonia.core.gate.tenants import Tenants
from charonia.core.generation_request import GenerationRequest
from charonia.core.output.outputs import Chunk, SampleStream
from charonia.core.request_events import RequestEvents
from charonia.core.request_registry import LiveRequest, owner_of
from charonia.core.service import LOOK_EVERY_S
from charonia.errors import CharoniaError, ConfigError
from charonia.protocol import EngineInfo, KVLayout, SamplingParams
from charonia.simulate.distribution import Distribution
from charonia.simulate.engine import (
    EOS_ID,
    FIRST_OWN_ID,
    VOCAB_SIZE,
    SimulatedExecutor,
    VirtualClock,
)
from charonia.simulate.service import ServiceBySteps, ServiceDifference
from charonia.simulate.step_times import StepClock, StepTimes
from charonia.simulate.workload import Arrival
from charonia.traces import TraceRequest

FINISHED = ("stop", "length")
"""Outcomes of requests that got all their tokens."""
MAX_SAMPLES = 500
_ROUND = 0x9E3779B97F4A7C15  # separates the ids of one round of the trace from those of another


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Arguments and size of the simulated server.

    Attributes:
        num_blocks: of the KV cache. max_model_len: tokens of a request, prompt and output.
        tenants_file: as the scheduler's; None treats all tenants alike.
    """

    engine_args: EngineArgs
    scheduler_args: SchedulerArgs
    num_blocks: int
    max_model_len: int
    step_times: StepTimes
    seed: int = 0

    @property
    def info(self) -> EngineInfo:
        """Description of the simulated engine."""
        args = self.engine_args
        layout = KVLayout(
            num_layers=1,
            num_kv_heads=1,
            head_dim=1,
            block_size=args.block_size,
            dtype="none",
            bytes_per_block=0,
        )
        return EngineInfo(
            epoch=0,
            pids=[],
            num_blocks=self.num_blocks,
            kv=layout,
            max_model_len=self.max_model_len,
            max_num_seqs=args.most_rows,
            max_num_batched_tokens=args.most_step_tokens,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=[EOS_ID],
            architecture="simulated",
            dtype="none",
            device="simulated",
            num_parameters=0,
            num_stages=args.pipeline_parallel_size,
        )


@dataclass(slots=True)
class Served:
    """The fate of one request. Times are in seconds; None if it did not get that far.

    Attributes:
        num_tokens: that it got. outcome: "stop", "length" or the kind of the error.
        expires_at: its deadline. is_clients_doing: it was refused, and not because of the server.
    """

    request: TraceRequest
    arrived_at: float
    expires_at: float | None = None
    started_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float = 0.0
    ended_at: float = 0.0
    num_tokens: int = 0
    outcome: str = ""
    is_clients_doing: bool = False

    def milliseconds_to(self, when: float | None) -> float | None:
        """Milliseconds from its arrival on."""
        return None if when is None else round((when - self.arrived_at) * 1000, 3)

    @property
    def is_finished(self) -> bool:
        """True if it got all its tokens."""
        return self.outcome in FINISHED


@dataclass(slots=True, eq=False)
class Live(RequestEvents):
    """A request that has been admitted and has not ended.

    Attributes:
        entry: of the gate. computed: stands for it in the core.
        request: the control plane's; None until it is placed.
    """

    simulation: "Simulation"
    served: Served
    entry: Entry
    computed: LiveRequest | None = None
    request: Request | None = None

    def on_chunk(self, chunk: Chunk) -> None:
        """See `RequestEvents`; its only chunk is its end."""
        self.simulation.note_end(self, chunk)

    def on_started(self) -> None:
        """See `RequestEvents`."""
        self.simulation.note_started(self)


class Sample(NamedTuple):
    """Utilization at one moment; blocks as a share of the pool."""

    at: float
    num_running: int
    num_waiting: int
    used_blocks: float


@dataclass(kw_only=True)
class Outcome:
    """All results of a run.

    Attributes:
        inter_token: seconds between a request's tokens, by tenant and priority.
        seconds: from the first arrival to the last end. busy_s: of these, in steps.
        num_steps, mean_rows: of the engine. num_preemptions: of running requests.
        hit_rate: share of prompt tokens that the prefix cache had when their request began.
        service: see `ServiceDifference`.
    """

    served: list[Served]
    inter_token: dict[tuple[str, int], Distribution]
    samples: list[Sample]
    seconds: float
    busy_s: float
    num_steps: int
    mean_rows: float
    num_preemptions: int
    hit_rate: float
    service: ServiceDifference

    def as_trace(self) -> Iterator[TraceRequest]:
        """Yield the requests as a trace, each with its result."""
        for one in self.served:
            yield replace(
                one.request,
                timestamp=one.arrived_at * 1000,
                outcome=one.outcome,
                queue_ms=one.milliseconds_to(one.started_at),
                ttft_ms=one.milliseconds_to(one.first_token_at),
                total_ms=one.milliseconds_to(one.ended_at),
            )


class Simulation:
    """Runs traffic through one setting.

    Args:
        arrivals: ordered by time. block_length: tokens of the blocks with ids.
        sample_every_s: seconds between two samples, at first. log: takes one line.

    Raises:
        ConfigError: the setting contradicts itself, or its tenants' file is wrong.
    """

    def __init__(
        self,
        setting: Setting,
        arrivals: Iterator[Arrival],
        block_length: int,
        *,
        sample_every_s: float = 0.0,
        log: Callable[[str], None] = lambda _: None,
    ) -> None:
        args, info = setting.scheduler_args, setting.info
        self._arrivals = arrivals
        self._block_length = block_length
        self._next = next(arrivals, None)
        self._intake_s = setting.step_times.intake
        self._clock = VirtualClock()
        path = None if args.tenants_file is None else Path(args.tenants_file)
        # A policy without shares is compared with one that has them, on the same file.
        tenants = Tenants(path, has_shares=True, log=log)
        self._gate = Gate(tenants, args, clock=self._clock)
        self._gate.follow(setting.engine_args)
        self._looked_at = 0.0
        self._served: list[Served] = []
        self._live: dict[Entry, Live] = {}
        self._engine = SimulatedExecutor(
            info, StepClock(setting.step_times, setting.seed), self._clock, self._output_length
        )
        self._core = EngineCore(
            self._engine,
            setting.engine_args,
            replace(args, min_step_deadline_s=inf),  # no step is so long that this engine hangs
            self._stream_of,
            clock=self._clock,
            log=log,
            tenants=tenants,
            hash_secret=f"{setting.seed}".encode(),  # some eviction policies depend on hashes
        )
        self._core.step()  # the engine is there before the first request
        if self._core.down_reason is not None:
            raise ConfigError(self._core.down_reason)
        self._metrics = self._core.metrics
        self._degradation = Degradation(args, tenants, self._metrics, log=log)
        self._has_degradation = args.degradation_wait_s is not None
        self._num_blocks = info.num_blocks
        self._inter_token: dict[tuple[str, int], Distribution] = {}
        self._service = ServiceDifference(tenants.weight_of)
        self._by_steps = ServiceBySteps(self._service)
        self._samples: list[Sample] = []
        self._sample_every_s = sample_every_s

    def run(self, on_end: Callable[[], None] = lambda: None) -> Outcome:
        """Serve all of the traffic.

        Args:
            on_end: called at the end of each request.
        """
        self._on_end = on_end
        core, clock = self._core, self._clock
        while self._next is not None or self._live:
            if self._has_degradation and clock.now - self._looked_at >= LOOK_EVERY_S:
                self._look()
            num_ended = self._engine.num_ended
            self._by_steps.end(num_ended)
            core.deliver()
            self._take_arrivals()
            is_busy = core.step()
            self._by_steps.look(num_ended)  # all outputs were delivered, but of what was fetched
            if is_busy:
                self._sample(clock.now)
            elif self._live:  # they wait for a time limit
                clock.now += RESULT_WAIT_S
            elif self._next is not None:
                self._idle_until(self._next.at + self._intake_s)
        return self._outcome()

    def _idle_until(self, when: float) -> None:
        """Let idle time pass; degradation is undone meanwhile."""
        while self._degradation.level and self._clock.now + LOOK_EVERY_S < when:
            self._clock.now += LOOK_EVERY_S
            self._look()
        self._clock.advance_to(when)

    def _look(self) -> None:
        """Look at the queue's wait, and change the degradation level accordingly."""
        self._looked_at = self._clock.now
        if self._degradation.observe(self._gate.wait_s(), self._looked_at):
            self._core.shed(self._degradation.shedding)

    # ------------------------------------------------------------------ requests come

    def _output_length(self, number: int) -> int:
        return self._served[number].request.output_length

    def _take_arrivals(self) -> None:
        while self._next is not None and self._next.at + self._intake_s <= self._clock.now:
            arrival, self._next = self._next, next(self._arrivals, None)
            self._arrive(arrival)

    def _arrive(self, arrival: Arrival) -> None:
        request, number = arrival.request, len(self._served)
        served = Served(request, arrival.at)
        self._served.append(served)
        wanted = GenerationRequest(
            key=str(number),
            prompt_ids=_prompt(arrival, number, self._block_length),
            params=SamplingParams(
                max_tokens=request.max_tokens,
                ignore_eos=request.max_tokens == request.output_length,
                seed=number,
                tenant=request.tenant,
                priority=request.priority,
                deadline_ms=request.deadline_ms or None,
            ),
        )
        if request.deadline_ms:
            served.expires_at = arrival.at + request.deadline_ms / 1000
        try:
            self._let_in(wanted, arrival.at)
        except CharoniaError as error:
            served.is_clients_doing = error.is_clients_doing
            self._note_end(served, error.kind)

    def _let_in(self, wanted: GenerationRequest, at: float) -> None:
        limits = self._core.limits
        limits.check_prompt(len(wanted.prompt_ids))
        self._degradation.check(wanted.params)
        num_queued = len(self._live) - limits.max_num_seqs
        entry, leaver = self._gate.enter(wanted, at, num_queued=num_queued)
        if leaver is not None:
            leaving = self._live[leaver.entry].computed
            assert leaving is not None, "it was added before the request that it gives way to"
            self._core.end(leaving, leaver.error)
        served = self._served[int(wanted.key)]
        live = self._live[entry] = Live(self, served, entry)
        self._note_with_next_step(self._service.note_arrival, served.request.tenant)
        live.computed = self._core.add(self._degradation.capped(wanted), live, at)

    # ------------------------------------------------------------------ and go

    def _stream_of(self, request: Request, _: SamplingParams) -> "_Counted":
        owner = owner_of(request.group)
        live = None if owner is None else owner.events
        assert isinstance(live, Live)
        live.request = request
        return _Counted(request, partial(self._note_tokens, live.served))

    def note_started(self, live: Live) -> None:
        """Note that the first step of a request begins."""
        request = live.request
        assert request is not None, "it starts before it is placed"
        self._gate.note_started(live.entry)
        live.served.started_at = self._clock.now
        num_computed = request.num_prompt - request.num_cached
        self._note_with_next_step(self._service.note_start, request.tenant)
        self._note_with_next_step(self._service.note_input, request.tenant, num_computed)

    def _note_with_next_step(self, note: Callable[..., None], *args: object) -> None:
        """Note something of the service with the step that is planned next, or now."""
        self._by_steps.note_with(self._engine.num_steps + 1, partial(note, *args))

    def _note_tokens(self, served: Served, request: Request, num_new: int) -> None:
        """Note the tokens that a step committed."""
        now = self._clock.now
        if served.first_token_at is None:
            served.first_token_at = now
        else:
            times = self._inter_token.get((request.tenant, request.priority))
            if times is None:
                times = Distribution()
                self._inter_token[request.tenant, request.priority] = times
            times.observe(now - served.last_token_at, num_new)
        served.last_token_at = now
        served.num_tokens += num_new
        self._service.note_output(request.tenant, num_new)

    def note_end(self, live: Live, chunk: Chunk) -> None:
        """Note the end of a request."""
        del self._live[live.entry]
        live.computed = None
        served = live.served
        if served.started_at is None:
            self._note_with_next_step(self._service.note_start, served.request.tenant)
        self._gate.leave(live.entry)
        error = chunk.error
        self._note_end(served, f"{chunk.finish_reason}" if error is None else error.kind)

    def _note_end(self, served: Served, outcome: str) -> None:
        served.ended_at = max(self._clock.now, served.arrived_at)
        served.outcome = outcome
        self._on_end()

    # ------------------------------------------------------------------ what is told of it

    def _sample(self, now: float) -> None:
        """Sample the utilization. If there are too many samples, half of them are dropped."""
        if self._samples and now < self._samples[-1].at + self._sample_every_s:
            return
        gauges = self._metrics.gauges
        num_running = int(gauges["charonia_requests_running", ""])
        num_waiting = int(gauges["charonia_requests_waiting", ""])
        used = gauges["charonia_kv_blocks", "used"] / (self._num_blocks - 1)
        self._samples.append(Sample(now, num_running, num_waiting, used))
        if len(self._samples) >= 2 * MAX_SAMPLES:
            self._samples = self._samples[::2]
            self._sample_every_s = (now - self._samples[0].at) / MAX_SAMPLES

    def _outcome(self) -> Outcome:
        counters, engine = self._metrics.counters, self._engine
        self._by_steps.end(engine.num_steps + 1)  # for requests that did not start
        cached = counters["charonia_prompt_tokens_total", "cached"]
        computed = counters["charonia_prompt_tokens_total", "computed"]
        first = self._served[0].arrived_at if self._served else 0.0
        return Outcome(
            served=self._served,
            inter_token=self._inter_token,
            samples=self._samples,
            seconds=self._clock.now - first,
            busy_s=engine.busy_s,
            num_steps=engine.num_steps,
            mean_rows=engine.num_rows / max(1, engine.num_steps),
            num_preemptions=int(counters["charonia_preemptions_total", ""]),
            hit_rate=cached / max(1.0, cached + computed),
            service=self._service,
        )


class _Counted(SampleStream):
    """An output without text: its tokens are counted, and only its end is reported.

    Args:
        note: called with the number of new tokens.
    """

    def __init__(self, request: Request, note: Callable[[Request, int], None]) -> None:
        super().__init__(request)
        self._note = note

    def take(self, update: Update, now: float) -> Chunk | None:
        """See `SampleStream`."""
        if num_new := len(update.token_ids):
            self.num_tokens += num_new
            self.first_token_at = self.first_token_at or now
            self.last_token_at = now
            self._note(self.request, num_new)
        reason = update.finish_reason
        return None if reason is None else Chunk(self.request.key, finish_reason=reason)

    def fail(self, error: CharoniaError, now: float) -> Chunk:
        """See `SampleStream`."""
        return Chunk(self.request.key, error=error)

    def cancel(self, now: float) -> Chunk:
        """See `SampleStream`. Not called here."""
        return Chunk(self.request.key, finish_reason="cancelled")


def _prompt(arrival: Arrival, number: int, block_length: int) -> list[int]:
    """Make a prompt: equal block ids in the same round of the trace give equal tokens.

    All tokens of a block are one number, because only the equality of blocks matters here.
    """
    request, prompt_ids = arrival.request, list[int]()
    for hash_id in request.hash_ids:
        shared = (hash_id + arrival.round * _ROUND) % FIRST_OWN_ID
        prompt_ids += [shared] * block_length
    del prompt_ids[request.input_length :]
    own = FIRST_OWN_ID + number  # no other request has it
    prompt_ids += [own] * (request.input_length - len(prompt_ids))
    return prompt_ids
