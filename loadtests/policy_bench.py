"""Compare all policies on traffic of all kinds, in the simulator.

    python loadtests/policy_bench.py --traces ../shared/traces         # 100,000 requests each
    python loadtests/policy_bench.py --requests 2000 --traffic bursty  # a quick look
    python loadtests/policy_bench.py --keep build/policies             # may be cut off and repeated

The engine is a model: steps of 8 ms and 20 us per token, 256 rows, 4,096 tokens a step, a KV cache
of 3 million tokens, in blocks of 128 because the blocks are the simulator's own work. Each traffic
comes a tenth faster than that engine serves it when all requests are there at once. Every request
has one of three priorities and a deadline; where the trace has no tenants, five share it.
"""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from tqdm import tqdm

from charonia.config import EngineArgs, SchedulerArgs
from charonia.launch.commands.simulate import POLICIES, with_policy
from charonia.simulate.report import RunReport, report, tables
from charonia.simulate.simulator import Setting, Simulation
from charonia.simulate.step_times import StepTimes
from charonia.simulate.workload import ADVERSARY, Shape, shape
from charonia.traces import TraceRequest, block_length, read_requests
from command_line import add_output, make_parser
from plot import make_figure, save
from record import circumstances, output_stem, write_record

STEP_TIMES = "step=8ms,token=20us,context=1ns,host=1ms,transit=0.5ms,gap=0.2ms"
NUM_ROWS, BUDGET, BLOCK_SIZE, KV_TOKENS = 256, 4096, 128, 3_000_000
LOAD = 1.1
NUM_PROBED = 2000
COMMON = Shape(num_priorities=3, deadline_ms=(10_000, 120_000))
FIVE = replace(COMMON, num_tenants=5)


@dataclass(frozen=True)
class Traffic:
    """A trace, and what is made of it."""

    trace: str
    shape: Shape


TRAFFIC = {
    "conversation": Traffic("conversation.jsonl.gz", FIVE),
    "agents": Traffic("agents.jsonl.gz", FIVE),
    "tenants": Traffic("tenants.jsonl.gz", COMMON),
    "azure_code": Traffic("azure_code.csv.gz", FIVE),
    "poisson": Traffic("tenants.jsonl.gz", replace(COMMON, arrivals="poisson")),
    "bursty": Traffic("tenants.jsonl.gz", replace(COMMON, arrivals="bursty")),
    "adversarial": Traffic("tenants.jsonl.gz", replace(COMMON, arrivals="poisson", adversary=0.1)),
}


def setting_of(policy: str, trace: Sequence[TraceRequest], seed: int) -> Setting:
    """The modelled engine under a policy."""
    longest = max(one.input_length + one.output_length for one in trace)
    common = EngineArgs(
        model="simulated",
        max_num_seqs=NUM_ROWS,
        max_num_batched_tokens=BUDGET,
        block_size=BLOCK_SIZE,
    )
    engine_args, scheduler_args = with_policy(policy, common, SchedulerArgs(max_queue_size=4096))
    return Setting(
        engine_args=engine_args,
        scheduler_args=scheduler_args,
        num_blocks=1 + KV_TOKENS // BLOCK_SIZE,
        max_model_len=longest + 8,
        step_times=StepTimes.load(STEP_TIMES),
        seed=seed,
    )


def capacity(trace: Sequence[TraceRequest]) -> float:
    """Requests per second that are served when all are there at once."""
    wanted = Shape(num_requests=NUM_PROBED, rate=1e6)
    setting = setting_of(POLICIES[0], trace, 0)
    outcome = Simulation(setting, shape(trace, wanted, 0), block_length(trace)).run()
    return sum(one.is_finished for one in outcome.served) / outcome.seconds


def simulate(
    name: str, policy: str, folder: Path, count: int, rate: float, seed: int
) -> tuple[str, RunReport, float]:
    """Run one traffic under one policy; its name, the report and the seconds that took."""
    traffic = TRAFFIC[name]
    trace = read_requests(folder / traffic.trace)
    wanted = replace(traffic.shape, num_requests=count, rate=rate)
    started = time.perf_counter()
    setting = setting_of(policy, trace, seed)
    outcome = Simulation(setting, shape(trace, wanted, seed), block_length(trace)).run()
    seconds = time.perf_counter() - started
    return name, report(policy, outcome, ("tenant", "priority"), KV_TOKENS), seconds


class Kept:
    """Finished runs of this commit in a folder, so that none is repeated after a cut.

    Args:
        folder: None keeps nothing.
    """

    def __init__(self, folder: Path | None, commit: str | None, count: int, seed: int) -> None:
        self._folder = None if commit is None or commit.endswith("-dirty") else folder
        self._name = f"{commit}-{count}-{seed}"

    def find(self, name: str, policy: str) -> tuple[RunReport, float] | None:
        """A run's report and its seconds, if it was kept."""
        path = self._path(name, policy)
        if path is None or not path.exists():
            return None
        return msgspec.json.decode(path.read_bytes(), type=tuple[RunReport, float])

    def keep(self, name: str, one: RunReport, seconds: float) -> None:
        """Keep a run."""
        path = self._path(name, one.name)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            beside = path.with_suffix(".part")
            beside.write_bytes(msgspec.json.encode((one, seconds)))
            beside.replace(path)

    def _path(self, name: str, policy: str) -> Path | None:
        return None if self._folder is None else self._folder / f"{self._name}-{name}-{policy}.json"


def runs(
    wanted: Sequence[tuple[str, str]], folder: Path, count: int, seed: int, num_processes: int
) -> Iterator[tuple[str, RunReport, float]]:
    """Runs of traffic under a policy, as they end."""
    names = list(dict.fromkeys(name for name, _ in wanted))
    with ProcessPoolExecutor(num_processes) as pool:
        traces = {name: read_requests(folder / TRAFFIC[name].trace) for name in names}
        rates = {
            name: LOAD * rate
            for name, rate in zip(names, pool.map(capacity, traces.values()), strict=True)
        }
        waiting = [
            pool.submit(simulate, name, policy, folder, count, rates[name], seed)
            for name, policy in wanted
        ]
        for done in as_completed(waiting):
            yield done.result()


def write_plot(found: dict[str, list[RunReport]], path: Path) -> None:
    """Draw, for each traffic, the requests' waits and how many were in time, by policy."""
    figure = make_figure(18, 5)
    axes = figure.subplots(1, 4)
    parts = (
        ("TTFT p99, s", lambda one: one.overall.ttft.p99),
        ("TTFT p99 of the worst tenant but the adversary, s", _p99_of_others),
        ("in time, %", lambda one: 100 * (one.overall.attainment or 0.0)),
        ("service difference / bound", _unfairness),
    )
    policies = [
        name
        for name in POLICIES
        if any(one.name == name for reports in found.values() for one in reports)
    ]
    width = 0.8 / len(policies)
    for axis, (label, value) in zip(axes, parts, strict=True):
        for number, policy in enumerate(policies):
            heights = [
                next((value(one) for one in reports if one.name == policy), None) or 0.0
                for reports in found.values()
            ]
            places = np.arange(len(found)) - 0.4 + width * (number + 0.5)
            axis.bar(places, heights, width, label=policy)
        axis.set_xticks(range(len(found)), list(found), rotation=35, ha="right")
        axis.set_ylabel(label)
    for axis in (axes[0], axes[1], axes[3]):
        axis.set_yscale("log")
    axes[3].axhline(1.0, color="black", linewidth=0.8, linestyle="dashed")
    axes[0].legend(fontsize="small")
    save(figure, path)


def _p99_of_others(one: RunReport) -> float:
    times = [part.ttft.p99 or 0.0 for part in one.classes[1:] if part.name != ADVERSARY]
    return max(times, default=0.0)


def _unfairness(one: RunReport) -> float | None:
    if not one.service_bound or one.service_difference is None:
        return None
    return one.service_difference / one.service_bound


def _write(stem: Path, about: dict[str, Any], found: dict[str, list[RunReport]]) -> str:
    sorted_runs = {
        name: sorted(found[name], key=lambda one: POLICIES.index(one.name))
        for name in TRAFFIC
        if name in found
    }
    text = "\n".join(f"# {name}\n\n{tables(reports)}" for name, reports in sorted_runs.items())
    content = about | {
        "traffic": {name: [asdict(one) for one in reports] for name, reports in sorted_runs.items()}
    }
    return write_record(stem, content, draw=partial(write_plot, sorted_runs), table=text)


def main() -> None:
    """Simulate as the command line says."""
    parser = make_parser(__doc__)
    parser.add_argument("--traces", type=Path, default=Path("../shared/traces"), metavar="DIR")
    parser.add_argument("--traffic", nargs="+", choices=TRAFFIC, default=list(TRAFFIC))
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    parser.add_argument("--requests", type=int, default=100_000, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--processes", type=int, default=2, metavar="N")
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="DIR",
        help="keep finished runs here, and do not repeat those of the same clean commit",
    )
    add_output(parser, "policies", "png", "md")
    options = parser.parse_args()
    stem = output_stem(options.output, "policies")
    about = circumstances("policy_bench.py") | {"step_times": STEP_TIMES, "load": LOAD}
    about |= {"seconds": {}}
    found: dict[str, list[RunReport]] = {}
    kept = Kept(options.keep, about["commit"], options.requests, options.seed)
    wanted = [(name, policy) for name in options.traffic for policy in options.policies]
    missing = []
    for name, policy in wanted:
        if (earlier := kept.find(name, policy)) is None:
            missing.append((name, policy))
        else:
            _add(found, about, name, *earlier)
    going = runs(missing, options.traces, options.requests, options.seed, options.processes)
    for name, one, seconds in tqdm(going, initial=len(wanted) - len(missing), total=len(wanted)):
        kept.keep(name, one, seconds)
        _add(found, about, name, one, seconds)
        _write(stem, about, found)
    print(_write(stem, about, found))


def _add(
    found: dict[str, list[RunReport]],
    about: dict[str, Any],
    name: str,
    one: RunReport,
    seconds: float,
) -> None:
    found.setdefault(name, []).append(one)
    about["seconds"][f"{name}, {one.name}"] = round(seconds, 1)


if __name__ == "__main__":
    main()
