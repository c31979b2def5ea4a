"""A core whose engine tests replace on purpose."""

import errno
from dataclasses import dataclass

from msgspec import structs

from charonia.config import EngineArgs
from charonia.core.replica.reload import Reload
from core.bench import Bench


@dataclass
class _Configuration:
    """What a bench's next engine gets, see `Configuration`."""

    bench: "Reloading"
    before: EngineArgs
    changes: dict[str, object]

    def install(self) -> None:
        if self.bench.is_disk_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.bench.args = structs.replace(self.before, **self.changes)

    def restore(self) -> None:
        self._break_down()
        self.bench.args = self.before
        self.bench.num_restored += 1

    def settle(self) -> None:
        self._break_down()
        self.bench.num_settled += 1

    def _break_down(self) -> None:
        if self.bench.is_disk_broken:
            raise OSError(errno.EIO, "Input/output error")


class Reloading(Bench):
    """A core whose next engine is what a test configures, and the state of the last order."""

    def __init__(self, **options) -> None:
        self.args = EngineArgs(model="echo")
        super().__init__(**options)
        self.core._replica._read_args = lambda: self.args
        self.num_restored = 0
        self.num_settled = 0
        self.is_disk_full = False
        self.is_disk_broken = False  # which shows when a reload ends

    def order(self, *, drain: bool = False, **changes) -> Reload:
        order = Reload(_Configuration(self, self.args, changes), drain=drain)
        self.core.reload(order)
        return order

    def reload(self, *, drain: bool = False, **changes) -> Reload:
        """Order it and see it through, as far as it has begun."""
        order = self.order(drain=drain, **changes)
        self.core.step()
        while order.phase == "loading":
            self.core.step()
        return order

    def run(self, num_steps: int = 10**6) -> None:
        super().run(num_steps)
        self.core.step()
