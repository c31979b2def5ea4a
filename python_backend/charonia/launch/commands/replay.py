"""`charonia replay`: a recorded run of the scheduler, once more.

Owns what the command prints. Must not know how a run is replayed.
"""

import time
from pathlib import Path

import msgspec
from tqdm import tqdm

from charonia.core.recording.journal import Planned
from charonia.errors import LaunchError
from charonia.simulate.replay import Replay, read_journal


def replay(path: Path, show: tuple[int, int] | None = None) -> None:
    """Replay a journal, and print what came of it.

    Args:
        show: the first and the last number of plans that are printed, as lines of JSON.

    Raises:
        ConfigError: the file cannot be read, is no journal, or is damaged.
        LaunchError: a plan is not as it was; the text says which, and what is different.
    """

    def on_plan(number: int, entry: Planned) -> None:
        if show is not None and show[0] <= number <= show[1]:
            tqdm.write(
                msgspec.json.encode({"number": number, **msgspec.to_builtins(entry)}).decode()
            )

    began_at = time.monotonic()
    num_bytes = path.stat().st_size if path.is_file() else None
    with tqdm(
        total=num_bytes, desc="replay", unit="B", unit_scale=True, mininterval=0.5, disable=None
    ) as bar:
        outcome = Replay(on_plan).run(read_journal(path, bar.update))
    took_s = time.monotonic() - began_at
    print(
        f"{outcome.num_plans:,} plans for {outcome.num_requests:,} requests by"
        f" {outcome.num_schedulers:,} schedulers, {outcome.seconds:.1f} s when recorded:"
        f" replayed in {took_s:.1f} s"
    )
    if outcome.differences:
        raise LaunchError("\n".join(("the first difference:", *outcome.differences)))
    if outcome.end is None:
        print("the end of the journal is not there: the scheduler was killed, or goes on")
    elif outcome.end:
        print(f"the journal ends before the scheduler did: {outcome.end}")
    if outcome.num_plans:
        print("all plans are equal, byte for byte")
