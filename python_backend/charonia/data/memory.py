"""Memory that this process can still allocate, by the machine and by its control groups.

Owns reading the kernel's figures. Must not know what the memory is used for.

Control groups are nested, up to the root. The limit of a group applies to all groups below it, so
the least memory that any of them leaves is available::

    /sys/fs/cgroup              no limit
      kubepods                  limit 32 GiB, 20 GiB in use ─► 12 GiB are left
        pod                     limit 16 GiB,  3 GiB in use ─► 13 GiB are left
          container             no limit                           this process

In a container, usually its own group is mounted in place of the root; `/proc/self/mountinfo` says
which part of the tree is mounted. Version 1 has a separate tree for memory, with other file names.
If both versions are mounted, version 1 accounts for memory.
"""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

ROOT = Path("/")


class Memory(NamedTuple):
    """Available and total memory, in bytes.

    Attributes:
        source: of the limit: "machine", or a control group such as "cgroup /kubepods/pod".
    """

    available: int
    total: int
    source: str


class _Names(NamedTuple):
    """File names of a version of control groups, and the name of a line in memory.stat."""

    limits: tuple[str, ...]
    usage: str
    inactive_file: str


_V1 = _Names(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Names(("memory.max", "memory.high"), "memory.current", "inactive_file")


class _Mount(NamedTuple):
    """A mounted tree of control groups: the group that is its root, and the mount point."""

    names: _Names
    root: str
    point: Path


def available_memory(root: Path = ROOT) -> Memory:
    """The least memory that the machine and the control groups of this process leave.

    Cached files that are not in use count as available, because the kernel evicts them first.

    Args:
        root: of the file system to search for control groups.
    """
    machine = psutil.virtual_memory()
    found = [Memory(machine.available, machine.total, "machine")]
    with contextlib.suppress(OSError):  # the kernel has no control groups
        for mount, group in _groups(root):
            if (left := _left_by(mount, group)) is not None:
                found.append(left)
    return min(found)


def _groups(root: Path) -> Iterator[tuple[_Mount, str]]:
    """Yield this process's group and those above it, as far as they are mounted, innermost first.

    Each is a path relative to the mount point.

    Raises:
        OSError: there are no control groups.
    """
    text = (root / "proc/self/cgroup").read_text(encoding="utf-8", errors="surrogateescape")
    mounts = _mounts(root)
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        is_memory = "memory" in controllers.split(",")
        mount = mounts.get("v1" if is_memory else "v2")
        if mount is None or not (is_memory or (not controllers and "v1" not in mounts)):
            continue
        parts = _below(path, mount.root)
        for depth in range(len(parts), -1, -1):
            yield mount, "/".join(parts[:depth])


def _mounts(root: Path) -> dict[str, _Mount]:
    """The trees that account for memory: "v1", if there is one, and "v2"."""
    found: dict[str, _Mount] = {}
    text = (root / "proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    for line in text.splitlines():
        fields, _, behind = line.partition(" - ")
        _, _, _, mount_root, point, *_ = fields.split(" ")
        kind, _, options = behind.split(" ", 2)
        where = root / point.lstrip("/")
        if kind == "cgroup" and "memory" in options.split(","):
            found.setdefault("v1", _Mount(_V1, mount_root, where))
        elif kind == "cgroup2":
            found.setdefault("v2", _Mount(_V2, mount_root, where))
    return found


def _below(path: str, root: str) -> list[str]:
    """The parts of a group's path below the mounted group; empty if it is not below it.

    The kernel gives a group outside of the mount as a path with "..", or as its path on the host.
    """
    parts, above = path.strip("/").split("/"), root.strip("/").split("/")
    above = [part for part in above if part]
    if ".." in parts or parts[: len(above)] != above:
        return []
    return [part for part in parts[len(above) :] if part]


def _left_by(mount: _Mount, group: str) -> Memory | None:
    """The memory that a group leaves; None if it has no limit or cannot be read."""
    folder, names = mount.point / group, mount.names
    limits = [limit for name in names.limits if (limit := _number(folder / name)) is not None]
    usage = _number(folder / names.usage)
    if not limits or usage is None:
        return None
    cached = 0
    with contextlib.suppress(OSError):
        text = (folder / "memory.stat").read_text(encoding="ascii")
        if line := re.search(rf"^{names.inactive_file} (\d+)$", text, re.MULTILINE):
            cached = int(line[1])
    limit = min(limits)
    return Memory(max(limit - max(usage - cached, 0), 0), limit, f"cgroup /{group}")


def _number(path: Path) -> int | None:
    """The number in a file; None if the file does not exist, or contains "max"."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
