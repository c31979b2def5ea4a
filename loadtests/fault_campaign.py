"""Break the engine again and again while streams run; no client may notice more than a pause.

    python loadtests/fault_campaign.py                          # 200 faults, 16 streams, 2 ranks
    python loadtests/fault_campaign.py --faults 20 --tensor-parallel-size 1

A real tritonserver serves a small random model in float32. First every request is run undisturbed;
then each stream repeats its request without an end, half of them greedy and half sampled, over gRPC
to `scheduler` and `llm` and over HTTP, while faults of these kinds come in random order:

  kill       a random process of the engine is killed with SIGKILL
  stop       a random process of the engine is stopped with SIGSTOP
  exception  a step of the engine raises
  memory     a step of the engine asks for more memory than there is
  poison     a request comes that kills the engine each time it runs

Each fault waits until all streams go on after the one before. What must hold is judged at the end,
and the exit code is 0 only where all of it does.
"""

import argparse
import contextlib
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
# It shares streams, checkpoints and the engine that fails on order with the end-to-end tests.
sys.path.append(str(HERE.parent / "tests"))

from charonia.errors import CharoniaError  # noqa: E402
from charonia.launch.run import running_server  # noqa: E402
from charonia.launch.server import TritonServer  # noqa: E402
from faults.campaign import Campaign, CampaignError, run_undisturbed  # noqa: E402
from faults.footprint import (  # noqa: E402
    own_temporary_directory,
    processes_of,
    ranks_of,
    take_footprint,
)
from faults.lanes import Lane, Request, make_requests  # noqa: E402
from faults.outcome import Outcome  # noqa: E402
from faults.plot import write_plot  # noqa: E402
from faults.report import Report, as_markdown  # noqa: E402
from faults.strikes import urls_of  # noqa: E402
from record import circumstances, new_stem, positive  # noqa: E402
from support.checkpoints import VOCAB_SIZE, make_checkpoint  # noqa: E402
from support.faults import make_faulty_repository, order_fault  # noqa: E402
from support.leftovers import leftovers  # noqa: E402

POISON = VOCAB_SIZE - 1
MAX_MODEL_LEN = 1024
STEP_S = 0.01  # so that the client, which shares the machine, keeps up with the streams
STEP_DEADLINE_S = 8
END_TIMEOUT_S = 10.0


def main() -> None:
    """Run the campaign as the command line says."""
    options = _parser().parse_args()
    # Stops the server.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("fault_campaign: ended by SIGTERM"))
    about = _about(options)
    try:
        outcome = _run(options)
    except (CampaignError, CharoniaError) as error:
        raise SystemExit(f"fault_campaign: {error}") from None
    report = Report(about, outcome)
    print(as_markdown(report))
    stem = options.output or new_stem("faults")
    stem.parent.mkdir(parents=True, exist_ok=True)
    files = [stem.with_name(f"{stem.name}.{ending}") for ending in ("json", "png")]
    files[0].write_text(json.dumps(report.as_json(), indent=1) + "\n", encoding="utf-8")
    write_plot(report, files[1])
    print(f"\nwritten: {files[0].name}, {files[1].name}")
    if not report.holds:
        raise SystemExit("fault_campaign: not all holds that must")


def _run(options: argparse.Namespace) -> Outcome:
    """The campaign on a server of its own, and what is left when that has ended.

    Raises:
        CampaignError, CharoniaError: the campaign cannot even begin.
    """
    outcome = Outcome(options.faults)
    seen: set[psutil.Process] = set()
    with contextlib.ExitStack() as stack:
        files = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="faults-")))
        model = _make_model(files / "checkpoint", options.tensor_parallel_size)
        source = make_faulty_repository(files / "model_repository", step_s=STEP_S)
        temporary = stack.enter_context(own_temporary_directory())
        with _server(model, source, options) as server:
            runtime_dir = server.runtime_dir
            _break(server, options, outcome, seen)
        outcome.left = [
            *leftovers(runtime_dir),
            *(f"process {process.pid}" for process in _wait_for_end(seen)),
            *(path.name for path in temporary.iterdir()),
        ]
    return outcome


def _wait_for_end(processes: set[psutil.Process]) -> list[psutil.Process]:
    """Those that live on. What takes a moment to end is no leak, and another process that was given
    the same number since, as happens within half an hour, is none of them.
    """
    deadline = time.monotonic() + END_TIMEOUT_S
    while alive := [process for process in processes if process.is_running()]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    return alive


def _make_model(directory: Path, num_ranks: int) -> Path:
    """A random model that so many ranks can share."""
    return make_checkpoint(
        directory,
        max_position_embeddings=MAX_MODEL_LEN,
        num_attention_heads=max(4, num_ranks),
        num_key_value_heads=max(2, num_ranks),
    )


@contextlib.contextmanager
def _server(model: Path, source: Path, options: argparse.Namespace) -> Iterator[TritonServer]:
    """A server of the model; its log is kept where that is asked for."""
    settings = (
        "dtype=float32",
        f"max_num_seqs={options.streams + 1}",
        "max_num_batched_tokens=512",
        f"num_gpu_blocks_override={64 * (options.streams + 1)}",
        "cpu_threads=1",
        f"tensor_parallel_size={options.tensor_parallel_size}",
        f"scheduler.min_step_deadline_s={STEP_DEADLINE_S}",
    )
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(options.log.open("w", encoding="utf-8")) if options.log else None
        server = running_server(
            model=model,
            settings=settings,
            source=source,
            on_log=lambda line: print(line, file=log) if log else None,
        )
        yield stack.enter_context(server)


def _break(
    server: TritonServer,
    options: argparse.Namespace,
    outcome: Outcome,
    seen: set[psutil.Process],
) -> None:
    """Fill in the outcome, and the processes that the server ever had."""
    num_found = len(ranks_of(server))
    if num_found < options.tensor_parallel_size:
        raise CampaignError(f"the engine has {num_found} processes, fewer than ranks")
    order_fault(server.repository, "poison", POISON)
    requests = make_requests(options.streams, 1, POISON - 1, options.seed)
    undisturbed = run_undisturbed(server, requests, options.deadline)
    outcome.before = take_footprint(server)
    lanes = [
        Lane(index, request, urls_of(server), tokens)
        for index, (request, tokens) in enumerate(zip(requests, undisturbed, strict=True))
    ]
    campaign = Campaign(
        server, lanes, _poisoned(requests), seed=options.seed, deadline=options.deadline
    )
    try:
        with tqdm(total=options.faults, unit="fault", smoothing=0.1) as progress:
            for record in campaign.run(options.faults):
                outcome.faults.append(record)
                seen |= set(processes_of(server))
                progress.set_postfix_str(f"{record.kind} {record.recovery[-1:] or 'hangs'}")
                progress.update()
        outcome.hanging = campaign.end()
        outcome.idle = campaign.wait_idle()
        outcome.after = take_footprint(server)
    except CampaignError as error:
        outcome.stopped_by = str(error)
    outcome.answers = [answer for lane in lanes for answer in lane.answers]


def _poisoned(requests: list[Request]) -> list[Request]:
    """Requests like these, each with the token that kills at the end of its prompt."""
    return [
        Request([*each.prompt_ids, POISON], each.protocol, each.model, each.sampling)
        for each in requests
    ]


def _about(options: argparse.Namespace) -> dict[str, Any]:
    names = ("charonia", "nvidia-pytriton", "torch", "tritonclient")
    settings = ("faults", "streams", "seed", "tensor_parallel_size", "deadline")
    return {
        **circumstances("fault_campaign.py"),
        "versions": {name: version(name) for name in names},
        **{name: getattr(options, name) for name in settings},
        "step_seconds": STEP_S,
        "min_step_deadline_seconds": STEP_DEADLINE_S,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    number = {"type": positive, "metavar": "N"}
    parser.add_argument("--faults", default=200, help="how many (default: 200)", **number)
    parser.add_argument("--streams", default=16, help="that run meanwhile (default: 16)", **number)
    parser.add_argument(
        "--tensor-parallel-size", default=2, help="ranks of the engine (default: 2)", **number
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of requests, faults and their moments (default: 0)"
    )
    parser.add_argument(
        "--deadline",
        type=float,
        metavar="SECONDS",
        default=90.0,
        help="a stream that has not gone on so long after a fault hangs (default: 90)",
    )
    parser.add_argument("--log", type=Path, metavar="FILE", help="where the server's log goes")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="STEM",
        help="where STEM.json and STEM.png go (default: loadtests/results/DATE-faults, "
        "numbered where that exists)",
    )
    return parser


if __name__ == "__main__":
    main()
