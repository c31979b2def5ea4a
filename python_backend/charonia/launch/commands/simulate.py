"""`charonia simulate`: a trace through one or several policies, in tables and a plot.

Owns what the command's options mean. Must not know how a simulation goes.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

import msgspec
from msgspec.structs import replace
from tqdm import tqdm

from charonia.config import EngineArgs, SchedulerArgs, SchedulingPolicy
from charonia.errors import ConfigError
from charonia.launch.server.repository import split_settings
from charonia.simulate.plots import write_plot
from charonia.simulate.report import By, RunReport, recorded, report, sameness, tables
from charonia.simulate.simulator import Outcome, Setting, Simulation
from charonia.simulate.step_times import StepTimes
from charonia.simulate.workload import Shape, shape
from charonia.traces import TraceRequest, block_length, read_requests, write_requests

_FIRST, *_OTHERS = get_args(SchedulingPolicy)
_FAIR = "fair"
POLICIES = (_FIRST, *_OTHERS, _FAIR, *(f"{_FAIR}+{one}" for one in _OTHERS))
"""Names of runs: a scheduling policy, or fair shares and one within them."""
_ROOM = 8  # tokens, so that the longest request ends by its own length


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """Options of `charonia simulate`.

    Attributes:
        trace: trace of requests. step_times: see `StepTimes.load`.
        policies: each a scheduling policy, "fair", or "fair+" and one; empty takes that of the
            settings.
        settings: as of `charonia serve`.
        kv_tokens: tokens that the KV cache holds; None takes those of the settings.
        by: properties that group requests into classes; None is the tenant and the priority, where
            there are several.
        output: directory for report.json, report.md, plot.png and a trace of each run.
    """

    trace: Path
    step_times: str
    policies: Sequence[str] = ()
    settings: Sequence[str] = ()
    kv_tokens: int | None = None
    shape: Shape = field(default_factory=Shape)
    by: Sequence[By] | None = None
    seed: int = 0
    output: Path | None = None


def simulate(options: SimulateOptions) -> None:
    """Run the simulations, print what they showed, and write it where that is wanted.

    Raises:
        ConfigError: the trace, the step times or the settings are wrong.
    """
    trace = read_requests(options.trace)
    times = StepTimes.load(options.step_times)
    length = block_length(trace)
    by = _groupings(trace, options.shape) if options.by is None else options.by
    named = [_setting(policy, trace, times, options) for policy in options.policies or [""]]
    reports: list[RunReport] = []
    outcomes: list[Outcome] = []
    warn = _warner()
    for name, setting in named:
        outcome = _run(name, setting, trace, length, options, warn)
        pool_tokens = (setting.num_blocks - 1) * setting.engine_args.block_size
        reports.append(report(name, outcome, by, pool_tokens))
        outcomes.append(outcome)
    measured = recorded(trace)
    shown = [measured, *reports] if measured is not None else reports
    text = tables(shown)
    if reason := sameness(reports, [one.request for one in outcomes[0].served]):
        text += f"\n{reason}\n"
    print(text, end="")
    if options.output is not None:
        _write(options, times, text, reports, outcomes)


def _run(
    name: str,
    setting: Setting,
    trace: Sequence[TraceRequest],
    length: int,
    options: SimulateOptions,
    log: Callable[[str], None],
) -> Outcome:
    arrivals = shape(trace, options.shape, options.seed)
    simulation = Simulation(setting, arrivals, length, log=log)
    total = options.shape.num_requests or len(trace)
    with tqdm(total=total, desc=name, unit="request", mininterval=0.5, disable=None) as bar:
        return simulation.run(lambda: bar.update(1))


def _warner() -> Callable[[str], None]:
    """Takes the lines of a server's log, and prints each warning once: runs have them in common."""
    printed = set[str]()

    def warn(line: str) -> None:
        if line.startswith("warning: ") and line not in printed:
            printed.add(line)
            print(f"charonia: {line}", file=sys.stderr)

    return warn


def _setting(
    policy: str, trace: Sequence[TraceRequest], times: StepTimes, options: SimulateOptions
) -> tuple[str, Setting]:
    """Make the setting of one run, and its name."""
    engine, scheduler = split_settings(options.settings)
    args = EngineArgs.from_dict({"model": "simulated", **engine})
    scheduler_args = SchedulerArgs.from_parameters(scheduler)
    scheduler_args.check_engine(args)
    if policy:
        args, scheduler_args = with_policy(policy, args, scheduler_args)
    if args.speculative_config is not None:
        raise ConfigError(
            "speculative_config cannot be simulated: a trace does not say what"
            " drafts would be accepted"
        )
    if options.kv_tokens is not None:
        num_blocks = 1 + options.kv_tokens // args.block_size
    elif args.num_gpu_blocks_override is not None:
        num_blocks = args.num_gpu_blocks_override
    else:
        raise ConfigError("give the tokens that the KV cache holds: --kv-tokens N")
    num_blocks = max(2, num_blocks)
    setting = Setting(
        engine_args=args,
        scheduler_args=scheduler_args,
        num_blocks=num_blocks,
        max_model_len=args.max_model_len
        or _model_len(trace, options.shape, (num_blocks - 1) * args.block_size),
        step_times=times,
        seed=options.seed,
    )
    return policy or _name_of(args, scheduler_args), setting


def _model_len(trace: Sequence[TraceRequest], wanted: Shape, pool_tokens: int) -> int:
    """Return the longest request's length, or that which it may reach if the KV cache allows."""
    longest = max(one.input_length + one.output_length for one in trace)
    allowed = max(one.input_length + (one.max_tokens or wanted.max_tokens or 0) for one in trace)
    return max(longest, min(max(longest, allowed) + _ROOM, pool_tokens))


def with_policy(
    policy: str, engine_args: EngineArgs, scheduler_args: SchedulerArgs
) -> tuple[EngineArgs, SchedulerArgs]:
    """Set the scheduling policy of that name in both.

    Raises:
        ConfigError: there is no such policy.
    """
    fair, plus, within = policy.partition("+")
    if fair != _FAIR:
        fair, within = "", policy
    elif not plus:
        within = _FIRST
    if within not in (_FIRST, *_OTHERS):
        raise ConfigError(f"unknown policy {policy!r}; accepted are {', '.join(POLICIES)}")
    return (
        replace(engine_args, scheduling_policy=within),
        replace(scheduler_args, fair_share=bool(fair)),
    )


def _name_of(engine_args: EngineArgs, scheduler_args: SchedulerArgs) -> str:
    policy = engine_args.scheduling_policy
    if not scheduler_args.fair_share:
        return policy
    return _FAIR if policy == _FIRST else f"{_FAIR}+{policy}"


def _groupings(trace: Sequence[TraceRequest], wanted: Shape) -> list[By]:
    """List the properties in which the requests differ."""
    has_tenants = wanted.num_tenants or wanted.adversary or len({one.tenant for one in trace}) > 1
    has_priorities = wanted.num_priorities or len({one.priority for one in trace}) > 1
    found: list[By] = ["tenant"] if has_tenants else []
    return [*found, "priority"] if has_priorities else found


def _write(
    options: SimulateOptions,
    times: StepTimes,
    text: str,
    reports: Sequence[RunReport],
    outcomes: Sequence[Outcome],
) -> None:
    directory = options.output
    assert directory is not None
    directory.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {
        "trace": options.trace.name,
        "settings": list(options.settings),
        "kv_tokens": options.kv_tokens,
        "shape": asdict(options.shape),
        "seed": options.seed,
        "step_times": msgspec.to_builtins(times),
        "runs": [asdict(one) for one in reports],
    }
    encoded = msgspec.json.format(msgspec.json.encode(settings), indent=2)
    (directory / "report.json").write_bytes(encoded + b"\n")
    (directory / "report.md").write_text(text, encoding="utf-8")
    write_plot(options.trace.name, reports, outcomes, directory / "plot.png")
    for one, outcome in zip(reports, outcomes, strict=True):
        write_requests(directory / f"{one.name}.jsonl.gz", outcome.as_trace())
    print(f"written to {directory}")
