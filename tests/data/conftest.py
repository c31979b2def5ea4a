"""Has the kernels built before the first test is run, and opens files of slower tiers."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from charonia.data.kv_tiers.file_slots import FileSlots
from charonia.data.kv_tiers.identity import Identity
from data.slot_bench import GIB, IDENTITY, NUM_SLOTS, SIZES
from support.kernels import build_kernels_of


def pytest_collection_finish(session: pytest.Session) -> None:
    if not session.config.option.collectonly:
        build_kernels_of(session.items)


@pytest.fixture
def lines() -> list[str]:
    """What such files log."""
    return []


@pytest.fixture
def open_file(tmp_path: Path, lines: list[str]) -> Iterator[Callable[..., FileSlots]]:
    """Opens a file in a directory of the test; what is left open is closed at the end."""
    opened: list[FileSlots] = []

    def open_file(identity: Identity = IDENTITY, **values) -> FileSlots:
        sizes = {"num_slots": NUM_SLOTS, "slot_bytes": sum(SIZES), "most_bytes": GIB} | values
        opened.append(FileSlots(tmp_path / "kv", identity, **sizes, log=lines.append))
        return opened[-1]

    yield open_file
    for file in opened:
        file.close()
