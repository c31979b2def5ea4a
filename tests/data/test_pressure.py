"""How many KV blocks an engine says there is memory for, as others take and leave it."""

import errno
import re
from pathlib import Path

import pytest
import torch

from charonia.data import kv_store
from charonia.data.kv_store import KVStore
from charonia.data.memory import Memory
from charonia.data.pressure import Pressure, stalled_seconds
from charonia.protocol import KVLayout

TOTAL, RESERVE, BLOCK = 10_000, 0.1, 10
"""Bytes; 1,000 of them are to be left."""
NUM_BLOCKS = 160  # a sixteenth is 10


class Machine:
    """Memory that a test takes and gives."""

    def __init__(self) -> None:
        self.now = 0.0
        self.available = 5000
        self.stalled_s = 0.0
        self.gives = True
        self.num_used = NUM_BLOCKS
        self.num_written: int | None = None  # of the blocks in use; None is all
        self.num_looks = 0
        self.pressure = Pressure(
            NUM_BLOCKS,
            BLOCK,
            RESERVE,
            written=self._written,
            clock=lambda: self.now,
            memory=self._memory,
            stalled=lambda: self.stalled_s,
        )

    def _written(self) -> float:
        num_written = self.num_used if self.num_written is None else self.num_written
        return num_written / NUM_BLOCKS

    def _memory(self) -> Memory:
        self.num_looks += 1
        return Memory(self.available, TOTAL, "machine")

    def later(self, available: int | None = None) -> int:
        """The blocks a second later, of which those that are too many are given back at once.

        Unless requests hold them, which `gives` says.
        """
        self.now += 1.0
        if available is not None:
            self.available = available
        num_blocks = self.pressure.num_blocks()
        if self.gives or num_blocks > self.num_used:
            self.num_used = num_blocks
        self.pressure.note_plan(self.num_used)
        return num_blocks


@pytest.fixture
def machine() -> Machine:
    return Machine()


def test_as_long_as_there_is_memory_there_are_all_blocks(machine: Machine) -> None:
    assert [machine.later(available) for available in (5000, 1000, 1500)] == [NUM_BLOCKS] * 3


def test_what_is_lacking_is_given_up_and_at_least_a_sixteenth(machine: Machine) -> None:
    assert machine.later(600) == NUM_BLOCKS - 40
    assert machine.later(999) == NUM_BLOCKS - 50
    assert machine.later(1000) == NUM_BLOCKS - 50


def test_it_grows_again_where_there_is_twice_as_much_as_is_to_be_left(machine: Machine) -> None:
    machine.later(0)
    assert machine.later(1000) == 60
    assert machine.later(2099) == 60, "less than a step"
    assert machine.later(2100) == 70
    assert machine.later(2200) == 90
    assert machine.later(5000) == 110


def test_it_grows_by_an_eighth_at_a_time(machine: Machine) -> None:
    assert machine.later(0) == 60
    assert [machine.later(9000) for _ in range(6)] == [80, 100, 120, 140, 160, 160]


def test_what_requests_hold_is_not_asked_for_twice(machine: Machine) -> None:
    machine.gives = False
    assert [machine.later(600), machine.later(), machine.later()] == [NUM_BLOCKS - 40] * 3
    assert machine.later(800) == NUM_BLOCKS - 20
    machine.gives = True
    assert [machine.later(), machine.later(1000)] == [NUM_BLOCKS - 20] * 2


def test_what_is_held_is_kept_where_it_is_needed_no_more(machine: Machine) -> None:
    machine.gives = False
    assert machine.later(600) == NUM_BLOCKS - 40
    assert machine.later(1000) == NUM_BLOCKS


def test_a_new_epoch_takes_nothing_back_by_itself(machine: Machine) -> None:
    assert [machine.later(600), machine.later(1000)] == [NUM_BLOCKS - 40] * 2
    machine.pressure.note_plan(None, is_first=True)
    assert machine.later() == NUM_BLOCKS - 40
    assert machine.later(600) == NUM_BLOCKS - 80


def test_plans_that_come_late_do_not_have_it_give_up_more(machine: Machine) -> None:
    """Each is of what was said two looks before, as where steps overlap and take a second."""
    late = [NUM_BLOCKS, NUM_BLOCKS]
    said = []
    for available in (600, 1000, 1000, 1000, 1000, 1000, 1000, 1000):
        machine.now += 1.0
        machine.available = available
        late.append(machine.pressure.num_blocks())
        machine.pressure.note_plan(late.pop(0))
        said.append(late[-1])
    assert said == [NUM_BLOCKS - 40, *[NUM_BLOCKS] * 7]
    machine.available = 5000
    machine.now += 1.0
    assert machine.pressure.num_blocks() == NUM_BLOCKS


def test_one_block_and_the_null_block_stay(machine: Machine) -> None:
    machine.available = 0
    assert machine.later() == 60
    assert machine.later() == 2
    assert machine.later() == 2


def test_where_all_wait_for_memory_there_is_too_little_of_it(machine: Machine) -> None:
    machine.available = 1500
    machine.stalled_s += 0.1
    assert machine.later() == NUM_BLOCKS - 10
    machine.stalled_s += 0.09
    assert machine.later() == NUM_BLOCKS - 10


def test_a_wait_for_memory_does_not_count_where_twice_the_reserve_is_free(
    machine: Machine,
) -> None:
    """Others wait in a control group of theirs, say, or for what was swapped out."""
    machine.stalled_s += 0.9
    assert machine.later(2000) == NUM_BLOCKS
    assert machine.later(1999) == NUM_BLOCKS, "it was seen, and counts no more"
    machine.stalled_s += 0.9
    assert machine.later() == NUM_BLOCKS - 10


def test_one_time_in_which_all_waited_costs_one_step(machine: Machine) -> None:
    machine.available = 1500
    machine.stalled_s += 0.9
    assert [machine.later() for _ in range(12)] == [NUM_BLOCKS - 10] * 12


def test_a_wait_while_memory_was_lacking_is_not_counted_again(machine: Machine) -> None:
    machine.stalled_s += 0.9
    assert machine.later(600) == NUM_BLOCKS - 40
    assert machine.later(1500) == NUM_BLOCKS - 40


def test_it_does_not_grow_twice_into_the_same_memory(machine: Machine) -> None:
    """Blocks that are in use again take memory only once they are written to."""
    machine.later(0)
    machine.num_written = 60
    assert [machine.later(2300), machine.later(), machine.later()] == [80, 90, 90]
    machine.num_written = 90
    assert machine.later(2000) == 90
    assert machine.later(2300) == 110


def test_memory_that_others_take_is_not_left_to_blocks_that_are_not_written(
    machine: Machine,
) -> None:
    machine.num_written = 0
    assert machine.later(2600) == NUM_BLOCKS
    assert machine.later(2000) == 100


def test_it_is_looked_once_a_second(machine: Machine) -> None:
    machine.available = 0
    machine.now += 0.9
    assert machine.pressure.num_blocks() == NUM_BLOCKS
    machine.now += 0.2
    num_blocks = machine.pressure.num_blocks()
    assert num_blocks < NUM_BLOCKS
    machine.available = 10_000
    machine.now += 0.9
    assert machine.pressure.num_blocks() == num_blocks
    assert machine.num_looks == 1


def test_what_the_kernel_says_of_stalls_is_read(tmp_path: Path) -> None:
    assert stalled_seconds(tmp_path) == 0.0
    (tmp_path / "proc/pressure").mkdir(parents=True)
    file = tmp_path / "proc/pressure/memory"
    file.write_text(
        "some avg10=80.00 avg60=1.00 avg300=0.00 total=1\n"
        "full avg10=12.34 avg60=0.10 avg300=0.00 total=2500000\n"
    )
    assert stalled_seconds(tmp_path) == 2.5
    file.write_text("nonsense\n")
    assert stalled_seconds(tmp_path) == 0.0


def make_store(width: int, num_blocks: int, *, num_layers: int = 1, further: int = 1) -> KVStore:
    """A block has `width` numbers of four bytes in keys, `further` times as many in values."""
    layout = KVLayout(
        num_layers=num_layers,
        num_kv_heads=1,
        head_dim=1,
        block_size=1,
        dtype="float32",
        bytes_per_block=0,
    )
    return KVStore(layout, ((width,), (width, further)), num_blocks, torch.device("cpu"))


def test_blocks_take_memory_once_they_are_written_to() -> None:
    # Of 64 MiB, so that huge pages, which neighbours may share, are a small part of it.
    store = make_store(8192, 2048)
    assert store.written() < 0.1
    store.pages[0].keys[:1024] = 1.0
    assert 0.5 <= store.written() < 0.6
    store.discard(range(512))
    assert 0.25 <= store.written() < 0.35
    store.pages[0].keys[:] = 1.0
    assert store.written() == 1.0


def test_where_the_kernel_does_not_tell_all_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, *_: object) -> None:
        raise OSError(errno.ENOSYS, name)

    store = make_store(8192, 4)
    assert store.written() < 1.0
    monkeypatch.setattr(kv_store, "_call", refuse)
    assert store.written() == 1.0


def test_what_is_given_back_of_huge_pages_is_free() -> None:
    """Not only when all of a page is given back."""
    num_huge = huge_pages()
    store = make_store(8192, 4096)
    for tensor in store.pages[0]:
        tensor.fill_(1.5)
    num_huge = huge_pages() - num_huge
    if num_huge < 32:
        pytest.skip("the kernel gives no huge pages")
    before = num_split()
    store.discard(range(0, 4096, 4))
    assert num_split() - before >= num_huge


def huge_pages() -> int:
    """Of this process, of 2 MiB each."""
    text = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    return int(re.findall(r"^AnonHugePages: +(\d+) kB$", text, re.MULTILINE)[0]) // 2048


def num_split() -> int:
    """Huge pages of this machine that the kernel has split since its start."""
    text = Path("/proc/vmstat").read_text(encoding="ascii")
    return int(re.findall(r"^thp_split_page (\d+)$", text, re.MULTILINE)[0])


@pytest.mark.parametrize("width", [16, 3000, 8192])
def test_blocks_whose_memory_is_given_back_are_zeros_and_others_stay(width: int) -> None:
    """Blocks of less than a page, of some that lie across pages, and of whole pages."""
    store = make_store(width, 40, num_layers=2, further=2)
    tensors = [tensor for pages in store.pages for tensor in pages]
    for tensor in tensors:
        tensor.fill_(1.5)
    discarded = [3, 9, 10, 11, 12, 39, 38]
    store.discard(discarded)
    kept = [block_id for block_id in range(40) if block_id not in discarded]
    for tensor in tensors:
        assert (tensor[kept] == 1.5).all()
        assert ((tensor[discarded] == 1.5) | (tensor[discarded] == 0.0)).all()
        if width == 8192:
            assert not tensor[discarded].any()
    store.discard(kept)
    assert all(tensor.isfinite().all() for tensor in tensors)


HUGE, SMALL = "hg", "nh"
"""What /proc/self/smaps calls memory for which huge pages are wished, and are not."""


def wishes(store: KVStore) -> list[list[str]]:
    """Of each tensor, what was said of huge pages for its ranges of memory, in their order."""
    text = Path("/proc/self/smaps").read_text(encoding="ascii")
    ranges = [
        (int(first, 16), int(end, 16), HUGE if f" {HUGE}" in flags else SMALL)
        for first, end, flags in re.findall(
            r"^(\w+)-(\w+) .*(?:\n[A-Z].*)*?\nVmFlags:(.*)$", text, re.MULTILINE
        )
    ]
    return [
        [
            wish
            for first, end, wish in ranges
            if first < tensor.data_ptr() + tensor.nbytes and tensor.data_ptr() < end
        ]
        for pages in store.pages
        for tensor in pages
    ]


needs_huge_pages = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="there are no huge pages"
)


@needs_huge_pages
def test_the_kernel_does_not_fill_holes_with_huge_pages_while_blocks_are_set_aside() -> None:
    layout = KVLayout(
        num_layers=2,
        num_kv_heads=1,
        head_dim=1,
        block_size=1,
        dtype="float32",
        bytes_per_block=0,
    )
    store = KVStore(layout, ((8192,), (1024,)), 512, torch.device("cpu"))
    assert wishes(store) == [[HUGE]] * 4
    store.discard([500, 510])
    assert wishes(store) == [[HUGE, SMALL], [HUGE, SMALL]] * 2
    store.discard([*range(128, 512, 2)])
    assert wishes(store) == [[HUGE, SMALL], [HUGE, SMALL]] * 2, "one range, not one for each"
    store.use_all()
    store.use_all()
    assert wishes(store) == [[HUGE]] * 4
