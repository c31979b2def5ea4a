"""Journals of schedulers, written for a test and replayed."""

from pathlib import Path

from charonia.core.recording.journal import Journal
from charonia.simulate.replay import Replay, Replayed, read_journal


def open_journal(
    directory: Path, *, max_bytes: int = 2**30, has_token_ids: bool = False, log=print
) -> Journal:
    return Journal(directory, max_bytes, has_token_ids=has_token_ids, log=log)


def replay(directory: Path) -> Replayed:
    """Replay the only journal of a directory."""
    (path,) = directory.glob("*.journal")
    return Replay().run(read_journal(path))
