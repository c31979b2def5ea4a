import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from charonia.errors import LaunchError
from charonia.launch.server import discovery
from charonia.launch.server.discovery import STUB, find_tritonserver

THIS_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
OTHER_PYTHON = "3.12" if THIS_PYTHON == "3.11" else "3.11"


@pytest.fixture
def container(tmp_path: Path) -> Path:
    """A folder laid out as the container's; its files are the wheel's."""
    wheel = find_tritonserver().root
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "tritonserver").symlink_to(wheel / "bin" / "tritonserver")
    (tmp_path / "backends" / "python").mkdir(parents=True)
    return tmp_path


def put_stub(container: Path, python: str) -> None:
    stubs = find_tritonserver().root / "python_backend_stubs"
    (container / "backends" / "python" / STUB).symlink_to(stubs / python / STUB)


def libraries_of_the_wheel() -> str:
    return os.pathsep.join(map(str, find_tritonserver().lib_dirs))


def test_the_wheels_server_runs_in_the_environment_it_is_given() -> None:
    installation = find_tritonserver()
    result = subprocess.run(
        [installation.binary, "--help"], env=installation.environment(), capture_output=True
    )
    assert b"--model-repository" in result.stdout + result.stderr


def test_the_options_of_a_release_are_those_of_its_help() -> None:
    options = find_tritonserver().options
    assert {"model-repository", "http-port", "exit-timeout-secs"} <= options
    assert "model" not in options


def test_linked_backends_hold_the_stub_of_this_python(tmp_path: Path) -> None:
    backends = find_tritonserver().link_backends(tmp_path / "backends")
    stub = (backends / "python" / STUB).resolve()
    assert stub.parent.name == THIS_PYTHON
    assert (backends / "python" / "libtriton_python.so").exists()


def test_the_containers_server_comes_first_and_is_used_as_it_is(
    container: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_stub(container, THIS_PYTHON)
    monkeypatch.setenv("LD_LIBRARY_PATH", libraries_of_the_wheel())
    installation = find_tritonserver(container)
    assert installation.binary == container / "bin" / "tritonserver"
    assert installation.link_backends(tmp_path / "unused") == container / "backends"


def test_a_container_for_another_python_is_refused(container: Path) -> None:
    put_stub(container, OTHER_PYTHON)
    with pytest.raises(LaunchError, match=f"is not for Python {THIS_PYTHON}"):
        find_tritonserver(container)


def test_a_container_that_lacks_libraries_is_refused(container: Path) -> None:
    put_stub(container, THIS_PYTHON)
    with pytest.raises(LaunchError, match="lacks libcudart"):
        find_tritonserver(container)


def test_a_container_without_the_python_backend_is_refused(container: Path) -> None:
    with pytest.raises(LaunchError, match="has no Python backend"):
        find_tritonserver(container)


def test_a_python_without_shared_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    static = {"LIBDIR": "/usr/lib", "INSTSONAME": "libpython3.11.a"}
    monkeypatch.setattr(sysconfig, "get_config_var", static.get)
    with pytest.raises(LaunchError, match="no shared libpython"):
        find_tritonserver()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("machine", "aarch64", "needs Linux on x86_64; this is Linux on aarch64"),
        ("system", "Darwin", "this is Darwin on x86_64"),
        ("libc_ver", ("glibc", "2.31"), r"needs glibc 2.35 or newer; this is glibc 2.31$"),
        ("libc_ver", ("", ""), "this is another C library$"),
    ],
)
def test_an_unsupported_machine_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: object, message: str
) -> None:
    monkeypatch.setattr(discovery.platform, name, lambda: value)
    with pytest.raises(LaunchError, match=message):
        find_tritonserver()


def test_an_unsupported_python_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "WHEEL_PYTHONS", ("3.99",))
    with pytest.raises(LaunchError, match=f"needs CPython 3.99; this is {THIS_PYTHON}"):
        find_tritonserver()
