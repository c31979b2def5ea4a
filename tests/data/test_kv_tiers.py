"""What slower tiers keep of blocks, and what they make of a file that is not as they left it."""

import errno
import multiprocessing
import os
import random
import re
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from charonia.config import EngineArgs
from charonia.data.kv_store import KVStore
from charonia.data.kv_tiers.block_bytes import BlockBytes
from charonia.data.kv_tiers.file_slots import FileSlots, bytes_for, num_slots_in
from charonia.data.kv_tiers.host_slots import HostSlots
from charonia.data.kv_tiers.slots import Slots
from charonia.data.kv_tiers.tiers import TierSizes
from charonia.data.ops.kv_format import FORMATS
from charonia.errors import ConfigError
from charonia.protocol import KVLayout, SlotContent
from data.slot_bench import (
    FULL,
    GIB,
    IDENTITY,
    NUM_SLOTS,
    SIZES,
    content,
    fill,
    has,
    key,
    save,
)
from support.waiting import WAIT_S


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


def test_a_file_of_another_identity_or_size_of_blocks_is_not_believed(open_file, lines):
    first = open_file()
    save(first, 0, 1)
    first.close()
    for changed in (IDENTITY._replace(engine=b"other"), IDENTITY._replace(part=b"rank 1")):
        other = open_file(changed)
        assert other.path != first.path
        assert other.contents() == []
    other = open_file(slot_bytes=sum(SIZES) - 1)
    assert other.path == first.path
    assert other.contents() == []
    (line,) = (line for line in lines if "kv_file_discarded" in line)
    assert "its blocks have 3705 bytes, and not 3704" in line


@pytest.mark.parametrize("was", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("now", [1, 63, 64, 65, 200])
def test_a_file_that_grows_or_shrinks_keeps_what_is_in_the_slots_that_it_still_has(
    open_file, lines, was, now
):
    first = open_file(num_slots=was)
    for slot in range(was):
        save(first, slot, slot)
    first.close()
    second = open_file(num_slots=now)
    kept = range(min(was, now))
    assert [one.slot for one in second.contents()] == list(kept)
    assert all(has(second, slot, slot) for slot in kept)
    save(second, now - 1, 999)
    second.close()
    third = open_file(num_slots=200)
    assert [one.slot for one in third.contents()] == [*(s for s in kept if s != now - 1), now - 1]
    assert has(third, now - 1, 999)
    assert sum("kv_file_resized" in line for line in lines) == (was != now) + (now != 200)
    assert not any("damaged" in line for line in lines)


@pytest.mark.parametrize("slot_bytes", [100, 4096, 5000, 300_000])
@pytest.mark.parametrize("space", [10_000_000, 12_345_678])
def test_a_full_file_takes_no_more_than_its_space(open_file, slot_bytes, space):
    num_slots = num_slots_in(space, slot_bytes)
    assert bytes_for(num_slots, slot_bytes) <= space < bytes_for(num_slots + 1, slot_bytes)
    file = open_file(num_slots=num_slots, slot_bytes=slot_bytes, most_bytes=space)
    pieces = [np.ones(slot_bytes, np.uint8)]
    slots = list(range(num_slots))
    random.Random(1).shuffle(slots)
    for slot in slots:
        file.save(slot, key(slot), False, pieces)
    os.fsync(file._file)
    status = file.path.stat()
    assert 0.95 * space < status.st_blocks * 512 <= space
    assert status.st_size <= space


def test_more_than_a_file_can_have_is_refused_by_the_right_name(open_file, tmp_path, monkeypatch):
    warm = open_file(IDENTITY._replace(part=b"warm"))
    fill(warm)
    warm.close()
    cut = os.ftruncate

    def cut_small(file: int, size: int) -> None:
        if size > 2 * FULL:
            raise OSError(errno.EFBIG, "File too large")
        cut(file, size)

    monkeypatch.setattr(os, "ftruncate", cut_small)
    for one in (IDENTITY, IDENTITY._replace(part=b"warm")):
        with pytest.raises(ConfigError, match=r"kv_cache_file_space = 100000 GiB is more than a"):
            open_file(one, num_slots=9 * NUM_SLOTS, most_bytes=100_000 * GIB)
    assert list((tmp_path / "kv").iterdir()) == [warm.path], "no empty file is left"
    monkeypatch.undo()
    assert len(open_file(IDENTITY._replace(part=b"warm")).contents()) == NUM_SLOTS


def test_a_file_that_the_disk_has_no_room_for_is_told_of_at_the_start(open_file, lines):
    open_file().close()
    assert not any("kv_file_may_not_fit" in line for line in lines)
    free = shutil.disk_usage("/").free
    num_slots = free // 4096
    for num_files, num in ((1, num_slots + 10**6), (4, num_slots // 2)):
        lines.clear()
        open_file(num_slots=num // 10**6, slot_bytes=4096 * 10**6, num_files=num_files).close()
        (line,) = (line for line in lines if line.startswith("kv_file_may_not_fit"))
        assert re.search(
            r"needs [\d.e+]+ GiB more, and the file system has [\d.e+]+ GiB free", line
        )


def test_a_full_disk_costs_what_was_to_be_saved_and_nothing_else(open_file, monkeypatch, lines):
    file = open_file()
    save(file, 0, 1)
    save(file, 1, 2)
    write = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda file, some, offset: write(file, some[:1], offset))
    assert not file.save(1, key(3), False, content(3))
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
    assert sizes(kv_cache_path="kv") == TierSizes(0, 39)
    assert sizes(kv_cache_path="kv", kv_cache_file_space=0.5, swap_space=1) == TierSizes(10, 4)
    with pytest.raises(ConfigError, match=r"swap_space = 0.05 GiB holds no block of 107374182"):
        sizes(swap_space=0.05)
    with pytest.raises(ConfigError, match=r"kv_cache_file_space = 0.01 GiB holds no block"):
        sizes(kv_cache_path="kv", kv_cache_file_space=0.01)
