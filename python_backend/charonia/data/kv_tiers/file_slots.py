"""Slots in a file, which outlive the process, the server and the machine's next start.

Owns the file: its format, who may use it, and what of it is believed. Must not know blocks.

    header    4,096 bytes: identity, size and secret, with a checksum
    records   64 bytes for each slot: key, checksum of key and content, and one of the record
    slots     each a whole number of 4,096 bytes

A file is of one identity (an engine's model, version and part), and is used by one process at a
time, which holds a lock on it; others take files of their own beside it. A record is taken back
before its slot is written, and written after it, so a process that is killed meanwhile leaves an
empty slot. What a machine leaves that loses its power, or a full disk, or a damaged file is found
by the checksums, which are compared whenever something is loaded. Nothing is mapped into memory:
where a file is cut off, a read says so, while an access to mapped memory ends the process.
"""

import contextlib
import fcntl
import hashlib
import os
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import xxhash

from charonia.data.kv_tiers.slots import Pieces
from charonia.errors import ConfigError, shown
from charonia.events import RareLog, event
from charonia.protocol import KEY_BYTES, SlotContent

_PAGE = 4096
_RECORD = struct.Struct(f"<Q?{KEY_BYTES}s16s15x8s")  # number of the save, draft, key, two sums
_STORAGE_UNIT = 512  # bytes, of what `stat` tells of a file's blocks
_MAX_FILES = 64
"""Of one identity in a directory, so of processes that use it at the same time."""
_MAX_BUFFERS = 512
"""That one call reads or writes."""
_PREFIX, _SUFFIX = "charonia-", ".kv"
SECRET_BYTES = 32


class Identity(NamedTuple):
    """All that a content depends on beside its key.

    Attributes:
        engine: what is the same for all ranks of an engine. part: what is not.
    """

    engine: bytes
    part: bytes


class _Header(msgspec.Struct, frozen=True):
    identity: Identity
    num_slots: int
    slot_bytes: int
    secret: bytes


class FileSlots:
    """Implements `Slots`.

    Args:
        directory: for all files; it is made where there is none.
        num_slots, slot_bytes: how many, and how large each of them is.
        most_bytes: that files may have which nobody uses, of other engines, or left by one that
            ran beside this one; the oldest of them are removed.
        log: takes one line.

    Attributes:
        secret: that was made for the file and stays with it.

    Raises:
        ConfigError: there can be no such file.
    """

    name: Literal["file"] = "file"

    def __init__(
        self,
        directory: Path,
        identity: Identity,
        num_slots: int,
        slot_bytes: int,
        *,
        most_bytes: int,
        log: Callable[[str], None],
    ) -> None:
        self.num_slots = num_slots
        self._log = log
        self._rare_log = RareLog(log)
        self._stride = -(-slot_bytes // _PAGE) * _PAGE
        self._first = _PAGE + -(-num_slots * _RECORD.size // _PAGE) * _PAGE
        engine, part = (hashlib.blake2b(one, digest_size=6).hexdigest() for one in identity)
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            number, self.path, self._file = _take_file(directory, f"{_PREFIX}{engine}-{part}")
        except OSError as error:
            raise _no_file(directory, error.strerror) from None
        self._records: dict[int, tuple[int, bool, bytes, bytes]] = {}
        self._num_saves = 0
        try:
            header = self._read_header()
            wanted = _Header(identity, num_slots, slot_bytes, header.secret if header else b"")
            if header == wanted:
                self.secret = header.secret
                self._read_records()
            else:
                self.secret = os.urandom(SECRET_BYTES)
                self._begin_anew(msgspec.structs.replace(wanted, secret=self.secret))
            _remove_others(directory, f"{_PREFIX}{engine}-*-{number}{_SUFFIX}", most_bytes)
        except OSError as error:
            os.close(self._file)
            raise _no_file(directory, error.strerror) from None
        log(event("kv_file_opened", path=str(self.path), blocks=len(self._records)))

    def contents(self) -> list[SlotContent]:
        """See `Slots`."""
        records = self._records.copy()  # another thread may be saving
        slots = sorted(records, key=lambda slot: records[slot][0])
        return [SlotContent(slot, records[slot][2], records[slot][1]) for slot in slots]

    def save(self, slot: int, key: bytes, has_draft: bool, pieces: Pieces) -> None:
        """See `Slots`."""
        self._records.pop(slot, None)
        self._num_saves += 1
        record = (self._num_saves, has_draft, key, _checksum(key, pieces))
        try:
            self._write_record(slot, b"\0" * _RECORD.size)
            _write(self._file, pieces, self._first + slot * self._stride)
            self._write_record(slot, _pack(slot, record))
        except OSError as error:
            self._rare_log(event("kv_file_not_written", reason=error.strerror or "it is full"))
        else:
            self._records[slot] = record

    def load(self, slot: int, key: bytes, pieces: Pieces) -> bool:
        """See `Slots`."""
        record = self._records.get(slot)
        if record is None or record[2] != key:
            return False
        try:
            is_whole = _read(self._file, pieces, self._first + slot * self._stride)
            reason = "its checksum is another one" if is_whole else "the file is too short"
        except OSError as error:
            is_whole, reason = False, error.strerror or str(error)
        if is_whole and _checksum(key, pieces) == record[3]:
            return True
        self._rare_log(event("kv_file_damaged", slot=slot, reason=reason))
        self.forget(slot)
        return False

    def forget(self, slot: int) -> None:
        """See `Slots`."""
        self._records.pop(slot, None)
        with contextlib.suppress(OSError):
            self._write_record(slot, b"\0" * _RECORD.size)

    def close(self) -> None:
        """See `Slots`. What is in the file stays there; it may be closed again."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    @property
    def _size(self) -> int:
        return self._first + self.num_slots * self._stride

    def _read_header(self) -> _Header | None:
        """None where the file is new, or not to be believed."""
        data = os.pread(self._file, _PAGE, 0)
        if not data:
            return None
        length = int.from_bytes(data[8:12], "little")
        header = data[12 : 12 + length]
        if data[:8] == _sum64(header):
            with contextlib.suppress(msgspec.DecodeError):
                return msgspec.msgpack.decode(header, type=_Header)
        return None

    def _begin_anew(self, header: _Header) -> None:
        if os.fstat(self._file).st_size:
            self._log(event("kv_file_discarded", path=str(self.path)))
        os.ftruncate(self._file, 0)
        os.ftruncate(self._file, self._size)
        data = msgspec.msgpack.encode(header)
        os.pwrite(self._file, _sum64(data) + len(data).to_bytes(4, "little") + data, 0)

    def _read_records(self) -> None:
        data = os.pread(self._file, self.num_slots * _RECORD.size, _PAGE)
        num_damaged = 0
        for slot in range(len(data) // _RECORD.size):
            packed = data[slot * _RECORD.size : (slot + 1) * _RECORD.size]
            if not any(packed):
                continue
            *record, checksum = _RECORD.unpack(packed)
            if checksum == _record_sum(slot, packed[: -len(checksum)]):
                self._records[slot] = tuple(record)
            else:
                num_damaged += 1
        self._num_saves = max((number for number, *_ in self._records.values()), default=0)
        if num_damaged:
            self._log(event("kv_file_damaged", records=num_damaged))

    def _write_record(self, slot: int, packed: bytes) -> None:
        if os.pwrite(self._file, packed, _PAGE + slot * _RECORD.size) != _RECORD.size:
            raise OSError


def _pack(slot: int, record: tuple[int, bool, bytes, bytes]) -> bytes:
    packed = _RECORD.pack(*record, b"")[:-8]
    return packed + _record_sum(slot, packed)


def _record_sum(slot: int, packed: bytes) -> bytes:
    """Of a record without its checksum; another slot's is no good in this one."""
    return _sum64(slot.to_bytes(8, "little") + packed)


def _sum64(data: bytes) -> bytes:
    return xxhash.xxh3_64_digest(data)


def _checksum(key: bytes, pieces: Pieces) -> bytes:
    checksum = xxhash.xxh3_128(key)
    for piece in pieces:
        checksum.update(piece.data)
    return checksum.digest()


def _write(file: int, pieces: Pieces, offset: int) -> None:
    """Raises OSError where not all of it can be written."""
    for some in _batches(pieces):
        num_bytes = sum(map(len, some))
        if os.pwritev(file, some, offset) != num_bytes:
            raise OSError
        offset += num_bytes


def _read(file: int, pieces: Pieces, offset: int) -> bool:
    """Fill `pieces`; False where the file ends before."""
    for some in _batches(pieces):
        num_bytes = sum(map(len, some))
        if os.preadv(file, some, offset) != num_bytes:
            return False
        offset += num_bytes
    return True


def _batches(pieces: Pieces) -> list[Any]:
    return [pieces[first : first + _MAX_BUFFERS] for first in range(0, len(pieces), _MAX_BUFFERS)]


def _take_file(directory: Path, name: str) -> tuple[int, Path, int]:
    """The first file of an identity that nobody uses, which is this user's: its number, where it
    is, and open. It is made where there is none.

    Raises:
        OSError: it cannot be opened or made, or there are too many.
    """
    for number in range(_MAX_FILES):
        path = directory / f"{name}-{number}{_SUFFIX}"
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if _lock(file) and _is_own(path, file):
            os.fchmod(file, 0o600)
            return number, path, file
        os.close(file)
    raise OSError(0, f"{_MAX_FILES} processes use it already")


def _is_own(path: Path, file: int) -> bool:
    """Whether an open file is one of this user's, and was not removed meanwhile."""
    status = os.fstat(file)
    with contextlib.suppress(FileNotFoundError):
        is_there = os.path.samestat(path.stat(), status)
        return is_there and stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
    return False


def _lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove_others(directory: Path, own: str, most_bytes: int) -> None:
    """Remove files that nobody uses, the oldest first, until few are left.

    Others may do the same at this moment.

    Args:
        own: a pattern of the names of this engine's files, of all ranks.
    """
    every = directory.glob(f"{_PREFIX}*{_SUFFIX}")
    paths = [path for path in every if not path.match(own)]
    found: list[tuple[float, int, Path]] = []
    for path in paths:
        with contextlib.suppress(OSError):
            status = path.stat()
            found.append((status.st_mtime, status.st_blocks * _STORAGE_UNIT, path))
    num_bytes = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if num_bytes <= most_bytes:
            return
        with contextlib.suppress(OSError):
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if _lock(file):
                    path.unlink()
                    num_bytes -= size
            finally:
                os.close(file)


def _no_file(directory: Path, reason: str | None) -> ConfigError:
    return ConfigError(
        f"kv_cache_path = {shown(str(directory))} must be a directory that files can be written"
        f" to: {reason}"
    )
