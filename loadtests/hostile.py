"""Attack a server at full strength beside a neighbour, and measure what the neighbour notices.

    python loadtests/hostile.py                                   # all attacks, six times each
    python loadtests/hostile.py --attacks "never read" "noise on ports" --strength 1

A real tritonserver serves a small random model in float32, whose steps take 10 ms at least: no real
model is faster. The attacks are those of tests/e2e/test_hostile.py, several times as strong, each
in a process of its own; they end by themselves, and go to this machine alone. Meanwhile a neighbour
repeats one request with a seed over gRPC to `scheduler`. Its median time is compared with that
right before the attack, so that what the attacker's own process takes of the machine counts as the
attack's. Memory is that of each process alone. The last round says what every further attack would
add: in the first one allocators grow to their size.

The exit code is 0 where every neighbour was answered as always, and shown to be at most 1.5 times
slower in the median of all rounds (medians.py), no process was replaced, no attack left connections
or files open, and the last round left no more memory than it may: all of it, for tritonserver gives
much of it back late.
"""

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

from tqdm import tqdm

from paths import TESTS

# It shares attacks and checkpoints with the end-to-end tests.
sys.path.append(str(TESTS))

from charonia.errors import CharoniaError
from charonia.launch.server.run import running_server
from command_line import add_output, exit_on_sigterm, make_parser, positive
from medians import median_interval
from record import circumstances, output_stem, write_record
from report import markdown_table
from support.checkpoints import make_checkpoint
from support.e2e import one_torch_thread
from support.faults import make_faulty_repository
from support.hostile.catalogue import ATTACKS
from support.hostile.target import Attack, Target
from support.hostile.trial import Arena, Outcome, excess_of
from support.leftovers import leftovers
from thresholds import Verdict, verdict

STEP_S = 0.01
MAX_SLOWDOWN = 1.5
SETTINGS = ("dtype=float32", "num_gpu_blocks_override=2049", "max_num_seqs=64", "cpu_threads=1")
MAX_MODEL_LEN = 4096
MEBIBYTE = 2**20


def main() -> None:
    """Attack as the command line says."""
    options = _parser().parse_args()
    stem = output_stem(options.output, "hostile")
    exit_on_sigterm("hostile")
    outcomes: list[list[Outcome]] = []
    try:
        left = _attack(options, outcomes)
    except (AssertionError, CharoniaError) as error:
        raise SystemExit(f"hostile: {error}") from None
    print(as_markdown(outcomes))
    record = _about(options) | {
        "rounds": [[asdict(outcome) for outcome in each] for each in outcomes],
        "left": left,
    }
    print(f"\n{write_record(stem, record)}")
    reasons = [f"left behind: {what}" for what in left]
    for each in zip(*outcomes, strict=True):
        reasons += verdicts(each)
    reasons += memory_verdicts(outcomes[-1])
    if reasons:
        raise SystemExit("\n".join(["hostile: not all holds that must", *reasons]))


def verdicts(each: tuple[Outcome, ...]) -> list[str]:
    """Describe the faults of one attack in all rounds."""
    reasons = [_harm(outcome) for outcome in each if not holds(outcome)]
    if (said := pace_verdict(each)) != "met":
        reasons.append(
            f"the neighbour was {slowdown(each):.2f} times slower; that the median is"
            f" {MAX_SLOWDOWN} at most: {said}"
        )
    return [f"{each[0].attack}: {reason}" for reason in reasons]


def memory_verdicts(last_round: Sequence[Outcome]) -> list[str]:
    """Describe the processes that kept too much memory of all attacks of a round."""
    total: Counter[str] = Counter()
    for outcome in last_round:
        total.update(outcome.growth)
    return [f"{role} kept {_mebibytes(num)}" for role, num in excess_of(total).items()]


def slowdown(each: tuple[Outcome, ...]) -> float:
    """The median of all rounds."""
    return median(outcome.slowdown for outcome in each)


def paces(each: tuple[Outcome, ...]) -> list[float]:
    """The neighbour's, beside the attack over right before it."""
    return [1 / outcome.slowdown for outcome in each]


def pace_verdict(each: tuple[Outcome, ...]) -> Verdict:
    """Judge whether the neighbour kept its pace."""
    return verdict(median_interval(paces(each)), 1 / MAX_SLOWDOWN)


def holds(outcome: Outcome) -> bool:
    """Return whether an attack did no harm, but for time and memory."""
    is_unharmed = outcome.noticed is None and not outcome.num_restarts and not outcome.replaced
    return outcome.failure is None and is_unharmed and not outcome.left_open


def as_markdown(rounds: list[list[Outcome]]) -> str:
    """A table of all attacks: of all rounds, and the memory of the first and the last."""
    head = ["attack", "seconds", "neighbour equal", "slower: median (its interval)"]
    head += [f"{MAX_SLOWDOWN} at most", "memory, first round", "last round", "restarts", "harm"]
    rows = [
        [
            each[0].attack,
            f"{max(outcome.seconds for outcome in each):.1f}",
            "yes" if all(outcome.noticed is None for outcome in each) else "NO",
            f"{slowdown(each):.2f} ({_slowdowns(each)})",
            pace_verdict(each),
            _memory(each[0]),
            _memory(each[-1]),
            str(sum(outcome.num_restarts for outcome in each)),
            "; ".join(_harm(outcome) for outcome in each if not holds(outcome)) or "none",
        ]
        for each in zip(*rounds, strict=True)
    ]
    return markdown_table(head, rows)


def _slowdowns(each: tuple[Outcome, ...]) -> str:
    interval = median_interval(paces(each))
    return f"{1 / interval.high:.2f} to {1 / interval.low:.2f}" if interval else "too few rounds"


def _memory(outcome: Outcome) -> str:
    """The process that grew most."""
    role, num_bytes = max(outcome.growth.items(), key=lambda item: item[1])
    return f"{_mebibytes(num_bytes)} ({role})"


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / MEBIBYTE:+.0f} MiB"


def _harm(outcome: Outcome) -> str:
    parts = [outcome.failure, outcome.noticed, *outcome.replaced, *outcome.left_open]
    return ", ".join(part[:80] for part in parts if part)


def _attack(options: argparse.Namespace, outcomes: list[list[Outcome]]) -> list[str]:
    """Fill in what came of every attack, round by round; returns what is left of the server.

    Raises:
        AssertionError, CharoniaError: it cannot go on.
    """
    with (
        tempfile.TemporaryDirectory(prefix="hostile-") as directory,
        ProcessPoolExecutor(1, get_context("spawn")) as attacker,
        tqdm(total=options.rounds * len(options.attacks), unit="attack") as progress,
        one_torch_thread(),
    ):
        model = make_checkpoint(Path(directory), max_position_embeddings=MAX_MODEL_LEN)

        def run(attack: Attack, target: Target, strength: int) -> None:
            attacker.submit(_run, attack.name, target, strength).result()

        source = make_faulty_repository(Path(directory) / "model_repository", step_s=STEP_S)
        with running_server(model=model, settings=SETTINGS, source=source) as server:
            runtime_dir = server.runtime_dir
            arena = Arena(server, run)
            for _ in range(options.rounds):
                outcomes.append([])
                for name in options.attacks:
                    progress.set_postfix_str(name)
                    outcomes[-1].append(arena.trial(ATTACKS[name], options.strength))
                    progress.update()
        return leftovers(runtime_dir)


def _run(name: str, target: Target, strength: int) -> None:
    """Run an attack, in the attacker's process."""
    ATTACKS[name].run(target, strength)


def _about(options: argparse.Namespace) -> dict[str, Any]:
    settings = ("strength", "rounds", "attacks")
    about = {name: getattr(options, name) for name in settings}
    return circumstances("hostile.py") | about | {"settings": SETTINGS, "step_seconds": STEP_S}


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__)
    number = {"type": positive, "metavar": "N"}
    parser.add_argument("--strength", default=4, help="1 is a test's (default: 4)", **number)
    parser.add_argument(
        "--rounds",
        default=6,
        help="of all attacks; fewer show nothing of time (default: 6)",
        **number,
    )
    parser.add_argument(
        "--attacks", nargs="+", choices=ATTACKS, default=[*ATTACKS], metavar="NAME", help="which"
    )
    add_output(parser, "hostile")
    return parser


if __name__ == "__main__":
    main()
