"""Compare all policies of eviction on recorded traffic, in the simulator, at several cache sizes.

    python loadtests/cache_bench.py --traces ../shared/traces
    python loadtests/cache_bench.py --traffic synthetic --policies lru arc    # a quick look

Requests come when they came. The engine is a model whose step takes 8 ms and so much per token that
computing all prompts without a cache would take it four fifths of the trace's time: requests run
beside each other, and queue in bursts. A hit rate is the share of the prompts' tokens that were
found in the cache.

Beside it stands an optimum that knows the future (Belady 1966, "A study of replacement algorithms
for a virtual-storage computer", adapted to prefixes): requests one at a time in the order of their
arrivals, in a cache of as many blocks, which gives up the block that is asked for again the latest,
of equal ones the deepest in its prefix. Nothing of it is held by requests that run, and none of its
blocks are of generated tokens. So the same optimum is shown in as many blocks as requests that run
leave on average (under lru), too. It is no bound, as blocks that are held are found as well.

Each policy's block operations per second of processor time are those of the same replay, one at a
time: finding or allocating, holding or publishing, and releasing a block are one operation each.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import blake2b
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import Any

from tqdm import tqdm

from charonia.config import EngineArgs, SchedulerArgs
from charonia.control.cache import KVCache
from charonia.control.cache.eviction import EVICTIONS
from charonia.simulate.simulator import Setting, Simulation
from charonia.simulate.step_times import StepTimes
from charonia.simulate.workload import Shape, shape
from charonia.traces import TraceRequest, block_length, read_requests
from command_line import add_output, make_parser, positive
from plot import make_figure, save
from record import circumstances, output_stem, write_record
from report import markdown_table

NUM_ROWS, BUDGET = 256, 8192
UTILIZATION = 0.8
SIZES = {
    "conversation": (500_000, 2_500_000, 10_000_000, 30_000_000),
    "agents": (600_000, 1_500_000, 5_000_000, 15_000_000),
    "synthetic": (500_000, 2_500_000, 10_000_000, 30_000_000),
}
"""Tokens of the caches, by traffic. The longest request of `agents` takes 530,000."""
MAX_BLOCK_SIZE = 256  # what an engine takes
OPTIMUM = "optimum"
OPTIMUM_OF_REST = "optimum of the rest"  # in what requests that run leave
OPTIMA = (OPTIMUM, OPTIMUM_OF_REST)
_STYLES = {
    OPTIMUM: {"color": "black", "linestyle": "dashed"},
    OPTIMUM_OF_REST: {"color": "gray", "linestyle": "dotted"},
}
_NEVER = 1 << 60


@dataclass(frozen=True)
class CacheRun:
    """One policy on one traffic in one cache.

    Attributes:
        hit_rate: share of prompt tokens. ttft_p50_ms: of its requests. None where the run is no
            simulation. held: share of the blocks that requests hold which run, on average; None of
            the optimum.
        operations_per_s: block operations of a replay, None for the optimum.
    """

    traffic: str
    tokens: int
    policy: str
    hit_rate: float
    ttft_p50_ms: float | None = None
    held: float | None = None
    operations_per_s: float | None = None


def keys_of(trace: Sequence[TraceRequest], length: int, block_size: int) -> list[list[bytes]]:
    """Return each request's keys of its prompt's full blocks, without the prompt's last token."""
    parts = range(length // block_size)
    keys = {
        hash_id: [blake2b(f"{hash_id} {part}".encode(), digest_size=16).digest() for part in parts]
        for one in trace
        for hash_id in one.hash_ids
    }
    return [
        [key for hash_id in one.hash_ids for key in keys[hash_id]][
            : (one.input_length - 1) // block_size
        ]
        for one in trace
    ]


def replay(sequences: Sequence[Sequence[bytes]], num_blocks: int, policy: str) -> float:
    """Block operations per second of one request after another."""
    cache = KVCache(num_blocks, EVICTIONS[policy](num_blocks))
    num_operations, started = 0, time.process_time()
    for keys in sequences:
        hits = cache.find(keys)
        cache.acquire(hits)
        block_ids = hits + cache.allocate(len(keys) - len(hits))
        for index in range(len(hits), len(keys)):
            cache.publish(block_ids[index], keys[index], block_ids[index - 1] if index else 0)
        cache.release(block_ids)
        num_operations += 3 * len(keys)
    return num_operations / (time.process_time() - started)


def optimum(sequences: Sequence[Sequence[bytes]], num_blocks: int) -> int:
    """Blocks that a cache finds which gives up what is asked for again the latest."""
    next_use = _next_uses(sequences)
    when: dict[bytes, int] = {}  # of what is cached
    heap: list[tuple[int, int, bytes]] = []
    num_hits = 0
    for number, keys in enumerate(sequences):
        num_found = next((i for i, key in enumerate(keys) if key not in when), len(keys))
        num_hits += num_found
        for depth, key in enumerate(keys):
            when[key] = next_use[number][depth]
            heappush(heap, (-when[key], -depth, key))
        while len(when) >= num_blocks:
            use, _, key = heappop(heap)
            if when.get(key) == -use:
                del when[key]
        if len(heap) > 4 * num_blocks:
            heap = [place for place in heap if when.get(place[2]) == -place[0]]
            heapify(heap)
    return num_hits


def _next_uses(sequences: Sequence[Sequence[bytes]]) -> list[list[int]]:
    """Return, for each block of each request, the number of the next request that has it."""
    coming: dict[bytes, int] = {}
    found: list[list[int]] = []
    for number in range(len(sequences) - 1, -1, -1):
        found.append([coming.get(key, _NEVER) for key in sequences[number]])
        coming.update(dict.fromkeys(sequences[number], number))
    return found[::-1]


def simulate(name: str, folder: Path, num_tokens: int, policy: str) -> CacheRun:
    """Run one traffic under one policy."""
    trace = read_requests(folder / f"{name}.jsonl.gz")
    length = block_length(trace)
    block_size = min(length, MAX_BLOCK_SIZE)
    num_blocks = 1 + num_tokens // block_size
    sequences = keys_of(trace, length, block_size)
    if policy == OPTIMUM:
        rate = _optimal_rate(trace, sequences, num_blocks, block_size)
        return CacheRun(name, num_tokens, policy, rate)
    setting = _setting(
        trace, num_blocks, block_size, "lru" if policy == OPTIMUM_OF_REST else policy
    )
    outcome = Simulation(setting, shape(trace, Shape(), 0), length).run()
    held = sum(sample.used_blocks for sample in outcome.samples) / len(outcome.samples)
    if policy == OPTIMUM_OF_REST:
        rate = _optimal_rate(trace, sequences, round(num_blocks * (1 - held)), block_size)
        return CacheRun(name, num_tokens, policy, rate, held=held)
    times = sorted(one.milliseconds_to(one.first_token_at) or 0.0 for one in outcome.served)
    if not all(one.is_finished for one in outcome.served):
        raise SystemExit(f"{name}, {num_tokens} tokens, {policy}: requests got no answer")
    return CacheRun(
        name,
        num_tokens,
        policy,
        outcome.hit_rate,
        times[len(times) // 2],
        held,
        replay(sequences, num_blocks, policy),
    )


def _optimal_rate(
    trace: Sequence[TraceRequest],
    sequences: Sequence[Sequence[bytes]],
    num_blocks: int,
    block_size: int,
) -> float:
    """Share of prompt tokens that the optimum finds."""
    num_prompt = sum(one.input_length for one in trace)
    return optimum(sequences, max(2, num_blocks)) * block_size / num_prompt


def _setting(
    trace: Sequence[TraceRequest], num_blocks: int, block_size: int, policy: str
) -> Setting:
    """The modelled engine."""
    seconds = (trace[-1].timestamp - trace[0].timestamp) / 1000
    per_token = UTILIZATION * seconds / sum(one.input_length for one in trace)
    longest = max(one.input_length + one.output_length for one in trace)
    return Setting(
        engine_args=EngineArgs(
            model="simulated",
            max_num_seqs=NUM_ROWS,
            max_num_batched_tokens=BUDGET,
            block_size=block_size,
            eviction_policy=policy,
        ),
        scheduler_args=SchedulerArgs(max_queue_size=len(trace)),
        num_blocks=num_blocks,
        max_model_len=longest + 8,
        step_times=StepTimes.load(
            f"step=8ms,token={per_token * 1e6}us,context=1ns,host=1ms,transit=0.5ms,gap=0.2ms"
        ),
    )


def runs(
    names: Sequence[str], policies: Sequence[str], folder: Path, num_processes: int
) -> Iterator[CacheRun]:
    """All of them, as they end."""
    with ProcessPoolExecutor(num_processes) as pool:
        waiting = [
            pool.submit(simulate, name, folder, num_tokens, policy)
            for name in names
            for num_tokens in SIZES[name]
            for policy in (*policies, *OPTIMA)
        ]
        for done in as_completed(waiting):
            yield done.result()


def table(found: Sequence[CacheRun]) -> str:
    """Hit rates in percent, and operations per second."""
    policies = [name for name in (*EVICTIONS, *OPTIMA) if any(r.policy == name for r in found)]
    rows = []
    for name, sizes in SIZES.items():
        for num_tokens in sizes:
            of_size = {
                run.policy: run for run in found if (run.traffic, run.tokens) == (name, num_tokens)
            }
            if of_size:
                rows.append([name, f"{num_tokens / 1e6:g} M", *_rates(of_size, policies)])
    speeds = {
        policy: [r.operations_per_s for r in found if r.policy == policy and r.operations_per_s]
        for policy in policies
    }
    parts = [
        "Hit rates, % of prompt tokens; the best but for the optima is bold.\n"
        "Held: % of the blocks, by requests that run.",
        markdown_table(["traffic", "tokens", *policies, "held"], rows),
        markdown_table(
            ["policy", "block operations per second, the fewest of all runs"],
            [[policy, f"{min(each):,.0f}"] for policy, each in speeds.items() if each],
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _rates(of_size: Mapping[str, CacheRun], policies: Sequence[str]) -> list[str]:
    """The cells of one cache size: what each policy found, and what requests held."""
    best = max((run.hit_rate for run in of_size.values() if run.policy not in OPTIMA), default=0.0)
    cells = []
    for policy in policies:
        run = of_size.get(policy)
        shown = "" if run is None else f"{100 * run.hit_rate:.1f}"
        is_best = run is not None and policy not in OPTIMA and run.hit_rate == best
        cells.append(f"**{shown}**" if is_best else shown)
    rest = of_size.get(OPTIMUM_OF_REST)
    return [*cells, f"{100 * rest.held:.1f}" if rest and rest.held is not None else ""]


def write_plot(found: Sequence[CacheRun], path: Path) -> None:
    """Hit rates over cache sizes, a panel for each traffic."""
    names = [name for name in SIZES if any(run.traffic == name for run in found)]
    figure = make_figure(6 * len(names), 5)
    axes = figure.subplots(1, len(names), squeeze=False)
    for axis, name in zip(axes[0], names, strict=True):
        for policy in (*EVICTIONS, *OPTIMA):
            points = sorted(
                (run.tokens / 1e6, 100 * run.hit_rate)
                for run in found
                if (run.traffic, run.policy) == (name, policy)
            )
            if points:
                style = _STYLES.get(policy, {})
                axis.plot(*zip(*points, strict=True), marker="o", label=policy, **style)
        axis.set_xscale("log")
        axis.set_title(name)
        axis.set_xlabel("cache, million tokens")
        axis.set_ylabel("prompt tokens found, %")
    axes[0][0].legend(fontsize="small")
    save(figure, path)


def _write(stem: Path, about: dict[str, Any], found: Sequence[CacheRun]) -> str:
    content = about | {"runs": [asdict(run) for run in found]}
    return write_record(stem, content, draw=partial(write_plot, found), table=table(found))


def main() -> None:
    """Simulate as the command line says."""
    parser = make_parser(__doc__)
    parser.add_argument("--traces", type=Path, default=Path("../shared/traces"), metavar="DIR")
    parser.add_argument("--traffic", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--policies", nargs="+", choices=EVICTIONS, default=list(EVICTIONS))
    parser.add_argument("--processes", type=positive, default=2, metavar="N")
    add_output(parser, "cache", "png", "md")
    options = parser.parse_args()
    stem = output_stem(options.output, "cache")
    about = circumstances("cache_bench.py")
    found: list[CacheRun] = []
    total = sum(len(SIZES[name]) for name in options.traffic) * (
        len(options.policies) + len(OPTIMA)
    )
    going = runs(options.traffic, options.policies, options.traces, options.processes)
    for run in tqdm(going, total=total, unit="run"):
        found.append(run)
        written = _write(stem, about, found)
    print(table(found))
    print(written)


if __name__ == "__main__":
    main()
