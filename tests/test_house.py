"""The count of what the package is made of."""

import house

SOURCE = """
import threading
from collections.abc import Callable
from dataclasses import dataclass

class Owner:
    def __init__(self, end: Callable[[], None], *, log: Callable[[str], None], size: int) -> None:
        self._live: dict[str, int] = {}
        self._named: set[str] = set()
        self._sizes: dict[int, int] = {}
        threading.Thread(target=end).start()

@dataclass(frozen=True)
class Event:
    note: Callable[[], None] | None
    name: str
"""
REQUEST = """
| shape | where |
| --- | --- |
| `First` | there |
| `Second`, `Third` | `elsewhere` |

| where | why |
| --- | --- |
| `Fourth` | `other` |
"""


def test_a_source_is_counted() -> None:
    sources = {"core/a.py": SOURCE, "supervision/probe.py": "\n" * 500, "data/probe.py": "\n"}
    found = house.read(sources, REQUEST)
    assert found.callbacks == ["core/a.py:Owner.end", "core/a.py:Event.note"]
    assert found.plain_callbacks == ["core/a.py:Owner.log"]
    assert found.registries == ["core/a.py:Owner._live", "core/a.py:Owner._named"]
    assert found.shapes == ["First", "Second", "Third"]
    assert found.watchers == ["supervision/probe.py"]
    assert found.long_files == ["supervision/probe.py: 500"]
    rows = found.rows()
    assert (rows["files"], rows["packages"], rows["threads that are started"]) == (3, 3, 1)


def test_this_checkout_is_counted() -> None:
    found = house.of_checkout()
    assert {"core/engine_core.py", "launch/commands/cli.py"} <= found.lines.keys()
    assert {"Request", "Update", "Chunk"} <= set(found.shapes)
    assert found.watchers
    assert found.callbacks
    assert found.registries
