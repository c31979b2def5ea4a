"""A file system with control groups of a process, as the kernel shows them, for tests."""

from pathlib import Path

UNLIMITED_V1 = 9223372036854771712


class ControlGroups:
    """A tree below `root`, of one version.

    Args:
        path: of this process's group, as /proc/self/cgroup says it.
        mounted: which group is mounted: "/" on a host, mostly the process's own in a container.
    """

    def __init__(self, root: Path, *, version: int, path: str = "/", mounted: str = "/") -> None:
        self.version = version
        self.mount = root / "sys/fs/cgroup" / ("memory" if version == 1 else "")
        proc = root / "proc/self"
        proc.mkdir(parents=True, exist_ok=True)
        self.mount.mkdir(parents=True, exist_ok=True)
        (proc / "cgroup").write_text(
            f"5:cpu,cpuacct:{path}\n4:memory:{path}\n0::/\n" if version == 1 else f"0::{path}\n"
        )
        where = "memory" if version == 1 else ""
        kind = "cgroup cgroup rw,memory" if version == 1 else "cgroup2 cgroup2 rw"
        (proc / "mountinfo").write_text(
            "22 1 0:2 / / rw - ext4 /dev/vda rw\n"
            f"35 31 0:32 {mounted} /sys/fs/cgroup/{where} rw,relatime shared:7 - {kind}\n"
        )

    def set(self, group: str, limit: int | None, usage: int, cached: int = 0) -> None:
        """Write what the kernel says of a group, whose path is relative to the mount."""
        folder = self.mount / group
        folder.mkdir(parents=True, exist_ok=True)
        if self.version == 1:
            text = str(UNLIMITED_V1 if limit is None else limit)
            (folder / "memory.limit_in_bytes").write_text(f"{text}\n")
            (folder / "memory.usage_in_bytes").write_text(f"{usage}\n")
            (folder / "memory.stat").write_text(
                f"inactive_file 0\nactive_file 7\ntotal_inactive_file {cached}\n"
            )
        else:
            (folder / "memory.max").write_text("max\n" if limit is None else f"{limit}\n")
            (folder / "memory.current").write_text(f"{usage}\n")
            (folder / "memory.stat").write_text(f"anon 1\ninactive_file {cached}\nactive_file 7\n")
