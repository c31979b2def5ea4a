"""The count of what the package is made of."""

import pytest

import house

SOURCE = """
import threading
from collections.abc import Callable
from dataclasses import dataclass

class Owner:
    def __init__(self, end: Callable[[], None], *, log: Callable[[str], None], size: int) -> None:
        self._live: dict[str, int] = {}
        self._named: set[str] = set()
        self._popped: dict[str, int] = {}
        self._tenants: dict[str, int] = {}
        self._sizes: dict[int, int] = {}
        threading.Thread(target=end).start()

    def add(self, request: Request, key: str, client: Client) -> None:
        self._live[key] = self._tenants[request.tenant] = self._sizes[key] = 1
        client.waiting.add(request.key)
        if request.key in self._named and self._tenants.pop("key", None):
            self._popped.pop(request.client_key, None)

@dataclass
class Client:
    waiting: set[str]

@dataclass(frozen=True)
class Event:
    note: Callable[[], None] | None
    weight_of: Callable[[str], float]
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
    empty = ("data/probe.py", "gateway/breaker.py", "launch/server/guard.py")
    sources = {"core/a.py": SOURCE, "supervision/probe.py": "\n" * 500} | dict.fromkeys(empty, "")
    found = house.read(sources, REQUEST)
    assert found.callbacks == ["core/a.py:Owner.end", "core/a.py:Event.note"]
    assert found.functions == ["core/a.py:Event.weight_of"]
    assert found.log_and_clock == ["core/a.py:Owner.log"]
    assert found.registries == [
        "core/a.py:Owner._live",
        "core/a.py:Owner._named",
        "core/a.py:Owner._popped",
        "core/a.py:Client.waiting",
    ]
    assert found.shapes == ["First", "Second", "Third"]
    assert found.watchers == ["supervision/probe.py", "gateway/breaker.py"]
    assert found.long_files == ["supervision/probe.py: 500"]
    rows = found.rows()
    assert (rows["files"], rows["packages"], rows["threads that are started"]) == (5, 5, 1)


@pytest.mark.parametrize(("part", "is_counted"), [("control", True), ("data", False)])
def test_registries_are_those_of_the_models_processes(part: str, is_counted: bool) -> None:
    assert bool(house.read({f"{part}/a.py": SOURCE}, REQUEST).registries) == is_counted


def test_this_checkout_is_counted() -> None:
    found = house.of_checkout()
    assert {"core/engine_core.py", "launch/commands/cli.py"} <= found.lines.keys()
    assert {"Request", "Update", "Chunk"} <= set(found.shapes)
    assert {"launch/server/gateway_process.py", "gateway/progress.py"} <= set(found.watchers)
    assert found.callbacks
    assert "control/scheduling/live_requests.py:LiveRequests.by_key" in found.registries
