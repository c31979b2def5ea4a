"""Stop a server a hundred times, and load its models a hundred times while they are used.

    python loadtests/endurance_run.py                          # 100 stops, 100 loads
    python loadtests/endurance_run.py --stops 10 --loads 0

Stops are of `charonia serve` on a small random model: idle, while it starts, with streams, while a
lost engine comes back, and during a reload, by SIGTERM and SIGINT. Each must end with exit code 0
within ten seconds, without a word of an abort or a lost engine in its log, leave no process, shared
memory or directory, and let no client wait.

Loads are of every model of one server, by Triton's model control, while streams run through
`scheduler` and `llm`. After each the server must answer on all ways in as before, and the streams
must have ended as they should: with all their tokens, or, where the scheduler itself was loaded,
with an error after which they may be sent again.

The exit code is 0 only where all of that holds.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

from tqdm import tqdm

from paths import TESTS

# It shares streams, checkpoints and `charonia serve` as a command with the end-to-end tests.
sys.path.append(str(TESTS))

from charonia.errors import CharoniaError
from charonia.launch.server.run import running_server
from command_line import add_output, exit_on_sigterm, make_parser
from endurance.loads import holding, loads
from endurance.stops import stops
from endurance.trials import Holding, Report, Trial, as_markdown
from record import circumstances, output_stem, write_record
from support.checkpoints import make_checkpoint
from support.e2e import one_torch_thread

MAX_MODEL_LEN = 4096
SETTINGS = ("num_gpu_blocks_override=2049", "max_num_seqs=32")


def main() -> None:
    """Run as the command line says."""
    options = _parser().parse_args()
    stem = output_stem(options.output, "endurance")
    exit_on_sigterm("endurance_run")
    about = {
        **circumstances("endurance_run.py"),
        "versions": {name: version(name) for name in ("charonia", "nvidia-pytriton", "torch")},
        "seed": options.seed,
    }
    trials: list[Trial] = []
    before = after = None
    with tempfile.TemporaryDirectory(prefix="endurance-") as directory, one_torch_thread():
        model = make_checkpoint(Path(directory) / "model", max_position_embeddings=MAX_MODEL_LEN)
        try:
            _collect(trials, stops(options.stops, model, options.seed), options.stops)
            if options.loads:
                before, after = _load(trials, model, options)
        except CharoniaError as error:
            print(f"endurance_run: {error}", file=sys.stderr)
    report = Report(about, trials, options.stops + options.loads, before, after)
    print(as_markdown(report))
    print(f"\n{write_record(stem, report.as_json())}")
    if not report.holds:
        raise SystemExit("endurance_run: not all holds that must")


def _load(
    trials: list[Trial], model: Path, options: argparse.Namespace
) -> tuple[Holding, Holding | None]:
    """Load the models of one server; what that held before and after."""
    log: list[str] = []
    with running_server(model=model, settings=SETTINGS, on_log=log.append) as server:
        before = holding(server)
        _collect(trials, loads(options.loads, server, log, options.seed), options.loads)
        return before, holding(server) if server.is_running else None


def _collect(trials: list[Trial], run: Iterable[Trial], total: int) -> None:
    """Run trials, with a line that says how far it is."""
    with tqdm(total=total, smoothing=0.1) as progress:
        for trial in run:
            trials.append(trial)
            progress.set_postfix_str(trial.kind)
            for finding in trial.findings:
                progress.write(f"{trial.kind}: {finding}")
            progress.update()


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__)
    for name in ("stops", "loads"):
        parser.add_argument(
            f"--{name}", type=int, default=100, metavar="N", help="how many (default: 100)"
        )
    parser.add_argument("--seed", type=int, default=0, help="of order and moments (default: 0)")
    add_output(parser, "endurance")
    return parser


if __name__ == "__main__":
    main()
