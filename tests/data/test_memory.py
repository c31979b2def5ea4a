"""What is left of memory, by the machine and by the control groups of the process."""

from pathlib import Path

import psutil
import pytest

from charonia.data.memory import available_memory
from support.control_groups import ControlGroups

MIB = 2**20
VERSIONS = pytest.mark.parametrize("version", [1, 2])


@VERSIONS
def test_a_group_leaves_its_limit_less_what_is_in_use(tmp_path: Path, version: int) -> None:
    groups = ControlGroups(tmp_path, version=version, path="/app")
    groups.set("app", 100 * MIB, 30 * MIB)
    assert available_memory(tmp_path) == (70 * MIB, 100 * MIB, "cgroup /app")


@VERSIONS
def test_files_that_are_cached_and_not_in_use_are_available(tmp_path: Path, version: int) -> None:
    groups = ControlGroups(tmp_path, version=version, path="/app")
    groups.set("app", 100 * MIB, 90 * MIB, cached=50 * MIB)
    assert available_memory(tmp_path).available == 60 * MIB


@VERSIONS
def test_the_group_above_that_leaves_least_is_the_one_that_limits(
    tmp_path: Path, version: int
) -> None:
    groups = ControlGroups(tmp_path, version=version, path="/pods/pod/app")
    groups.set("", None, 500 * MIB)
    groups.set("pods", 200 * MIB, 190 * MIB)
    groups.set("pods/pod", 150 * MIB, 20 * MIB)
    groups.set("pods/pod/app", 100 * MIB, 10 * MIB)
    assert available_memory(tmp_path) == (10 * MIB, 200 * MIB, "cgroup /pods")


@VERSIONS
@pytest.mark.parametrize(
    ("path", "mounted"),
    [
        ("/docker/abc", "/docker/abc"),  # the container's group is what is mounted
        ("/", "/"),  # a namespace of its own says so
        ("/", "/../.."),  # the same on some kernels
        ("/../other", "/"),  # started from outside of the namespace
        ("/docker/abc", "/docker/xyz"),
    ],
)
def test_a_container_finds_its_group_at_the_root_of_the_mount(
    tmp_path: Path, version: int, path: str, mounted: str
) -> None:
    groups = ControlGroups(tmp_path, version=version, path=path, mounted=mounted)
    groups.set("", 100 * MIB, 40 * MIB)
    assert available_memory(tmp_path) == (60 * MIB, 100 * MIB, "cgroup /")


@VERSIONS
def test_a_group_within_a_container_is_found_below_the_mount(tmp_path: Path, version: int) -> None:
    groups = ControlGroups(tmp_path, version=version, path="/docker/abc/app", mounted="/docker/abc")
    groups.set("", None, 40 * MIB)
    groups.set("app", 80 * MIB, 40 * MIB)
    assert available_memory(tmp_path) == (40 * MIB, 80 * MIB, "cgroup /app")


def test_a_limit_beyond_which_the_kernel_slows_a_group_down_counts(tmp_path: Path) -> None:
    groups = ControlGroups(tmp_path, version=2, path="/app")
    groups.set("app", 100 * MIB, 30 * MIB)
    (groups.mount / "app/memory.high").write_text(f"{50 * MIB}\n")
    assert available_memory(tmp_path).available == 20 * MIB


def test_a_group_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    groups = ControlGroups(tmp_path, version=2, path="/app")
    groups.set("app", 100 * MIB, 110 * MIB)
    assert available_memory(tmp_path).available == 0


def test_where_both_versions_are_mounted_the_one_counts_that_accounts_for_memory(
    tmp_path: Path,
) -> None:
    groups = ControlGroups(tmp_path, version=1, path="/app")
    groups.set("app", 100 * MIB, 30 * MIB)
    mountinfo = tmp_path / "proc/self/mountinfo"
    unified = "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    mountinfo.write_text(unified + mountinfo.read_text())
    assert available_memory(tmp_path).source == "cgroup /app"


@pytest.mark.parametrize("has_groups", [True, False])
def test_without_a_limit_it_is_what_the_machine_has(tmp_path: Path, has_groups: bool) -> None:
    if has_groups:
        ControlGroups(tmp_path, version=2).set("", None, 30 * MIB)
    found = available_memory(tmp_path)
    assert (found.total, found.source) == (psutil.virtual_memory().total, "machine")
    assert 0 < found.available < found.total


def test_what_this_process_has_left_can_be_read() -> None:
    found = available_memory()
    assert 0 < found.available <= psutil.virtual_memory().total
    assert found.available <= found.total
