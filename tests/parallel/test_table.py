"""What ranks tell each other before they exchange tensors, from everywhere and within bounds."""

import contextlib
import os
import socket
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest

from charonia.errors import RankLostError
from charonia.parallel import table as table_module
from charonia.parallel.groups import open_memory
from charonia.parallel.table import RemoteTable, Table, TableStore
from charonia.sockets.channel import Channel
from support.rank_end import remote_table, served_table
from support.waiting import WAIT_S

SECRET = "open sesame"


@pytest.fixture
def tables() -> Iterator[tuple[Table, RemoteTable]]:
    """The table, and the way to it."""
    with served_table(SECRET) as (table, port):
        remote = remote_table(port, SECRET)
        yield table, remote
        remote.close()


def test_what_one_says_all_can_read(tables: tuple[Table, RemoteTable]) -> None:
    table, remote = tables
    table.put("a", b"1")
    remote.put("b", b"\x00\xff")
    for one in tables:
        assert (one.get("a", WAIT_S), one.get("b", WAIT_S)) == (b"1", b"\x00\xff")
    assert (table.add("n", 2), remote.add("n", 3)) == (b"2", b"5")


def test_a_value_is_waited_for_and_not_for_ever(tables: tuple[Table, RemoteTable]) -> None:
    table, remote = tables
    assert remote.get("a", 0.01) is None
    with ThreadPoolExecutor(1) as threads:
        value = threads.submit(remote.get, "a", WAIT_S)
        table.put("a", b"late")
        assert value.result(WAIT_S) == b"late"


def test_the_end_of_the_table_ends_all_waits(tables: tuple[Table, RemoteTable]) -> None:
    table, remote = tables
    with ThreadPoolExecutor(2) as threads:
        waits = [threads.submit(one.get, "a", WAIT_S) for one in tables]
        table.close()
        for wait in waits:
            with pytest.raises(RankLostError):
                wait.result(WAIT_S)
    with pytest.raises(RankLostError):
        remote.put("a", b"1")


def test_what_the_table_holds_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "MAX_ENTRIES", 2)
    table = Table()
    for key in ("a", "b", "a"):
        table.put(key, b"")
    with pytest.raises(RankLostError, match="is full"):
        table.put("c", b"")


def test_a_value_that_is_too_long_ends_its_connection_alone(
    tables: tuple[Table, RemoteTable],
) -> None:
    table, remote = tables
    with pytest.raises(RankLostError, match="too long"):
        remote.put("a", b"x" * 2**16)
    remote.put("a", b"x")
    assert table.get("a", 0.0) == b"x"


def test_an_answer_that_comes_late_is_none_to_another_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(table_module, "_ANSWER_TIMEOUT_S", 0.05)
    near, far = socket.socketpair()
    remote, engine = RemoteTable(Channel(near)), Channel(far)
    with pytest.raises(RankLostError, match="does not answer: timed out"):
        remote.get("a", 0.0)
    with contextlib.suppress(OSError):
        engine.send(msgspec.msgpack.encode(b"late"))
    with pytest.raises(RankLostError, match="is closed"):
        remote.get("b", 0.0)
    engine.close()


def test_torch_gets_a_store_of_it() -> None:
    store = TableStore(Table(), timedelta(seconds=0.01))
    store.set("a", b"1")
    assert store.get("a") == b"1"
    assert store.add("n", 2) == 2
    assert store.add("n", -1) == 1
    assert store.check(["a", "n"])
    assert not store.check(["a", "b"])
    store.wait(["a"], timedelta(seconds=1))
    with pytest.raises(RankLostError, match="'b' within 0"):
        store.get("b")


@contextmanager
def memory(name: str, num_bytes: int) -> Iterator[bytes]:
    file = os.memfd_create(name)
    os.ftruncate(file, num_bytes)
    yield f"{os.getpid()} {file}".encode()
    os.close(file)


def test_memory_of_another_rank_is_opened() -> None:
    with memory("charonia parts 0", 4096) as value:
        file = open_memory(value, "charonia parts 0", 4096)
        assert os.pwrite(file, b"x", 0) == 1
        os.close(file)


@pytest.mark.parametrize("value", [b"", b"1", b"1 2 3", b"a b", b"-1 0", b"\xff 3", b"/etc 1"])
def test_what_names_no_descriptor_is_refused(value: bytes) -> None:
    with pytest.raises(RankLostError):
        open_memory(value, "charonia parts 0", 4096)


def test_what_is_no_memory_of_ranks_is_not_opened_for_writing(tmp_path: Path) -> None:
    with memory("something else", 4096) as value, pytest.raises(RankLostError, match="something"):
        open_memory(value, "charonia parts 0", 4096)
    with memory("charonia parts 0", 8192) as value, pytest.raises(RankLostError, match="8192"):
        open_memory(value, "charonia parts 0", 4096)
    with tempfile.NamedTemporaryFile(dir=tmp_path) as file:
        file.truncate(4096)
        with pytest.raises(RankLostError, match="is no memory"):
            open_memory(f"{os.getpid()} {file.fileno()}".encode(), "charonia parts 0", 4096)
