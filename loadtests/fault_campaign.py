"""Break a server again and again while clients call it; none may notice more than it must.

    python loadtests/fault_campaign.py                          # 300 faults, 16 clients, 2 ranks
    python loadtests/fault_campaign.py --faults 20 --tensor-parallel-size 1
    python loadtests/fault_campaign.py --faults 10 --only poison kill-in-reload

A real tritonserver, under the supervisor of `charonia serve`, serves a small random model in
float32. First every request is run undisturbed; then each client repeats its request without an
end, half of them greedy and half sampled: streams over gRPC to `scheduler` and `llm` and over HTTP
to `scheduler`, and unary calls to `generate`. Meanwhile faults come in random order:

{kinds}

Each fault waits until all clients have got tokens after the one before. Those that cost the whole
server come last. What must hold is judged at the end, and the exit code is 0 only where all of it
does.
"""

import argparse
import contextlib
import json
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file, save_file
from tqdm import tqdm

from paths import TESTS

# It shares streams, checkpoints and the engine that fails on order with the end-to-end tests.
sys.path.append(str(TESTS))

from charonia.errors import CharoniaError
from charonia.launch.server.repository import RepositoryOptions
from command_line import add_output, exit_on_sigterm, make_parser, positive
from faults.campaign import Campaign, schedule
from faults.campaign_plot import write_plot
from faults.campaign_report import Report, as_markdown
from faults.clients import Clients, ClientsError
from faults.footprint import own_temporary_directory, processes_of, ranks_of
from faults.kinds import KINDS, Arguments
from faults.outcome import Outcome
from faults.target import Target, TargetError, serving_target
from record import circumstances, output_stem, write_record
from support.checkpoints import VOCAB_SIZE, make_checkpoint
from support.faults import make_faulty_repository, order_fault
from support.leftovers import leftovers

POISON = VOCAB_SIZE - 1
LONG_PROMPT = 8000  # tokens, in 33 chunks
MAX_MODEL_LEN = 8192
BLOCKS_PER_CLIENT = 40  # the longest request
NARROW_BLOCKS_PER_CLIENT = 8  # two thirds of what they need on average
DRAFT_NOISE = 0.03  # of a weight's size: most guesses are right, many are not
STEP_S = 0.01  # so that the client, which shares the machine, keeps up with the streams
STEP_DEADLINE_S = 8
END_TIMEOUT_S = 10.0


def main() -> None:
    """Run the campaign as the command line says."""
    options = _parser().parse_args()
    stem = output_stem(options.output, "faults")
    exit_on_sigterm("fault_campaign")
    about = _about(options)
    try:
        outcome = _run(options)
    except (ClientsError, TargetError, CharoniaError) as error:
        raise SystemExit(f"fault_campaign: {error}") from None
    report = Report(about, outcome)
    print(as_markdown(report))
    written = write_record(stem, report.as_json(), draw=partial(write_plot, report))
    print(f"\n{written}")
    if not report.holds:
        raise SystemExit("fault_campaign: not all holds that must")


def _run(options: argparse.Namespace) -> Outcome:
    """The campaign on a server of its own, and what is left when that has ended.

    Raises:
        ClientsError, TargetError, CharoniaError: the campaign cannot even begin.
    """
    outcome = Outcome(options.faults, max_pause=options.max_pause)
    seen: set[psutil.Process] = set()
    with contextlib.ExitStack() as stack:
        files = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="faults-")))
        log = stack.enter_context(options.log.open("w", encoding="utf-8")) if options.log else None
        model = _make_model(files / "checkpoint", options.tensor_parallel_size)
        arguments = _arguments(options.clients, _make_draft_model(model, files / "draft"))
        what = RepositoryOptions(
            source=make_faulty_repository(files / "model_repository", step_s=STEP_S),
            model=model,
            settings=_settings(options, arguments["plain"]),
        )
        temporary = stack.enter_context(own_temporary_directory())
        with serving_target(
            what, lambda line: print(line, file=log) if log else None, STEP_DEADLINE_S
        ) as target:
            runtime_dir = target.server.runtime_dir
            _break(target, options, arguments, outcome, seen)
        outcome.left = [
            *leftovers(runtime_dir),
            *(f"process {process.pid}" for process in _wait_for_end(seen)),
            *(path.name for path in temporary.iterdir()),
        ]
    return outcome


def _wait_for_end(processes: set[psutil.Process]) -> list[psutil.Process]:
    """Return the processes that live on after a wait of `END_TIMEOUT_S`.

    A process that takes a moment to end is no leak. Another process that was given the same number
    since, as happens within half an hour, is not returned.
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


def _make_draft_model(model: Path, directory: Path) -> Path:
    """The model with some noise in its weights: a drafter that is often right."""
    shutil.copytree(model, directory)
    path = directory / "model.safetensors"
    generator = torch.Generator().manual_seed(0)
    noisy = {
        name: weight + DRAFT_NOISE * weight.std() * torch.randn(weight.shape, generator=generator)
        for name, weight in load_file(path).items()
    }
    save_file(noisy, path, metadata={"format": "pt"})
    return directory


def _arguments(num_clients: int, draft_model: Path) -> dict[Arguments, dict[str, Any]]:
    """The engine's arguments for each kind of fault; each names all that another changes."""
    plain = {
        "num_gpu_blocks_override": BLOCKS_PER_CLIENT * num_clients + MAX_MODEL_LEN // 16,
        "speculative_config": None,
    }
    draft = {"model": str(draft_model), "num_speculative_tokens": 4}
    return {
        "plain": plain,
        "draft": plain | {"speculative_config": draft},
        "suffix": plain | {"speculative_config": {"method": "suffix"}},
        "narrow": plain
        | {
            "num_gpu_blocks_override": max(
                NARROW_BLOCKS_PER_CLIENT * num_clients, BLOCKS_PER_CLIENT + 2
            )
        },
    }


def _settings(options: argparse.Namespace, arguments: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        "dtype=float32",
        f"max_num_seqs={options.clients + 2}",  # one that kills, and one with a long prompt
        "max_num_batched_tokens=256",
        "cpu_threads=1",
        f"tensor_parallel_size={options.tensor_parallel_size}",
        f"scheduler.min_step_deadline_s={STEP_DEADLINE_S}",
        *(f"{name}={json.dumps(value)}" for name, value in arguments.items()),
    )


def _break(
    target: Target,
    options: argparse.Namespace,
    arguments: Mapping[Arguments, Mapping[str, Any]],
    outcome: Outcome,
    seen: set[psutil.Process],
) -> None:
    """Fill in the outcome, and the processes that the server ever had."""
    num_found = len(ranks_of(target.server))
    if num_found < options.tensor_parallel_size:
        raise TargetError(f"the engine has {num_found} processes, fewer than ranks")
    order_fault(target.server.repository, "poison", POISON)
    clients = Clients(
        target,
        num_lanes=options.clients,
        poison=POISON,
        long_prompt=LONG_PROMPT,
        seed=options.seed,
        timeout=options.deadline,
    )
    draw = random.Random(options.seed)
    campaign = Campaign(target, clients, arguments, outcome, draw, options.deadline)
    faults = schedule([KINDS[name] for name in options.only], options.faults, draw)
    try:
        with tqdm(total=options.faults, unit="fault", smoothing=0.1) as progress:
            for record in campaign.run(faults):
                seen |= set(processes_of(target.server))
                seconds = f" {record.recovery[-1]:.1f} s" if record.recovery else ""
                progress.set_postfix_str(f"{record.kind}{seconds}")
                progress.update()
    except TargetError as error:
        outcome.stopped_by = str(error)
    except Exception as error:  # a bug; what was found until then is recorded all the same
        traceback.print_exc()
        outcome.stopped_by = f"{type(error).__name__}: {error}"


def _about(options: argparse.Namespace) -> dict[str, Any]:
    names = ("charonia", "nvidia-pytriton", "torch", "tritonclient")
    settings = (
        "faults",
        "only",
        "clients",
        "seed",
        "tensor_parallel_size",
        "deadline",
        "max_pause",
    )
    return {
        **circumstances("fault_campaign.py"),
        "versions": {name: version(name) for name in names},
        **{name: getattr(options, name) for name in settings},
        "step_seconds": STEP_S,
        "min_step_deadline_seconds": STEP_DEADLINE_S,
    }


def _parser() -> argparse.ArgumentParser:
    parser = make_parser((__doc__ or "").format(kinds=_list_kinds()))
    number = {"type": positive, "metavar": "N"}
    parser.add_argument("--faults", default=300, help="how many (default: 300)", **number)
    parser.add_argument(
        "--only",
        nargs="+",
        choices=KINDS,
        metavar="KIND",
        default=list(KINDS),
        help="kinds of faults, as listed above (default: all)",
    )
    parser.add_argument("--clients", default=16, help="that call meanwhile (default: 16)", **number)
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
        help="a client that has got nothing so long after a fault hangs (default: 90)",
    )
    parser.add_argument(
        "--max-pause",
        type=float,
        metavar="SECONDS",
        default=3.0,
        help="that a client may have which need not wait, beside a longer outage (default: 3)",
    )
    parser.add_argument("--log", type=Path, metavar="FILE", help="where the server's log goes")
    add_output(parser, "faults", "png")
    return parser


def _list_kinds() -> str:
    width = max(map(len, KINDS))
    return "\n".join(f"  {name:{width}}  {kind.title}" for name, kind in KINDS.items())


if __name__ == "__main__":
    main()
