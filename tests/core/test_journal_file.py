"""A journal's file: when it is written and ends, and what is read of one that is damaged."""

import errno
import stat

import msgspec
import pytest

from charonia.core.recording.journal import FRAME, HEADER
from charonia.errors import ConfigError
from charonia.simulate.replay import read_journal
from core.bench import Bench
from core.reload_bench import Reloading
from support.journals import open_journal, replay


def test_a_full_journal_ends_and_requests_go_on(tmp_path, entries):
    lines = []
    journal = open_journal(tmp_path, max_bytes=3000, log=lines.append)
    bench = Bench(journal=journal)
    bench.add("a")
    bench.run()
    assert len(bench.tokens("a")) == 20
    assert lines == ['journal_stopped level=warning reason="record_max_bytes are written"']
    assert replay(tmp_path).end == "record_max_bytes are written"
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 3000
    assert replay(tmp_path).differences == ()


def test_a_broken_disk_ends_it_and_requests_go_on(tmp_path, monkeypatch):
    lines = []
    journal = open_journal(tmp_path, log=lines.append)
    journal._file.close()
    monkeypatch.setattr(journal, "_file", BrokenFile())
    bench = Bench(journal=journal)
    bench.add("a")
    journal.flush(now=10.0)
    bench.run()
    assert len(bench.tokens("a")) == 20
    assert lines == ['journal_stopped level=warning reason="No space left on device"']


class BrokenFile:
    def write(self, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    def close(self):
        pass


def test_what_was_written_is_there_a_second_later(tmp_path, entries):
    journal = open_journal(tmp_path)
    bench = Bench(journal=journal)
    journal.flush(now=10.0)
    assert len(entries()) == 2
    bench.add("a")
    bench.run(1)
    journal.flush(now=10.9)
    assert len(entries()) == 2
    journal.flush(now=11.0)
    assert len(entries()) > 2
    journal.close()


def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"record_dir: .*file cannot be written: "):
        open_journal(tmp_path / "file")


def test_a_journal_that_was_cut_off_is_replayed_up_to_there(tmp_path):
    journal = open_journal(tmp_path)
    bench = Bench(journal=journal)
    bench.add("a")
    bench.run()
    journal.close()
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    num_plans = replay(tmp_path).num_plans
    for num_bytes in (len(data) - 1, len(data) // 2, len(HEADER) + 2, len(HEADER)):
        path.write_bytes(data[:num_bytes])
        outcome = replay(tmp_path)
        assert not outcome.differences, "\n".join(outcome.differences)
        assert outcome.num_plans <= num_plans
        num_plans = outcome.num_plans
    assert num_plans == 0


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "is no journal that this version replays: its first line must be 'charonia journal"),
        (b"charonia journal 1\n", "is no journal that this version replays"),
        (b"charonia journal 99\n", "is no journal that this version replays"),
        (HEADER + b"\0\0\0\3\xc1bc", r"is damaged at byte \d+: "),
    ],
)
def test_what_is_no_journal_is_refused(tmp_path, data, reason):
    path = tmp_path / "a.journal"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=reason):
        list(read_journal(path))
    with pytest.raises(ConfigError, match="cannot be read: "):
        list(read_journal(tmp_path / "none"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda opened: opened["engine_args"].update(other=1), "unknown field `other`"),
        (lambda opened: opened["engine_args"].update(kv_cache_path=""), "kv_cache_path = ''"),
        (lambda opened: opened.update(other=1), "unknown field `other`"),
        (lambda opened: opened.pop("limits"), "missing required field `limits`"),
        (lambda opened: opened.update(type="Other"), "Invalid value 'Other'"),
    ],
    ids=["new argument", "refused argument", "new field", "missing field", "new entry"],
)
def test_a_journal_of_another_version_is_not_called_damaged(tmp_path, change, reason):
    journal = open_journal(tmp_path)
    Bench(journal=journal)
    journal.close()
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    begin = len(HEADER) + FRAME.size
    (length,) = FRAME.unpack(data[len(HEADER) : begin])
    opened = msgspec.msgpack.decode(data[begin : begin + length])
    change(opened)
    entry = msgspec.msgpack.encode(opened)
    path.write_bytes(HEADER + FRAME.pack(len(entry)) + entry)
    with pytest.raises(ConfigError, match=f"byte {begin} is of another version, or .*{reason}"):
        list(read_journal(path))


def test_after_its_end_nothing_is_kept_and_a_disk_that_fails_at_the_end_harms_nobody(tmp_path):
    lines = []
    journal = open_journal(tmp_path, log=lines.append)
    bench = Reloading(journal=journal, fair_share=True)
    bench.add("a", tenant="x")
    bench.run(2)
    journal._file.close()
    journal._file = BrokenFile()
    journal.stop("a test")
    bench.reload(enable_prefix_caching=False)
    bench.add("b", tenant="y")
    bench.run()
    assert len(bench.tokens("b")) == 20
    assert (journal.scheduler, journal._weights) == (None, {})


def test_what_fails_in_the_journal_fails_no_call(tmp_path, monkeypatch):
    lines = []
    journal = open_journal(tmp_path, log=lines.append)
    monkeypatch.setattr(journal, "_encode", None)
    bench = Bench(journal=journal)
    bench.add("a")
    bench.run()
    assert len(bench.tokens("a")) == 20
    assert len(lines) == 1
    assert "internal error: TypeError" in lines[0]


def test_its_owner_alone_can_read_it(tmp_path):
    open_journal(tmp_path).close()
    (path,) = tmp_path.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_length_beyond_the_file_ends_it_without_an_end(tmp_path):
    journal = open_journal(tmp_path)
    bench = Bench(journal=journal)
    bench.add("a")
    bench.run()
    journal.close()
    assert replay(tmp_path).end == ""
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    data[len(HEADER) : len(HEADER) + 4] = b"\xff\xff\xff\xff"
    path.write_bytes(data)
    outcome = replay(tmp_path)
    assert (outcome.num_schedulers, outcome.end) == (0, None)
