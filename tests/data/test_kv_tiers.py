"""What slower tiers keep of blocks, and what they make of a file that is not as they left it."""

import fcntl
import multiprocessing
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from charonia.config import EngineArgs
from charonia.data.kv_store import KVStore
from charonia.data.kv_tiers.block_bytes import BlockBytes
from charonia.data.kv_tiers.file_slots import FileSlots, Identity
from charonia.data.kv_tiers.host_slots import HostSlots
from charonia.data.kv_tiers.slots import Slots
from charonia.data.kv_tiers.tiers import TierSizes
from charonia.data.ops.kv_format import FORMATS
from charonia.errors import ConfigError
from charonia.protocol import KVLayout, SlotContent
from support.waiting import WAIT_S

SIZES = (5, 700, 3000)
NUM_SLOTS = 12
IDENTITY = Identity(b"an engine", b"rank 0")
GIB = 2**30


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def content(number: int) -> list[np.ndarray]:
    """Pieces that no other number has."""
    state = np.random.default_rng(number)
    return [state.integers(0, 256, size, dtype=np.uint8) for size in SIZES]


def empty() -> list[np.ndarray]:
    return [np.zeros(size, np.uint8) for size in SIZES]


def save(slots: Slots, slot: int, number: int, *, has_draft: bool = False) -> None:
    slots.save(slot, key(number), has_draft, content(number))


def has(slots: Slots, slot: int, number: int) -> bool:
    """Whether a slot gives a content; what it gives is that content."""
    pieces = empty()
    if not slots.load(slot, key(number), pieces):
        return False
    assert all(map(np.array_equal, pieces, content(number))), "it gives something else"
    return True


@pytest.fixture
def lines() -> list[str]:
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


@pytest.fixture(params=["host", "file"])
def slots(request, open_file) -> Slots:
    return HostSlots(NUM_SLOTS, sum(SIZES)) if request.param == "host" else open_file()


# ---------------------------------------------------------------------- any slots


def test_what_was_saved_last_in_a_slot_is_loaded_from_it(slots):
    save(slots, 3, 1)
    save(slots, 11, 2, has_draft=True)
    save(slots, 3, 4)
    assert has(slots, 11, 2)
    assert has(slots, 3, 4)
    assert slots.contents() == [SlotContent(11, key(2), True), SlotContent(3, key(4), False)]


def test_what_is_not_there_is_not_loaded(slots):
    save(slots, 3, 1)
    assert not has(slots, 3, 2), "another key"
    assert not has(slots, 4, 1), "another slot"
    slots.forget(3)
    slots.forget(5)
    assert not has(slots, 3, 1)
    assert slots.contents() == []


# ---------------------------------------------------------------------- a file


def test_a_file_outlives_who_wrote_it(open_file):
    first = open_file()
    for slot in (7, 2, 9):
        save(first, slot, slot, has_draft=slot == 2)
    first.close()
    second = open_file()
    assert second.path == first.path
    assert second.secret == first.secret
    expected = [SlotContent(slot, key(slot), slot == 2) for slot in (7, 2, 9)]
    assert second.contents() == expected, "in the order in which it was saved"
    assert all(has(second, slot, slot) for slot in (7, 2, 9))
    save(second, 0, 5)
    second.close()
    assert [one.slot for one in open_file().contents()] == [7, 2, 9, 0]


def test_only_its_owner_can_read_a_file(open_file):
    file = open_file()
    assert file.path.stat().st_mode & 0o777 == 0o600
    assert file.path.parent.stat().st_mode & 0o777 == 0o700


def test_two_that_share_a_directory_have_files_of_their_own(open_file):
    first, second = open_file(), open_file()
    save(first, 0, 1)
    save(second, 0, 2)
    assert first.secret != second.secret
    assert has(first, 0, 1)
    assert has(second, 0, 2)
    first.close()
    assert open_file().path == first.path, "who comes next goes on where one has ended"


def test_a_file_of_another_identity_or_size_is_not_believed(open_file, lines):
    first = open_file()
    save(first, 0, 1)
    first.close()
    for identity in (IDENTITY._replace(engine=b"other"), IDENTITY._replace(part=b"rank 1")):
        other = open_file(identity)
        assert other.path != first.path
        assert other.contents() == []
    smaller = open_file(num_slots=NUM_SLOTS - 1)
    assert smaller.path == first.path
    assert smaller.contents() == []
    assert sum("kv_file_discarded" in line for line in lines) == 1


def test_the_oldest_files_of_others_are_removed_where_they_are_too_many(open_file):
    size = 200 * 4096
    paths = []
    for number in range(4):
        file = open_file(Identity(f"engine {number}".encode(), b"rank 0"))
        file.path.write_bytes(file.path.read_bytes()[:4096] + b"x" * size)
        os.utime(file.path, (number, number))
        paths.append(file.path)
        if number != 1:  # that one is in use
            file.close()
    own = open_file(IDENTITY._replace(part=b"rank 1"))
    own.close()
    open_file(most_bytes=2 * size + 30 * 4096).close()
    assert [path.exists() for path in paths] == [False, True, False, True]
    assert paths[3].exists(), "there is room for it, whatever the new one may take"
    assert own.path.exists(), "of another rank of the same engine"


def test_a_file_that_another_one_beside_it_has_left_counts_among_these(open_file):
    first, second = open_file(), open_file()
    for file in (first, second):
        for slot in range(NUM_SLOTS):
            save(file, slot, slot)
        file.close()
    open_file(most_bytes=GIB).close()
    assert second.path.exists()
    again = open_file(most_bytes=4096)
    assert again.path == first.path
    assert len(again.contents()) == NUM_SLOTS
    assert not second.path.exists()


def test_a_file_that_others_may_read_is_made_private(open_file):
    first = open_file()
    first.close()
    first.path.chmod(0o666)
    assert open_file().path.stat().st_mode & 0o777 == 0o600


def test_a_file_of_another_user_is_left_alone(open_file, monkeypatch):
    first = open_file()
    save(first, 0, 1)
    first.close()
    monkeypatch.setattr(os, "geteuid", lambda: first.path.stat().st_uid + 1)
    with pytest.raises(ConfigError, match="64 processes use it already"):
        open_file()


def test_a_file_that_is_removed_while_it_is_opened_is_made_anew(open_file, monkeypatch):
    first = open_file()
    first.close()
    lock, locked = fcntl.flock, []

    def remove_and_lock(file: int, how: int) -> None:
        if not locked:
            first.path.unlink()
        locked.append(file)
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", remove_and_lock)
    second = open_file()
    assert second.path.exists()
    save(second, 0, 1)
    assert has(second, 0, 1)


def test_a_place_that_no_file_can_be_in_is_refused_by_name(tmp_path):
    (tmp_path / "taken").write_text("a file")
    for directory in (tmp_path / "taken", tmp_path / "taken" / "below"):
        with pytest.raises(ConfigError, match=r"kv_cache_path = '.*taken.*must be a directory"):
            FileSlots(
                directory, IDENTITY, 1, 100, most_bytes=GIB, log=lambda line: pytest.fail(line)
            )


def test_a_full_disk_costs_what_was_to_be_saved_and_nothing_else(open_file, monkeypatch, lines):
    file = open_file()
    save(file, 0, 1)
    save(file, 1, 2)
    write = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda file, some, offset: write(file, some[:1], offset))
    save(file, 1, 3)
    monkeypatch.undo()
    assert not has(file, 1, 2)
    assert not has(file, 1, 3)
    assert has(file, 0, 1)
    assert any("kv_file_not_written" in line for line in lines)
    save(file, 1, 4)
    assert has(file, 1, 4)


def test_a_file_that_is_cut_off_while_it_is_used_gives_nothing(open_file, lines):
    file = open_file()
    save(file, NUM_SLOTS - 1, 1)
    os.truncate(file.path, file.path.stat().st_size - 4096)
    assert not has(file, NUM_SLOTS - 1, 1)
    assert any("kv_file_damaged" in line for line in lines)
    save(file, NUM_SLOTS - 1, 2)
    assert has(file, NUM_SLOTS - 1, 2)


def _damage(state: random.Random, path: Path) -> None:
    """Do one thing to a file that nobody does who means well."""
    data = bytearray(path.read_bytes())
    start = state.randrange(len(data)) if state.random() < 0.5 else state.randrange(4096 + 64 * 12)
    end = min(len(data), start + state.choice([1, 1, 16, 64, 4096, 20_000]))
    what = state.randrange(6)
    if what == 0:
        data[start] ^= 1 << state.randrange(8)
    elif what == 1:
        data[start:end] = state.randbytes(end - start)
    elif what == 2:
        data[start:end] = bytes(end - start)
    elif what == 3:
        del data[start:]
    elif what == 4:  # a part of it lies elsewhere, as after a lost write
        source = state.randrange(len(data) - (end - start))
        data[start:end] = data[source : source + end - start]
    else:
        del data[start:end]
    path.write_bytes(data)


def test_of_a_thousand_damaged_files_none_gives_anything_but_what_was_saved(open_file):
    file = open_file()
    for slot in range(NUM_SLOTS):
        save(file, slot, slot)
    file.close()
    whole = file.path.read_bytes()
    num_lost = 0
    for seed in range(1000):
        file.path.write_bytes(whole)
        _damage(random.Random(seed), file.path)
        damaged = open_file()
        num_lost += sum(not has(damaged, slot, slot) for slot in range(NUM_SLOTS))
        assert set(damaged.contents()) <= {
            SlotContent(slot, key(slot), False) for slot in range(NUM_SLOTS)
        }
        save(damaged, 0, 99)
        assert has(damaged, 0, 99)
        damaged.close()
    assert 1000 < num_lost < 1000 * NUM_SLOTS


def _write_for_ever(directory: Path, has_begun) -> None:
    file = FileSlots(
        directory, IDENTITY, NUM_SLOTS, sum(SIZES), most_bytes=GIB, log=lambda line: None
    )
    number = 0
    while True:
        save(file, number % NUM_SLOTS, number)
        number += 1
        has_begun.set()


def test_who_is_killed_while_it_saves_leaves_a_file_that_can_be_used(open_file, tmp_path):
    context = multiprocessing.get_context("spawn")
    for _ in range(3):
        has_begun = context.Event()
        process = context.Process(target=_write_for_ever, args=(tmp_path / "kv", has_begun))
        process.start()
        assert has_begun.wait(WAIT_S)
        time.sleep(random.random() / 100)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        file = open_file()
        contents = file.contents()
        assert contents
        for one in contents:
            assert has(file, one.slot, int.from_bytes(one.key, "little"))
        file.close()
    shutil.rmtree(tmp_path / "kv")


# ---------------------------------------------------------------------- blocks


@pytest.mark.parametrize("name", list(FORMATS))
def test_the_bytes_of_a_block_are_all_that_is_in_it(name):
    layout = KVLayout(
        num_layers=2, num_kv_heads=1, head_dim=32, block_size=4, dtype=name, bytes_per_block=0
    )
    stores = [KVStore(layout, ((4, 32), (4, 36)), num, torch.device("cpu")) for num in (5, 5)]
    raw = [
        tensor.view(torch.uint8) for store in stores for pages in store.pages for tensor in pages
    ]
    state = torch.Generator().manual_seed(1)
    for tensor in raw:
        tensor.copy_(torch.randint(0, 256, tensor.shape, generator=state, dtype=torch.uint8))
    before = [tensor.clone() for tensor in raw]
    blocks = BlockBytes(stores)
    kept = HostSlots(1, blocks.num_bytes)
    assert blocks.num_bytes == sum(tensor[0].numel() for tensor in raw)
    kept.save(0, key(1), False, blocks.read(3))
    blocks.clear(3)
    assert not any(tensor[3].any() for tensor in raw)
    assert kept.load(0, key(1), blocks.pieces(2))
    blocks.write(2)
    for tensor, old in zip(raw, before, strict=True):
        assert torch.equal(tensor[2], old[3])
        assert torch.equal(tensor[[0, 1, 4]], old[[0, 1, 4]])


def test_tiers_have_as_many_slots_as_there_is_room_for():
    def sizes(**values) -> TierSizes:
        return TierSizes.of(EngineArgs(model="m", **values), slot_bytes=GIB // 10)

    assert sizes() == TierSizes(0, 0)
    assert not sizes()
    assert sizes(swap_space=2) == TierSizes(20, 0)
    assert sizes(kv_cache_path="kv") == TierSizes(0, 40)
    assert sizes(kv_cache_path="kv", kv_cache_file_space=0.5, swap_space=1) == TierSizes(10, 5)
    with pytest.raises(ConfigError, match=r"swap_space = 0.05 GiB holds no block of 107374182"):
        sizes(swap_space=0.05)
    with pytest.raises(ConfigError, match=r"kv_cache_file_space = 0.01 GiB holds no block"):
        sizes(kv_cache_path="kv", kv_cache_file_space=0.01)
