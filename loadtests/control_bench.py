"""Measure what the control plane costs: plan() and apply() of a step, by what waits and by policy.

    python loadtests/control_bench.py                              # 256 rows, all policies
    python loadtests/control_bench.py --rows 32 --waiting 0 10000

The real scheduler plans steps of rows that all decode, and gets a result for each at once; nothing
is computed. Tenants and three priorities are spread over the requests. Policies take turns, a step
each, so that the machine's drift is everybody's. In cases with churn one request ends and another
one comes in each step, as where many short answers are generated.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import matplotlib.pyplot as plt
from tqdm import tqdm

from charonia.control import Limits, Policy, Request, Scheduler
from charonia.control.policies import (
    DeadlineWatch,
    DisplacementByDeadline,
    DisplacementByPriority,
    by_arrival,
    by_deadline,
    by_priority,
    fair,
    ranked,
)
from charonia.protocol import RowResult, RowSampling, StepPlan, StepResult
from record import circumstances, output_stem
from report import markdown_table

NUM_PRIORITIES = 3
PROMPT_TOKENS = 64
BLOCK_SIZE = 16
BUDGET = 4096
BAR_MS = 0.5
FAR = 1e6
"""Seconds, of deadlines that nobody misses."""


def policies() -> Mapping[str, Callable[[], Policy]]:
    """Each policy that can be configured, by name."""
    aged = by_priority(60.0)
    displacement = DisplacementByPriority(aged)
    sooner = DisplacementByDeadline()

    def equal(tenant: str) -> float:
        return 1.0

    def watch() -> DeadlineWatch:
        return DeadlineWatch(BUDGET, demotes=False)

    return {
        "first come first served": lambda: ranked(by_arrival),
        "priority with aging": lambda: ranked(aged, displacement),
        "earliest deadline first": lambda: ranked(by_deadline, sooner, watch()),
        "fair": lambda: fair(by_arrival, equal),
        "fair, priority within": lambda: fair(aged, equal, displacement),
        "fair, deadline within": lambda: fair(by_deadline, equal, sooner, watch()),
    }


@dataclass(frozen=True)
class Case:
    """One policy and size: medians of many steps, in milliseconds.

    Attributes:
        change_ms: for one request that ends and another one that comes.
    """

    policy: str
    rows: int
    waiting: int
    tenants: int
    churn: bool
    change_ms: float
    plan_ms: float
    apply_ms: float


class Bench:
    """A scheduler with all its rows decoding, and requests that wait behind them.

    Those that wait have no smaller priority than those that run, so that nobody is displaced while
    it is timed.
    """

    def __init__(
        self, policy: Policy, rows: int, waiting: int, steps: int, tenants: int, *, churn: bool
    ) -> None:
        self._tenants = tenants
        self._churns = False
        self._num_tokens = num_tokens = PROMPT_TOKENS + steps + 64
        limits = Limits(
            num_blocks=2 + rows * (-(-num_tokens // BLOCK_SIZE) + 1) * 102 // 100,
            block_size=BLOCK_SIZE,
            max_model_len=2 * num_tokens,
            max_num_seqs=rows,
            max_num_batched_tokens=BUDGET,
        )
        self._scheduler = Scheduler(limits, hash_secret=b"benchmark", policy=policy)
        self._drawn = random.Random(0)
        self._num_added = 0
        for number in range(rows + waiting):
            priority = 0 if number < rows else number % NUM_PRIORITIES
            self._scheduler.add(self._new(priority))
        while self._scheduler.num_running < rows:
            self.step()
        for _ in range(8):  # the last prompts are computed, and one token each is the rest
            self.step()
        self._churns = churn

    def _new(self, priority: int) -> Request:
        number, self._num_added = self._num_added, self._num_added + 1
        return Request(
            key=str(number),
            token_ids=[self._drawn.randrange(50_000) for _ in range(PROMPT_TOKENS)],
            num_prompt=PROMPT_TOKENS,
            sampling=RowSampling(seed=1),
            max_tokens=self._num_tokens,
            stop_ids=frozenset({0}),
            arrived_at=float(number),
            tenant=str(number % self._tenants),
            priority=priority,
            expires_at=FAR + number,
        )

    def step(self) -> tuple[float, float, float]:
        """Seconds of changes, of plan() and of apply()."""
        change_s = self._change() if self._churns else 0.0
        started = time.perf_counter()
        plan = self._scheduler.plan(0.0)
        planned = time.perf_counter()
        assert plan is not None
        result = self._result(plan)
        arrived = time.perf_counter()
        self._scheduler.apply(result, 0.0)
        return change_s, planned - started, time.perf_counter() - arrived

    def _change(self) -> float:
        """One request ends and another one comes; seconds of that."""
        running = [one.key for one in self._scheduler.requests if one.row is not None]
        gone, priority = self._drawn.choice(running), self._drawn.randrange(NUM_PRIORITIES)
        request = self._new(priority)
        started = time.perf_counter()
        self._scheduler.finish(gone)
        self._scheduler.add(request)
        return time.perf_counter() - started

    def _result(self, plan: StepPlan) -> StepResult:
        """A token for each row that has computed all it knows."""
        requests = {one.row: one for one in self._scheduler.requests if one.row is not None}
        rows = []
        for step in plan.rows:
            request = requests[step.row]
            is_through = request.num_computed + step.num_tokens == len(request.token_ids)
            rows.append(RowResult(step.row, [7] if is_through else []))
        return StepResult(epoch=plan.epoch, step_id=plan.step_id, rows=rows, seconds=0.01)


def measure(rows: int, waiting: int, steps: int, tenants: int, *, churn: bool) -> list[Case]:
    """Time so many steps of each policy, in turns."""
    benches = {
        name: Bench(make(), rows, waiting, steps, tenants, churn=churn)
        for name, make in policies().items()
    }
    seconds: dict[str, list[tuple[float, float, float]]] = {name: [] for name in benches}
    order, names = random.Random(0), list(benches)
    for _ in range(steps):
        order.shuffle(names)
        for name in names:
            seconds[name].append(benches[name].step())
    return [
        Case(
            name,
            rows,
            waiting,
            tenants,
            churn,
            *(1e3 * statistics.median(parts) for parts in zip(*found, strict=True)),
        )
        for name, found in seconds.items()
    ]


def table(cases: Sequence[Case]) -> str:
    """The cases as Markdown."""
    return markdown_table(
        [
            "policy",
            "rows",
            "waiting",
            "tenants",
            "churn",
            "plan(), ms",
            "apply(), ms",
            "together, ms",
        ],
        [
            [
                case.policy,
                str(case.rows),
                f"{case.waiting:,}",
                str(case.tenants),
                "yes" if case.churn else "",
                f"{case.change_ms:.3f}" if case.churn else "",
                f"{case.plan_ms:.3f}",
                f"{case.apply_ms:.3f}",
                f"{case.plan_ms + case.apply_ms:.3f}",
            ]
            for case in cases
        ],
    )


def write_plot(cases: Sequence[Case], path: Path) -> None:
    """Milliseconds of a step against what waits, a line per policy."""
    kinds = list(dict.fromkeys((case.tenants, case.churn) for case in cases))
    figure, axes = plt.subplots(
        1, len(kinds), figsize=(5.5 * len(kinds), 4.5), sharey=True, squeeze=False
    )
    figure.set_layout_engine("constrained")
    for axis, (tenants, churn) in zip(axes[0], kinds, strict=True):
        for name in dict.fromkeys(case.policy for case in cases):
            own = [
                case
                for case in cases
                if (case.policy, case.tenants, case.churn) == (name, tenants, churn)
            ]
            together = [case.plan_ms + case.apply_ms for case in own]
            axis.plot([case.waiting for case in own], together, marker="o", label=name)
        axis.axhline(BAR_MS, color="black", linewidth=0.8, linestyle="dashed", label="bar")
        axis.set_xscale("symlog", linthresh=10)
        axis.set_xlim(left=-1)
        axis.set_xlabel("waiting requests")
        axis.set_title(f"{tenants} tenants{', one comes and goes in each step' if churn else ''}")
    axes[0][0].set_ylim(0, 1.05 * max(case.plan_ms + case.apply_ms for case in cases))
    axes[0][0].set_ylabel(f"plan() + apply() of {cases[0].rows} rows, ms")
    axes[0][0].legend(fontsize="small")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measure as the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=256, metavar="N", help="default: 256")
    parser.add_argument(
        "--waiting", type=int, nargs="+", default=[0, 10, 100, 1_000, 10_000], metavar="N"
    )
    parser.add_argument(
        "--tenants", type=int, nargs="+", default=[8, 256], metavar="N", help="default: 8 and 256"
    )
    parser.add_argument("--steps", type=int, default=200, metavar="N", help="default: 200")
    parser.add_argument(
        "--output", type=Path, metavar="STEM", help="default: results/DATE-control, beside this"
    )
    options = parser.parse_args()
    stem = output_stem(options.output, "control")
    about = circumstances("control_bench.py")
    cases: list[Case] = []
    sizes = list(product((False, True), options.tenants, options.waiting))
    for churn, tenants, waiting in tqdm(sizes, unit="size"):
        cases += measure(options.rows, waiting, options.steps, tenants, churn=churn)
    print(table(cases))
    files = [stem.with_name(f"{stem.name}.{ending}") for ending in ("json", "png")]
    found = about | {"cases": [asdict(case) for case in cases]}
    files[0].write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    write_plot(cases, files[1])
    print(f"\nwritten: {files[0].name}, {files[1].name}")


if __name__ == "__main__":
    main()
