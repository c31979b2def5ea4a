"""How large the stacks of tritonserver's threads may grow, and what a limit changes."""

import resource
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from charonia.launch.server import processes
from charonia.launch.server.stacks import STACK_BYTES, stack_limit

HARD_BYTES = 64 * 2**20
ENOUGH = STACK_BYTES + 2**20
DESCRIBE = """
import resource, sys
from charonia.launch.server.stacks import stack_limit
name, value = sys.argv[1:]
resource.setrlimit(getattr(resource, name), (int(value), int(value)))
limit = stack_limit(total_bytes=2**40)
print(limit.num_bytes, limit.describe())
"""


def describe_under(name: str, value: int) -> str:
    """What a process says that has a lower limit."""
    command = [sys.executable, "-c", DESCRIBE, name, str(value)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


high_hard_limit = pytest.mark.skipif(
    resource.getrlimit(resource.RLIMIT_STACK)[1] not in (resource.RLIM_INFINITY, STACK_BYTES),
    reason="the hard limit of the stack is low here",
)


@high_hard_limit
def test_a_leader_gets_the_stack_limit_and_keeps_the_hard_one(tmp_path: Path) -> None:
    limit = stack_limit(tmp_path / "none", ENOUGH)
    assert limit.describe() == f"thread_stacks bytes={STACK_BYTES}"
    script = "import resource; print(*resource.getrlimit(resource.RLIMIT_STACK))"
    leader = processes.start_leader([sys.executable, "-c", script], {}, stack_bytes=limit.num_bytes)
    out, _ = leader.communicate(timeout=30)
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    assert out.split() == [str(STACK_BYTES).encode(), str(hard).encode()]


def test_a_low_hard_limit_is_taken_and_named() -> None:
    said = describe_under("RLIMIT_STACK", HARD_BYTES)
    assert said.startswith(
        f"{HARD_BYTES} thread_stacks_small level=warning bytes={HARD_BYTES} reason="
    )
    assert f"the hard limit of the stack is {HARD_BYTES} bytes" in said


def test_a_limited_address_space_leaves_the_stack_as_it_is() -> None:
    said = describe_under("RLIMIT_AS", 2**36)
    assert said.startswith("None thread_stacks_small level=warning bytes=unchanged reason=")
    assert "the address space is limited" in said


@pytest.mark.parametrize(("mode", "is_raised"), [("0", True), ("1", True), ("2", False)])
def test_a_machine_that_promises_no_more_than_it_has_leaves_the_stack_as_it_is(
    tmp_path: Path, mode: str, is_raised: bool
) -> None:
    overcommit = tmp_path / "overcommit_memory"
    overcommit.write_text(f"{mode}\n", encoding="ascii")
    limit = stack_limit(overcommit, ENOUGH)
    assert (limit.num_bytes is not None) == is_raised
    assert ("vm.overcommit_memory is 2" in limit.describe()) == (not is_raised)


@high_hard_limit
@pytest.mark.parametrize(("mode", "num_bytes"), [("0", 2**30), ("1", STACK_BYTES)])
def test_a_stack_larger_than_memory_and_swap_is_asked_for_only_where_linux_refuses_none(
    tmp_path: Path, mode: str, num_bytes: int
) -> None:
    overcommit = tmp_path / "overcommit_memory"
    overcommit.write_text(f"{mode}\n", encoding="ascii")
    limit = stack_limit(overcommit, total_bytes=2**31)
    assert limit.num_bytes == num_bytes
    assert ("has 2147483648 bytes of memory and swap" in limit.describe()) == (mode == "0")


@pytest.mark.skipif(
    int(Path("/proc/sys/vm/overcommit_memory").read_text("ascii")) != 0,
    reason="Linux is told here not to compare a mapping with memory and swap",
)
@pytest.mark.parametrize(("share", "is_started"), [(0.5, True), (1.1, False)])
def test_linux_starts_a_thread_whose_stack_is_half_of_memory_and_swap_but_none_with_more(
    share: float, is_started: bool
) -> None:
    total = psutil.virtual_memory().total + psutil.swap_memory().total
    script = f"import threading; threading.stack_size({int(total * share) // 4096 * 4096})\n"
    script += "threading.Thread(target=print, args=('started',)).start()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stdout == "started\n") == is_started
