"""Slots in a file, which outlive the process, the server and a reboot.

Owns the file's format, and checking what is read from it. Must not know blocks or other files.

    header    4,096 bytes: identity, size and secret, with a checksum
    groups    of 64 slots, the last one of fewer:
      records   64 bytes for each slot: key, checksum of key and content, and one of the record
      slots     each a whole number of 4,096 bytes

A file belongs to one identity (an engine's model, version and part), and one process at a time uses
it; see `slot_files`. It grows and shrinks at its end, so the other slots are kept. A slot's record
is cleared before the slot is written, and rewritten afterwards, so a process that is killed in
between leaves an empty slot. Checksums, which are compared at every load, detect the damage of a
power failure, a full disk or a damaged file. The file is not mapped into memory: a read of a
truncated file returns an error, but an access to mapped memory would end the process.
"""

import contextlib
import errno
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
import xxhash

from charonia.data.kv_tiers.identity import Identity
from charonia.data.kv_tiers.slot_files import (
    FORMAT,
    PAGE,
    STORAGE_UNIT,
    Header,
    alone_in,
    note_use,
    read_header,
    take_file,
    tend_others,
    write_header,
)
from charonia.data.kv_tiers.slots import Pieces
from charonia.errors import ConfigError, shown
from charonia.events import RareLog, event, warning_event
from charonia.protocol import KEY_BYTES, SlotContent

_GIB = 2**30
_RECORD = struct.Struct(f"<Q?{KEY_BYTES}s16s15x8s")  # number of the save, draft, key, two sums
_GROUP = PAGE // _RECORD.size
_EXTENT_BYTES = 32
"""The most bytes that a file system takes to record the location of a slot."""
_MAX_BUFFERS = 512
"""The most buffers that one call reads or writes."""
SECRET_BYTES = 32


def bytes_for(num_slots: int, slot_bytes: int) -> int:
    """The most bytes of the file system that a file with this many slots takes."""
    notes = -(-num_slots * _EXTENT_BYTES // PAGE) * PAGE
    return _Places(slot_bytes).end(num_slots) + PAGE + notes


def num_slots_in(num_bytes: int, slot_bytes: int) -> int:
    """The most slots of a file that takes at most `num_bytes`."""
    each = _Places(slot_bytes).stride + _RECORD.size + _EXTENT_BYTES
    num_slots = max(num_bytes // each, 0)
    while num_slots and bytes_for(num_slots, slot_bytes) > num_bytes:
        num_slots -= 1
    return num_slots


class _Places:
    """The offsets in a file."""

    def __init__(self, slot_bytes: int) -> None:
        self.stride = -(-slot_bytes // PAGE) * PAGE

    def records(self, group: int) -> int:
        return PAGE + group * (PAGE + _GROUP * self.stride)

    def record(self, slot: int) -> int:
        group, place = divmod(slot, _GROUP)
        return self.records(group) + place * _RECORD.size

    def slot(self, slot: int) -> int:
        group, place = divmod(slot, _GROUP)
        return self.records(group) + PAGE + place * self.stride

    def end(self, num_slots: int) -> int:
        """The size of a file."""
        return self.slot(num_slots - 1) + self.stride


class FileSlots:
    """Implements `Slots`.

    Args:
        directory: for all files; it is created if it does not exist.
        num_slots, slot_bytes: the number of slots, and the size of each. A file that had another
            number of slots keeps the contents of those that remain.
        most_bytes: that the file may have; see `slot_files` on how this affects other files.
        label: see `Header`.
        num_files: how many such files the engine has on this machine.
        log: takes one line.

    Attributes:
        secret: random, created with the file and kept in it.

    Raises:
        ConfigError: such a file cannot be created.
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
        label: str = "",
        num_files: int = 1,
        log: Callable[[str], None],
    ) -> None:
        self.num_slots = num_slots
        self._log = log
        self._rare_log = RareLog(log)
        self._places = _Places(slot_bytes)
        self._records: dict[int, tuple[int, bool, bytes, bytes]] = {}
        self._num_saves = 0
        self.secret = os.urandom(SECRET_BYTES)
        wanted = Header(identity, num_slots, slot_bytes, self.secret, label, most_bytes, FORMAT)
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with alone_in(directory):
                self.path, self._file = take_file(directory, identity)
                try:
                    self._open(wanted)
                    is_empty = not self._records
                    tend_others(directory, self.path, wanted, is_empty=is_empty, log=log)
                except OSError:
                    self._give_up()
                    raise
        except OSError as error:
            raise _no_file(directory, most_bytes, error) from None
        log(event("kv_file_opened", path=self.path, blocks=len(self._records)))
        self._warn_of_a_full_disk(num_files)

    def contents(self) -> list[SlotContent]:
        """See `Slots`."""
        records = self._records.copy()  # another thread may be saving
        slots = sorted(records, key=lambda slot: records[slot][0])
        return [SlotContent(slot, records[slot][2], records[slot][1]) for slot in slots]

    def save(self, slot: int, key: bytes, has_draft: bool, pieces: Pieces) -> bool:
        """See `Slots`."""
        self._records.pop(slot, None)
        self._num_saves += 1
        record = (self._num_saves, has_draft, key, _checksum(key, pieces))
        try:
            self._write_record(slot, b"\0" * _RECORD.size)
            _write(self._file, pieces, self._places.slot(slot))
            self._write_record(slot, _pack(slot, record))
        except OSError as error:
            self._rare_log(
                warning_event("kv_file_not_written", reason=error.strerror or "it is full")
            )
            return False
        self._records[slot] = record
        return True

    def load(self, slot: int, key: bytes, pieces: Pieces) -> bool:
        """See `Slots`."""
        record = self._records.get(slot)
        if record is None or record[2] != key:
            return False
        try:
            is_whole = _read(self._file, pieces, self._places.slot(slot))
            reason = "its checksum is another one" if is_whole else "the file is too short"
        except OSError as error:
            is_whole, reason = False, error.strerror or str(error)
        if is_whole and _checksum(key, pieces) == record[3]:
            return True
        self._rare_log(warning_event("kv_file_damaged", slot=slot, reason=reason))
        self.forget(slot)
        return False

    def forget(self, slot: int) -> None:
        """See `Slots`."""
        self._records.pop(slot, None)
        with contextlib.suppress(OSError):
            self._write_record(slot, b"\0" * _RECORD.size)

    def close(self) -> None:
        """See `Slots`. The contents of the file stay. It may be closed repeatedly."""
        if self._file >= 0:
            with contextlib.suppress(OSError):
                note_use(self._file)
            os.close(self._file)
            self._file = -1

    def _open(self, wanted: Header) -> None:
        """Take over the contents of the file, or clear it."""
        size = self._places.end(self.num_slots)
        found = read_header(self._file)
        if reason := _why_not(found, wanted):
            if os.fstat(self._file).st_size:
                self._log(warning_event("kv_file_discarded", path=self.path, reason=reason))
            os.ftruncate(self._file, 0)
            os.ftruncate(self._file, size)
            write_header(self._file, wanted)
            return
        assert found is not None
        self.secret = found.secret
        wanted = msgspec.structs.replace(wanted, secret=found.secret)
        if os.fstat(self._file).st_size != size:
            os.ftruncate(self._file, size)
        if found != wanted:
            write_header(self._file, wanted)
        self._read_records()
        if found.num_slots != self.num_slots:
            num_kept, num_slots = len(self._records), self.num_slots
            self._log(event("kv_file_resized", was=found.num_slots, slots=num_slots, kept=num_kept))

    def _give_up(self) -> None:
        """Close the file, and remove it if it is empty."""
        with contextlib.suppress(OSError):
            if not os.fstat(self._file).st_size:
                self.path.unlink()
        os.close(self._file)
        self._file = -1

    def _warn_of_a_full_disk(self, num_files: int) -> None:
        status, disk = os.fstat(self._file), os.fstatvfs(self._file)
        missing = self._places.end(self.num_slots) - status.st_blocks * STORAGE_UNIT
        free = disk.f_bavail * disk.f_frsize
        if missing * num_files > free:
            reason = (
                f"kv_cache_file_space needs {missing * num_files / _GIB:.3g} GiB more, and the file"
                f" system has {free / _GIB:.3g} GiB free: blocks that do not fit are not saved"
            )
            self._log(warning_event("kv_file_may_not_fit", path=self.path, reason=reason))

    def _read_records(self) -> None:
        num_damaged = 0
        for first in range(0, self.num_slots, _GROUP):
            data = os.pread(self._file, PAGE, self._places.record(first))
            for place in range(len(data) // _RECORD.size):
                packed = data[place * _RECORD.size : (place + 1) * _RECORD.size]
                slot = first + place
                if not any(packed):
                    continue
                *record, checksum = _RECORD.unpack(packed)
                if slot >= self.num_slots:  # a slot of the file when it was larger
                    self._write_record(slot, b"\0" * _RECORD.size)
                elif checksum == _record_sum(slot, packed[: -len(checksum)]):
                    self._records[slot] = tuple(record)
                else:
                    num_damaged += 1
        self._num_saves = max((number for number, *_ in self._records.values()), default=0)
        if num_damaged:
            self._log(warning_event("kv_file_damaged", path=self.path, records=num_damaged))

    def _write_record(self, slot: int, packed: bytes) -> None:
        if os.pwrite(self._file, packed, self._places.record(slot)) != _RECORD.size:
            raise OSError


def _pack(slot: int, record: tuple[int, bool, bytes, bytes]) -> bytes:
    packed = _RECORD.pack(*record, b"")[:-8]
    return packed + _record_sum(slot, packed)


def _record_sum(slot: int, packed: bytes) -> bytes:
    """Checksum of a record. It includes the slot, so a record is valid only there."""
    return _sum64(slot.to_bytes(8, "little") + packed)


def _sum64(data: bytes) -> bytes:
    return xxhash.xxh3_64_digest(data)


def _checksum(key: bytes, pieces: Pieces) -> bytes:
    checksum = xxhash.xxh3_128(key)
    for piece in pieces:
        checksum.update(piece.data)
    return checksum.digest()


def _write(file: int, pieces: Pieces, offset: int) -> None:
    """Raise OSError if not all of it can be written."""
    for some in _batches(pieces):
        num_bytes = sum(map(len, some))
        if os.pwritev(file, some, offset) != num_bytes:
            raise OSError
        offset += num_bytes


def _read(file: int, pieces: Pieces, offset: int) -> bool:
    """Fill `pieces`; False if the file ends before."""
    for some in _batches(pieces):
        num_bytes = sum(map(len, some))
        if os.preadv(file, some, offset) != num_bytes:
            return False
        offset += num_bytes
    return True


def _batches(pieces: Pieces) -> list[Any]:
    return [pieces[first : first + _MAX_BUFFERS] for first in range(0, len(pieces), _MAX_BUFFERS)]


def _why_not(found: Header | None, wanted: Header) -> str | None:
    """Explain why the contents of a file cannot be used; None if they can."""
    if found is None:
        return "its header is damaged, or of another version"
    if found.format != wanted.format:
        return "it is of another format"
    if found.identity != wanted.identity:
        return "it is of another engine"
    if found.slot_bytes != wanted.slot_bytes:
        return f"its blocks have {found.slot_bytes} bytes, and not {wanted.slot_bytes}"
    return None


def _no_file(directory: Path, most_bytes: int, error: OSError) -> ConfigError:
    if error.errno == errno.EFBIG:
        return ConfigError(
            f"kv_cache_file_space = {most_bytes / _GIB:g} GiB is more than a file can have in"
            f" kv_cache_path = {shown(str(directory))}: {error.strerror}"
        )
    return ConfigError(
        f"kv_cache_path = {shown(str(directory))} must be a directory that files can be written"
        f" to: {error.strerror}"
    )
