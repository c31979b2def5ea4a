"""Files of slower tiers that share a directory: who may use one, and which one goes."""

import errno
import fcntl
import itertools
import os
import stat
import threading

import msgspec
import pytest

from charonia.data.kv_tiers import identity, slot_files
from charonia.data.kv_tiers.file_slots import FileSlots
from charonia.data.kv_tiers.identity import Identity, differences
from charonia.errors import ConfigError
from data.slot_bench import (
    FULL,
    GIB,
    IDENTITY,
    NUM_SLOTS,
    fill,
    has,
    save,
)


def test_two_that_share_a_directory_have_files_of_their_own(open_file):
    first, second = open_file(), open_file()
    save(first, 0, 1)
    save(second, 0, 2)
    assert first.secret != second.secret
    assert has(first, 0, 1)
    assert has(second, 0, 2)
    first.close()
    assert open_file().path == first.path, "who comes next goes on where one has ended"


def engine(number: int) -> Identity:
    return IDENTITY._replace(engine=f"engine {number}".encode())


@pytest.mark.parametrize("num_servers", [2, 4])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_equal_servers_that_end_together_find_all_that_they_had(open_file, num_servers, num_ranks):
    def start() -> list[list[FileSlots]]:
        ranks = [IDENTITY._replace(part=f"rank {rank}".encode()) for rank in range(num_ranks)]
        return [[open_file(one, most_bytes=FULL) for one in ranks] for _ in range(num_servers)]

    def end(servers: list[list[FileSlots]]) -> None:
        for file in itertools.chain(*servers):
            file.close()

    servers = start()
    fill(*itertools.chain(*servers))
    end(servers)
    for _ in range(2):
        servers = start()
        contents = [len(file.contents()) for file in itertools.chain(*servers)]
        assert contents == [NUM_SLOTS] * num_ranks * num_servers
        end(servers)


def test_a_server_with_a_smaller_bound_removes_no_file_that_was_given_more(open_file):
    first = open_file(engine(1), most_bytes=FULL)
    fill(first)
    first.close()
    other = open_file(engine(2), most_bytes=8192)
    assert first.path.exists()
    other.close()
    assert len(open_file(engine(1), most_bytes=FULL).contents()) == NUM_SLOTS


def test_of_idle_files_the_least_recently_used_go_until_the_rest_fit(open_file, lines):
    files = [open_file(engine(number), most_bytes=FULL) for number in range(4)]
    fill(*files)
    for number in (2, 0, 3):  # the other one is in use
        files[number].close()
    lines.clear()
    open_file(engine(4), most_bytes=FULL).close()
    assert [file.path.exists() for file in files] == [False, True, False, True]
    removed = [line for line in lines if line.startswith("kv_file_removed")]
    assert [str(files[number].path) in line for number, line in zip((2, 0), removed, strict=True)]
    assert all(f" bytes={file.path.stat().st_blocks * 512} " in removed[0] for file in files[3:])
    assert f"such files may have {FULL} bytes" in removed[0]


def test_a_file_that_is_only_read_is_used_all_the_same(open_file):
    files = [open_file(engine(number), most_bytes=FULL) for number in range(2)]
    fill(*files)
    for file in files:
        file.close()
    again = open_file(engine(0), most_bytes=FULL)
    again.close()
    open_file(engine(2), most_bytes=FULL).close()
    assert [file.path.exists() for file in files] == [True, False]


def test_files_of_the_other_ranks_of_an_engine_wait_for_them(open_file):
    parts = [IDENTITY._replace(part=f"rank {rank}".encode()) for rank in range(3)]
    mine = [open_file(part, most_bytes=FULL) for part in parts]
    fill(*mine)
    for file in mine:
        file.close()
    newer = open_file(engine(1), most_bytes=FULL)
    fill(newer)
    newer.close()
    assert [len(open_file(part, most_bytes=4096).contents()) for part in parts] == [NUM_SLOTS] * 3


def test_a_file_that_says_nothing_of_itself_goes_as_any_other(open_file, tmp_path):
    first = open_file(engine(0), most_bytes=FULL)
    fill(first)
    first.close()
    first.path.write_bytes(b"x" * 10 * FULL)
    (tmp_path / "kv" / "charonia-of-somebody-else-entirely.kv").write_bytes(b"x" * 10 * FULL)
    open_file(engine(1), most_bytes=FULL).close()
    assert not first.path.exists()
    assert (tmp_path / "kv" / "charonia-of-somebody-else-entirely.kv").exists()


def test_a_file_that_another_one_looks_at_is_not_taken_for_used(open_file, monkeypatch):
    """It waits until that one has begun, and finds its own file then."""
    first = open_file(engine(0))
    fill(first)
    first.close()
    found = []
    thread = threading.Thread(target=lambda: found.append(open_file(engine(0))))
    remove_idle = slot_files._remove_idle

    def while_all_are_locked(*args) -> None:
        monkeypatch.undo()
        thread.start()
        thread.join(0.3)
        remove_idle(*args)

    monkeypatch.setattr(slot_files, "_remove_idle", while_all_are_locked)
    open_file(engine(1))
    thread.join()
    assert found[0].path == first.path
    assert len(found[0].contents()) == NUM_SLOTS


def test_where_a_directory_cannot_be_locked_files_are_used_all_the_same(open_file, monkeypatch):
    lock = fcntl.flock

    def lock_files(file: int, how: int) -> None:
        if stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(errno.EBADF, "as NFS does")
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", lock_files)
    file = open_file()
    save(file, 0, 1)
    assert has(file, 0, 1)


def test_why_a_file_of_the_same_model_is_not_used_is_said_in_words(open_file, lines):
    def of(**facts: str) -> Identity:
        return Identity(msgspec.msgpack.encode(facts), b"rank 0")

    old = of(block_size="16", weights="digest 1", device="cpu")
    new = of(block_size="32", weights="digest 2", device="cpu")
    assert open_file(old, label="m 0 0").close() is None
    unlike = [open_file(old, label="another 0 0"), open_file(old, label="m 0 1")]
    for file in unlike:
        file.close()
    open_file(old, label="m 0 0").close()
    lines.clear()
    open_file(new, label="m 0 0").close()
    (line,) = (line for line in lines if line.startswith("kv_file_not_used"))
    assert "another block_size (there 16, here 32), another weights" in line
    assert "digest" not in line
    assert "device" not in line
    lines.clear()
    file = open_file(new, label="m 0 0")
    save(file, 0, 1)
    file.close()
    open_file(IDENTITY, label="m 0 0").close()
    assert sum("of a version that records this differently" in line for line in lines) == 2


def test_a_file_that_others_may_read_is_made_private(open_file):
    first = open_file()
    first.close()
    first.path.chmod(0o666)
    assert open_file().path.stat().st_mode & 0o777 == 0o600


def test_a_file_of_another_user_is_left_alone(open_file, monkeypatch):
    first = open_file()
    fill(first)
    first.close()
    content = first.path.read_bytes()
    open_any = os.open

    def open_own(path, flags: int, mode: int = 0o777) -> int:
        if path == first.path:
            raise PermissionError(errno.EACCES, "Permission denied")
        return open_any(path, flags, mode)

    monkeypatch.setattr(os, "open", open_own)
    second = open_file(most_bytes=8192)
    assert second.path != first.path
    save(second, 0, 1)
    assert has(second, 0, 1)
    assert first.path.read_bytes() == content


def test_a_directory_that_nobody_may_write_to_is_refused(open_file, monkeypatch):
    open_any = os.open

    def open_none(path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT:
            raise PermissionError(errno.EACCES, "Permission denied")
        return open_any(path, flags, mode)

    monkeypatch.setattr(os, "open", open_none)
    with pytest.raises(ConfigError, match=r"can be written to: Permission denied"):
        open_file()


def test_files_that_another_user_may_write_to_are_not_used(open_file, monkeypatch):
    first = open_file()
    first.close()
    monkeypatch.setattr(os, "geteuid", lambda: first.path.stat().st_uid + 1)
    with pytest.raises(ConfigError, match="64 processes use it already"):
        open_file()


def test_a_file_that_is_removed_while_it_is_opened_is_made_anew(open_file, monkeypatch):
    first = open_file()
    first.close()
    lock, locked = fcntl.flock, []

    def remove_and_lock(file: int, how: int) -> None:
        if stat.S_ISREG(os.fstat(file).st_mode):
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


def test_what_a_file_says_of_a_checkpoint_is_short_however_many_files_that_has(
    monkeypatch, tmp_path
):
    paths = [tmp_path / f"model-{number:05}-of-00400.safetensors" for number in range(400)]
    for path in paths:
        path.touch()
    monkeypatch.setattr(identity, "weight_files", lambda model_dir: paths)
    monkeypatch.setattr(identity, "fingerprint", lambda model_dir: {"the weights": "0" * 32})

    def facts() -> dict[str, str]:
        return identity._checkpoint(tmp_path, "the checkpoint")

    before = facts()
    assert len(msgspec.msgpack.encode(before)) < 500
    os.utime(paths[399], (1, 1))
    words = differences(*map(msgspec.msgpack.encode, (before, facts())))
    assert words == "another size or time of the last change of a file of the checkpoint"
