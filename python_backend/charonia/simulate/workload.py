"""The traffic of a simulation: a trace as recorded, faster, longer, or with other arrivals.

Owns when each request comes and what it is. Must not know what becomes of it. All random
choices come from a seed.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import cycle, islice
from typing import Literal

from msgspec.structs import replace

from charonia.errors import ConfigError
from charonia.traces import TraceRequest

Arrivals = Literal["trace", "poisson", "bursty"]
ADVERSARY = "adversary"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Changes of a trace.

    Attributes:
        num_requests: number of requests. A shorter trace is repeated with other prompts. None is
            the trace, once.
        rate: requests per second on average; None is the trace's.
        arrivals: "trace" keeps the times of the trace, or spaces requests evenly if these are all
            the same and a rate is given. "poisson" has exponential times between requests,
            "bursty" times from a gamma distribution.
        burstiness: coefficient of variation for "bursty"; 1 is Poisson's.
        num_tenants, num_priorities: assigned at random, in place of the trace's;
            the first tenant has as many requests as all later ones together, and so on.
        deadline_ms: range from which deadlines are drawn, in place of the trace's.
        max_tokens: of requests for which the trace has none; None is the number of generated
            tokens.
        adversary: share of the requests that a tenant of this name sends at once, after a quarter
            of the time. They are repeated from the longest tenth of the trace.
    """

    num_requests: int | None = None
    rate: float | None = None
    arrivals: Arrivals = "trace"
    burstiness: float = 4.0
    num_tenants: int | None = None
    num_priorities: int | None = None
    deadline_ms: tuple[int, int] | None = None
    max_tokens: int | None = None
    adversary: float = 0.0


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that comes.

    Attributes:
        at: seconds. round: how often the trace was repeated; each round has other prompts.
    """

    at: float
    request: TraceRequest
    round: int


def shape(trace: Sequence[TraceRequest], wanted: Shape, seed: int) -> Iterator[Arrival]:
    """Make the traffic, ordered by time."""
    count = wanted.num_requests or len(trace)
    num_adverse = round(count * wanted.adversary)
    count -= num_adverse
    drawn = random.Random(seed)
    outputs = [one.output_length for one in trace if one.output_length] or [1]
    regular = (
        _dressed(one, wanted, outputs, drawn) for one in _regular(trace, wanted, count, drawn)
    )
    if not num_adverse:
        return regular
    longest = sorted(trace, key=lambda one: one.input_length)[-max(1, len(trace) // 10) :]
    strikes_at = count / (wanted.rate or rate_of(trace)) / 4
    other = random.Random(f"{seed} {ADVERSARY}")
    adverse = (
        _dressed(Arrival(strikes_at, one, round_number), wanted, outputs, other, ADVERSARY)
        for one, round_number in _rounds(longest, num_adverse)
    )
    return merge(regular, adverse, key=lambda arrival: arrival.at)


def rate_of(trace: Sequence[TraceRequest]) -> float:
    """Return the requests per second.

    Raises:
        ConfigError: all come at the same time.
    """
    seconds = (trace[-1].timestamp - trace[0].timestamp) / 1000
    if seconds <= 0:
        raise ConfigError("all requests of the trace come at the same time; give a rate")
    return len(trace) / seconds


def _regular(
    trace: Sequence[TraceRequest], wanted: Shape, count: int, drawn: random.Random
) -> Iterator[Arrival]:
    """Yield requests at their times, as in the trace."""
    begins = trace[0].timestamp
    is_at_once = trace[-1].timestamp <= begins
    if wanted.arrivals == "trace" and not (is_at_once and wanted.rate):
        factor = rate_of(trace) / wanted.rate if wanted.rate else 1.0
        period = len(trace) / rate_of(trace) if count > len(trace) else 0.0
        for request, round_number in _rounds(trace, count):
            at = (request.timestamp - begins) / 1000 + round_number * period
            yield Arrival(at * factor, request, round_number)
        return
    mean = 1 / (wanted.rate or rate_of(trace))
    variation = {"trace": 0.0, "poisson": 1.0, "bursty": wanted.burstiness**2}[wanted.arrivals]
    at = 0.0
    for request, round_number in _rounds(trace, count):
        yield Arrival(at, request, round_number)
        at += drawn.gammavariate(1 / variation, mean * variation) if variation else mean


def _rounds(trace: Sequence[TraceRequest], count: int) -> Iterator[tuple[TraceRequest, int]]:
    numbered = enumerate(islice(cycle(trace), count))
    return ((request, number // len(trace)) for number, request in numbered)


def _dressed(
    arrival: Arrival,
    wanted: Shape,
    outputs: Sequence[int],
    drawn: random.Random,
    tenant: str | None = None,
) -> Arrival:
    """Change a request as wanted; `tenant` overrides its tenant."""
    request = arrival.request
    # A refused request would have had an output like others'.
    length = request.output_length or drawn.choice(outputs)
    max_tokens = max(length, request.max_tokens or wanted.max_tokens or length)
    priority, deadline_ms = request.priority, request.deadline_ms
    if tenant is None:
        tenant = request.tenant
        if wanted.num_tenants is not None:
            tenant = f"tenant-{_halving(wanted.num_tenants, drawn)}"
    if wanted.num_priorities is not None:
        priority = drawn.randrange(wanted.num_priorities)
    if wanted.deadline_ms is not None:
        deadline_ms = drawn.randint(*wanted.deadline_ms)
    request = replace(
        request,
        output_length=length,
        max_tokens=max_tokens,
        tenant=tenant,
        priority=priority,
        deadline_ms=deadline_ms,
    )
    return Arrival(arrival.at, request, arrival.round)


def _halving(count: int, drawn: random.Random) -> int:
    """Draw a number: 0 as often as all greater numbers together, and so on."""
    for number in range(count - 1):
        if drawn.random() < 0.5:
            return number
    return count - 1
