"""Arguments of the commands that run the scheduler without an engine: simulate, replay.

Owns the grammar and the translation of options into the arguments of each command's own module.
That module is imported when the command is called.
"""

import argparse
from pathlib import Path

from charonia.launch.commands.arguments.values import number_range, positive, positive_float, share


def add_simulate(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `charonia simulate`."""
    simulate = commands.add_parser(
        "simulate",
        help="run a trace of requests through the scheduler, without an engine",
        description="Run a trace of requests through the real scheduler on a virtual clock. Steps "
        "take as long as an engine's would. Print what requests would get.",
    )
    simulate.add_argument(
        "trace",
        type=Path,
        metavar="TRACE",
        help="JSON lines with timestamp, input_length and output_length, or a CSV file of Azure's",
    )
    simulate.add_argument(
        "--step-times",
        required=True,
        metavar="WHAT",
        help="a steps.jsonl that a server recorded, a JSON file of a fit, or constants. Constants "
        "are step, and an addition per token, row, context (cached token read) and pair (query and "
        "key); around the step gap, transit, host and host_row. Example: "
        "step=8ms,token=25us,context=20ns",
    )
    simulate.add_argument(
        "--policy",
        action="append",
        default=[],
        metavar="P",
        dest="policies",
        help="fcfs, priority, deadline, fair, fair+priority or fair+deadline; repeat to compare",
    )
    simulate.add_argument(
        "--kv-tokens", type=positive, metavar="N", help="size of the KV cache in tokens"
    )
    simulate.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="settings",
        help="an engine argument or scheduler parameter, as in serve; may be repeated",
    )
    shape = simulate.add_argument_group("traffic, if it is to differ from the trace")
    shape.add_argument(
        "--requests",
        type=positive,
        metavar="N",
        help="number of requests; a shorter trace is repeated",
    )
    shape.add_argument("--rate", type=positive_float, metavar="R", help="requests per second")
    shape.add_argument("--arrivals", choices=("trace", "poisson", "bursty"), default="trace")
    shape.add_argument(
        "--burstiness",
        type=positive_float,
        default=4.0,
        metavar="V",
        help="coefficient of variation of the times between arrivals, for bursty",
    )
    shape.add_argument(
        "--tenants", type=positive, metavar="N", help="number of tenants, of unlike size"
    )
    shape.add_argument("--priorities", type=positive, metavar="N")
    shape.add_argument(
        "--deadline-ms",
        type=number_range,
        metavar="A:B",
        help="give each request a deadline from A to B",
    )
    shape.add_argument(
        "--max-tokens",
        type=positive,
        metavar="N",
        help="max_tokens where the trace has none (default: what was generated)",
    )
    shape.add_argument(
        "--adversary",
        type=share,
        default=0.0,
        metavar="S",
        help="share of the requests that one tenant sends at once, with the longest prompts",
    )
    simulate.add_argument(
        "--by",
        choices=("tenant", "priority", "none"),
        help="what to group requests by into classes (default: tenant and priority, where there"
        " are several)",
    )
    simulate.add_argument("--seed", type=int, default=0, metavar="N")
    simulate.add_argument(
        "--output", type=Path, metavar="DIR", help="write tables, a plot and the trace of each run"
    )
    simulate.set_defaults(run=_run_simulate)


def add_replay(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `charonia replay`."""
    replay = commands.add_parser(
        "replay",
        help="repeat a recorded run of the scheduler and compare its plans",
        description="Repeat the calls of a recorded run of the scheduler, without an engine, and "
        "compare each plan with the recorded one, byte for byte. A server records with --set "
        "scheduler.record_dir=DIR --set scheduler.record_schedule=true. The first difference "
        "is printed, and the exit code is then 1.",
    )
    replay.add_argument("journal", type=Path, metavar="FILE", help="schedule-….journal")
    replay.add_argument(
        "--show",
        type=number_range,
        metavar="A:B",
        help="print plans A to B as lines of JSON",
    )
    replay.set_defaults(run=_run_replay)


def _run_simulate(options: argparse.Namespace) -> None:
    from charonia.launch.commands.simulate import SimulateOptions, simulate
    from charonia.simulate.workload import Shape

    simulate(
        SimulateOptions(
            trace=options.trace,
            step_times=options.step_times,
            policies=options.policies,
            settings=options.settings,
            kv_tokens=options.kv_tokens,
            shape=Shape(
                num_requests=options.requests,
                rate=options.rate,
                arrivals=options.arrivals,
                burstiness=options.burstiness,
                num_tenants=options.tenants,
                num_priorities=options.priorities,
                deadline_ms=options.deadline_ms,
                max_tokens=options.max_tokens,
                adversary=options.adversary,
            ),
            by=None if options.by is None else () if options.by == "none" else (options.by,),
            seed=options.seed,
            output=options.output,
        )
    )


def _run_replay(options: argparse.Namespace) -> None:
    from charonia.launch.commands.replay import replay

    replay(options.journal, options.show)
