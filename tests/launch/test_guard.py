"""How the embedded server gets its guard; what it is good for is tested end to end."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from charonia.errors import LaunchError
from charonia.launch.server.discovery import Installation, find_tritonserver
from charonia.launch.server.guard import MAX_ELEMENTS, make_guard
from charonia.launch.server.tritonserver import TritonServer
from charonia.server_options import KEY_VARIABLE

EMBEDDED = Installation(Path("root"), Path("stub"), ())
CONTAINERS = Installation(Path("root"), None, ())


def test_the_guard_is_loaded_before_what_is_to_be_loaded_anyway(tmp_path: Path) -> None:
    guard = make_guard(find_tritonserver(), tmp_path)
    assert guard.describe() == f"request_guard max_elements={MAX_ELEMENTS}"
    environment = {"LD_PRELOAD": "libjemalloc.so"}
    guard.add_to(environment, "k")
    preload = f"{tmp_path / 'guard.so'} libjemalloc.so"
    assert environment == {"LD_PRELOAD": preload, KEY_VARIABLE: "k"}
    assert (tmp_path / "guard.so").exists()


def test_a_containers_server_needs_none(tmp_path: Path) -> None:
    guard = make_guard(CONTAINERS, tmp_path)
    environment: dict[str, str] = {}
    guard.add_to(environment, "k")
    assert (guard.describe(), environment) == ("request_guard max_elements=none", {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("no-such-compiler", "the C compiler 'no-such-compiler' (the variable CC names another)"),
        ("false", "the C compiler 'false' fails: exit code 1"),
    ],
)
def test_without_a_compiler_the_log_says_what_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str, reason: str
) -> None:
    monkeypatch.setenv("CC", compiler)
    guard = make_guard(EMBEDDED, tmp_path)
    environment: dict[str, str] = {}
    guard.add_to(environment, "k")
    assert environment == {}
    assert guard.describe().startswith("request_guard_missing level=warning reason=")
    assert reason in guard.describe()


def test_a_library_that_the_dynamic_linker_passes_over_is_no_guard(tmp_path: Path) -> None:
    directory = tmp_path / "of two words"
    directory.mkdir()
    guard = make_guard(find_tritonserver(), directory)
    assert guard.preload is None
    assert guard.obstacle.startswith("the dynamic linker does not load the guard: ")
    assert "/of' from LD_PRELOAD cannot be preloaded" in guard.obstacle


def test_threads_that_lock_in_opposite_order_do_not_wait_for_ever(tmp_path: Path) -> None:
    source = str(Path(__file__).with_name("crossing_locks.c"))
    library, program = str(tmp_path / "libinputs.so"), str(tmp_path / "tritonserver")
    subprocess.run(["cc", "-DLIBRARY", "-shared", "-fPIC", "-o", library, source], check=True)
    subprocess.run(["cc", "-D_GNU_SOURCE", "-o", program, source, library], check=True)
    guard = make_guard(find_tritonserver(), tmp_path)
    environment: dict[str, str] = {}
    guard.add_to(environment, "k")
    result = subprocess.run(
        [program], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout == "40 60", "of each round two and three, none of them lost"


def test_a_server_whose_guard_has_gone_does_not_start(
    make_server: Callable[..., TritonServer],
) -> None:
    server = make_server()
    assert server.guard.preload is not None
    server.guard.preload.unlink()
    with pytest.raises(LaunchError, match="the dynamic linker does not load the guard"):
        server.start()
    assert not server.is_running
