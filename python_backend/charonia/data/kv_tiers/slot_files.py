"""The slot files of a directory: which of them a process uses, and which are removed.

Owns their names, headers and locks. Must not know the data after a header.

    charonia-<engine>-<part>-<number>.kv

The first two are digests of an identity. The number distinguishes files of one identity, which
equal engines use at the same time. Files with the same engine and number belong to the ranks of one
engine.

A process that uses a file holds a lock on it, so a file without a lock is idle. A starting process
first takes a file, then examines all others and locks the idle ones for that time. Meanwhile it
holds a lock on the directory, or another starting process would take those files for used.

At a start, idle files are removed, the least recently used first, until the rest needs no more
space than the files of one engine may have, taking the engine with the highest limit. So equal
servers that end together find all of their files again, in any order of starts, and whatever the
limit of a server of another model.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash

from charonia.data.kv_tiers.identity import Identity, differences
from charonia.events import event, warning_event

PAGE = 4096
STORAGE_UNIT = 512
"""Bytes per block in the result of `stat`."""
FORMAT = 2
_MAX_FILES = 64
"""The most files of one identity in a directory, and so of processes that use it at the same
time."""
_MAX_EXPLAINED = 4
_PATIENCE_S = 10.0
"""Timeout, in seconds, of the wait for other starting processes that hold the directory's lock."""
_PREFIX, _SUFFIX = "charonia-", ".kv"
_NOT_OURS = (errno.EACCES, errno.EPERM, errno.ELOOP, errno.EISDIR, errno.ENXIO)
"""Errors of opening an existing path that is another user's file, or not a file."""


class Header(msgspec.Struct, frozen=True):
    """The header of a file, in its first page.

    Attributes:
        num_slots, slot_bytes: the number of slots, and the size of each.
        secret: random, created with the file.
        label: equal for files of one model and rank, even if their identities differ.
        most_bytes: the size that the file may have.
        format: version of the data after the header.
    """

    identity: Identity
    num_slots: int
    slot_bytes: int
    secret: bytes
    label: str = ""
    most_bytes: int = 0
    format: int = 1


def read_header(file: int) -> Header | None:
    """Read a file's header; None if the file is new or the header damaged."""
    data = os.pread(file, PAGE, 0)
    length = int.from_bytes(data[8:12], "little")
    header = data[12 : 12 + length]
    if header and data[:8] == xxhash.xxh3_64_digest(header):
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
            return msgspec.msgpack.decode(header, type=Header)
    return None


def write_header(file: int, header: Header) -> None:
    """Write a file's header.

    Raises:
        OSError: it cannot be written.
    """
    data = msgspec.msgpack.encode(header)
    data = xxhash.xxh3_64_digest(data) + len(data).to_bytes(4, "little") + data
    assert len(data) <= PAGE, "a header has no more than digests and short texts"
    if os.pwrite(file, data, 0) != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextlib.contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """Hold the directory's lock, if the file system supports it."""
    with contextlib.ExitStack() as at_end:
        with contextlib.suppress(OSError):
            file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            at_end.callback(os.close, file)
            deadline = time.monotonic() + _PATIENCE_S
            while not _lock(file) and time.monotonic() < deadline:
                time.sleep(0.01)
        yield


def take_file(directory: Path, identity: Identity) -> tuple[Path, int]:
    """Open this user's first idle file of an identity; return its path and descriptor.

    It is created if there is none.

    Raises:
        OSError: the file cannot be created, or there are too many.
    """
    engine, part = (hashlib.blake2b(one, digest_size=6).hexdigest() for one in identity)
    for number in range(_MAX_FILES):
        path = directory / f"{_PREFIX}{engine}-{part}-{number}{_SUFFIX}"
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            if error.errno in _NOT_OURS and os.path.lexists(path):
                continue
            raise
        try:
            if _lock(file) and _is_own(path, file):
                os.fchmod(file, 0o600)
                note_use(file)
                return path, file
        except OSError:
            os.close(file)
            raise
        os.close(file)
    raise OSError(0, f"{_MAX_FILES} processes use it already")


def note_use(file: int) -> None:
    """Note that a file is used now. Least recently used files are removed first.

    Raises:
        OSError: the file system cannot record it.
    """
    now = time.time_ns()  # the kernel's own clock for files is coarse
    os.utime(file, ns=(now, now))


def tend_others(
    directory: Path, own: Path, header: Header, *, is_empty: bool, log: Callable[[str], None]
) -> None:
    """Log why other files of the model are not used, and remove idle files if there are too many.

    Args:
        own: path of the file with `header`. is_empty: whether it has no content.
        log: takes one line.
    """
    with contextlib.ExitStack() as locks:
        paths = directory.glob(f"{_PREFIX}*{_SUFFIX}")
        files = [file for path in paths if (file := _look_at(path, own, locks)) is not None]
        # The most recently used come last.
        files.sort(key=lambda file: file.used_ns)
        if is_empty:
            _explain(files, header, log)
        _remove_idle(files, log)


class _Name(NamedTuple):
    engine: str
    part: str
    number: str

    @classmethod
    def of(cls, path: Path) -> "_Name | None":
        parts = path.name.removeprefix(_PREFIX).removesuffix(_SUFFIX).split("-")
        return cls(*parts) if len(parts) == len(cls._fields) else None


class _File(NamedTuple):
    """One of this user's files.

    Attributes:
        is_idle: whether it is not used, and not reserved for a starting rank of this engine.
        num_bytes: that it takes of the file system. used_ns: time of its last use.
    """

    path: Path
    engine: str
    header: Header | None
    is_idle: bool
    num_bytes: int
    used_ns: int

    @property
    def most_bytes(self) -> int:
        return self.header.most_bytes if self.header else 0


def _look_at(path: Path, own: Path, locks: contextlib.ExitStack) -> _File | None:
    """Examine a file; None if it is not this user's. If idle it is locked until `locks` ends."""
    name, own_name = _Name.of(path), _Name.of(own)
    assert own_name is not None
    if name is None:
        return None
    with contextlib.suppress(OSError), contextlib.ExitStack() as at_end:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        at_end.callback(os.close, file)
        is_of_own_engine = (name.engine, name.number) == (own_name.engine, own_name.number)
        is_idle = not is_of_own_engine and _lock(file)
        if not _is_own(path, file):
            return None
        status = os.fstat(file)
        num_bytes = status.st_blocks * STORAGE_UNIT
        header = read_header(file)
        found = _File(path, name.engine, header, is_idle, num_bytes, status.st_mtime_ns)
        if is_idle:
            locks.push(at_end.pop_all())
        return found
    return None


def _explain(files: Sequence[_File], own: Header, log: Callable[[str], None]) -> None:
    """Log why idle files of the same model and rank are not used, the most recent first."""
    headers = [(file.path, file.header) for file in reversed(files) if file.is_idle and file.header]
    reasons = [
        (path, differences(header.identity.engine, own.identity.engine))
        for path, header in headers
        if header.label == own.label and header.identity.engine != own.identity.engine
    ]
    for path, reason in reasons[:_MAX_EXPLAINED]:
        log(warning_event("kv_file_not_used", path=path, reason=reason))


def _remove_idle(files: Sequence[_File], log: Callable[[str], None]) -> None:
    """Remove idle files until the rest is within the limit.

    Args:
        files: all files of the directory, least recently used first.
    """
    idle = [file for file in files if file.is_idle]
    num_bytes = sum(file.num_bytes for file in idle)
    allowed = Counter[str]()
    for file in files:
        allowed[file.engine] += file.most_bytes
    for file in idle:
        most_bytes = max(allowed.values())
        if num_bytes <= most_bytes:
            return
        try:
            file.path.unlink()
        except OSError:
            continue
        num_bytes -= file.num_bytes
        allowed[file.engine] -= file.most_bytes
        reason = f"no server uses it, and such files may have {most_bytes} bytes"
        log(event("kv_file_removed", path=file.path, bytes=file.num_bytes, reason=reason))


def _is_own(path: Path, file: int) -> bool:
    """Return whether an open file belongs to this user, and was not removed meanwhile."""
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
