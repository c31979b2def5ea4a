"""Measure what the control plane costs: plan() and apply() of a step, by what happens and policy.

    python loadtests/control_bench.py                              # 256 rows, all policies
    python loadtests/control_bench.py --rows 32 --waiting 0 10000 --kinds steady churn

The real scheduler plans steps of rows that decode, and gets a result for each at once; nothing is
computed. Tenants and three priorities are spread over the requests. Policies take turns, a step
each, so that the machine's drift is everybody's. What happens in the steps that are timed is the
kind of a case, see `control_kinds.py`; that it did is asserted step by step. Where requests get
rows, there are cases in which all must have room until their ends, with `PeakMemory`.
"""

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path

from tqdm import tqdm

from charonia.config import EngineArgs, SchedulerArgs
from charonia.control import Policy
from charonia.core.scheduler_factory import policy_of
from charonia.launch.commands.simulate import POLICIES, with_policy
from command_line import add_output, make_parser
from control_kinds import KINDS, Bench, Size, Timed
from plot import make_figure, save
from record import circumstances, output_stem, write_record
from report import markdown_table

GOAL_MS = 0.5
GOAL_SIZES = (256, 10_000, 256)
"""Rows, waiting requests, tenants: for so many and fewer is the goal."""
WITH_PEAK = ("admission", "displacement")
"""Kinds of cases in which it is asked who will have room."""


def policies() -> Mapping[str, Callable[[], Policy]]:
    """Each policy that can be configured, by name."""
    common = EngineArgs(model="timed"), SchedulerArgs()
    return {
        name: partial(policy_of, *with_policy(name, *common), lambda tenant: 1.0)
        for name in POLICIES
    }


@dataclass(frozen=True)
class Case:
    """One policy, kind and size: medians of many steps, in milliseconds.

    Attributes:
        expected_peak: whether those that get a row must have room until their ends.
        change_ms: for one request that ends and another one that comes.
    """

    policy: str
    kind: str
    expected_peak: bool
    rows: int
    waiting: int
    tenants: int
    change_ms: float
    plan_ms: float
    apply_ms: float

    @property
    def together_ms(self) -> float:
        """Milliseconds of plan() and apply() together."""
        return self.plan_ms + self.apply_ms

    @property
    def verdict(self) -> str:
        """Result: "met", "missed", or "" beyond the rows, requests or tenants of the goal."""
        sizes = zip((self.rows, self.waiting, self.tenants), GOAL_SIZES, strict=True)
        if any(own > most for own, most in sizes):
            return ""
        return "met" if self.together_ms < GOAL_MS else "missed"


def measure(kind: str, size: Size, *, expected_peak: bool = False) -> list[Case]:
    """Time steps of each policy in which such a thing may happen, in turns."""
    benches = {
        name: Bench(policy, KINDS[kind](), size, expected_peak=expected_peak)
        for name, policy in ((name, make()) for name, make in policies().items())
        if policy.displacement is not None or not KINDS[kind].displaces
    }
    found: dict[str, list[Timed]] = {name: [] for name in benches}
    order, names = random.Random(0), list(benches)
    for _ in range(size.steps):
        order.shuffle(names)
        for name in names:
            found[name].append(benches[name].step())
    for bench in benches.values():
        bench.end()
    return [
        Case(
            name,
            kind,
            expected_peak,
            size.rows,
            size.waiting,
            size.tenants,
            change_ms=1e3 * statistics.median(one.change_s for one in steps),
            plan_ms=1e3 * statistics.median(one.plan_s for one in steps),
            apply_ms=1e3 * statistics.median(one.apply_s for one in steps),
        )
        for name, steps in found.items()
    ]


COLUMNS: Mapping[str, Callable[[Case], str]] = {
    "kind": lambda case: case.kind + (", expected peak" if case.expected_peak else ""),
    "policy": lambda case: case.policy,
    "rows": lambda case: str(case.rows),
    "waiting": lambda case: f"{case.waiting:,}",
    "tenants": lambda case: str(case.tenants),
    "end and add, ms": lambda case: f"{case.change_ms:.3f}" if case.change_ms else "",
    "plan(), ms": lambda case: f"{case.plan_ms:.3f}",
    "apply(), ms": lambda case: f"{case.apply_ms:.3f}",
    "together, ms": lambda case: f"{case.together_ms:.3f}",
    f"goal: below {GOAL_MS}": lambda case: case.verdict,
}


def table(cases: Sequence[Case]) -> str:
    """The cases as Markdown."""
    return markdown_table(
        list(COLUMNS), [[cell(case) for cell in COLUMNS.values()] for case in cases]
    )


def write_plot(cases: Sequence[Case], path: Path) -> None:
    """Milliseconds of a step against what waits, a line per policy."""
    kinds = list(dict.fromkeys((case.kind, case.expected_peak) for case in cases))
    tenants = list(dict.fromkeys(case.tenants for case in cases))
    figure = make_figure(5.5 * len(tenants), 3.5 * len(kinds))
    axes = figure.subplots(len(kinds), len(tenants), sharey="row", squeeze=False)
    for axis, ((kind, expected_peak), num_tenants) in zip(
        axes.flat, product(kinds, tenants), strict=True
    ):
        lines: dict[str, list[Case]] = {}
        for case in cases:
            if (case.kind, case.expected_peak, case.tenants) == (kind, expected_peak, num_tenants):
                lines.setdefault(case.policy, []).append(case)
        for name, own in lines.items():
            together = [case.together_ms for case in own]
            axis.plot([case.waiting for case in own], together, marker="o", label=name)
        axis.axhline(GOAL_MS, color="black", linewidth=0.8, linestyle="dashed", label="goal")
        axis.set_xscale("symlog", linthresh=10)
        axis.set_xlim(left=-1)
        axis.set_ylim(bottom=0)
        axis.set_xlabel("waiting requests")
        axis.set_title(f"{kind}{', expected peak' if expected_peak else ''}, {num_tenants} tenants")
    for axis in axes[:, 0]:
        axis.set_ylabel(f"plan() + apply() of {cases[0].rows} rows, ms")
    axes[0][0].legend(fontsize="small")
    save(figure, path)


def main() -> None:
    """Measure as the command line says."""
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=256, metavar="N", help="default: 256")
    parser.add_argument(
        "--waiting", type=int, nargs="+", default=[0, 10, 100, 1_000, 10_000], metavar="N"
    )
    parser.add_argument(
        "--tenants", type=int, nargs="+", default=[8, 256], metavar="N", help="default: 8 and 256"
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND")
    parser.add_argument("--steps", type=int, default=200, metavar="N", help="default: 200")
    add_output(parser, "control", "png")
    options = parser.parse_args()
    stem = output_stem(options.output, "control")
    about = circumstances("control_bench.py")
    cases: list[Case] = []
    kinds = [(kind, False) for kind in options.kinds]
    kinds += [(kind, True) for kind in options.kinds if kind in WITH_PEAK]
    sizes = list(product(kinds, options.tenants, options.waiting))
    for (kind, expected_peak), tenants, waiting in tqdm(sizes, unit="size"):
        size = Size(options.rows, waiting, tenants, options.steps)
        cases += measure(kind, size, expected_peak=expected_peak)
    print(table(cases))
    found = about | {"cases": [asdict(case) for case in cases]}
    written = write_record(stem, found, draw=partial(write_plot, cases))
    print(f"\n{written}")


if __name__ == "__main__":
    main()
