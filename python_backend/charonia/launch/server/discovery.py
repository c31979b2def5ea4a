"""Finds a tritonserver that can run charonia's models with this Python.

Owns the paths of the server's parts and of the project's model repository, and the environment that
Python stubs need. Must not know models, ports or processes.

Two places are searched, the container's first::

    /opt/tritonserver                       the container: its backends folder is used as it is
    site-packages/pytriton/tritonserver     the wheel nvidia-pytriton: stubs for several Pythons;
                                            `link_backends` puts the right one beside the backend
"""

import functools
import importlib.util
import os
import platform
import re
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from charonia.errors import LaunchError

CONTAINER_ROOT = Path("/opt/tritonserver")
STUB = "triton_python_backend_stub"
MIN_GLIBC = (2, 35)
WHEEL_PYTHONS = ("3.11", "3.12")
PACKAGE_PARENT = Path(__file__).resolve().parents[3]
"""Parent folder of this copy of charonia. The stubs' interpreter is isolated and does not read
PYTHONPATH. It first searches the directory that the server was started in, which is this one."""


@dataclass(frozen=True)
class Installation:
    """A tritonserver on this machine.

    Attributes:
        root: holds `bin/tritonserver`, `backends` and `caches`.
        stub: the Python backend's stub that must be linked beside the backend; None if it is
            already there (the container).
        lib_dirs: directories for LD_LIBRARY_PATH, in search order.
    """

    root: Path
    stub: Path | None
    lib_dirs: tuple[Path, ...]

    @property
    def binary(self) -> Path:
        """The server's executable."""
        return self.root / "bin" / "tritonserver"

    @property
    def is_embedded(self) -> bool:
        """True if it is the server of the wheel, release 24.10."""
        return self.stub is not None

    @functools.cached_property
    def options(self) -> frozenset[str]:
        """The command-line options of this release, without dashes."""
        result = subprocess.run(
            [self.binary, "--help"], env=self.environment(), capture_output=True, text=True
        )
        return frozenset(re.findall(r"^\s+--([\w-]+)", result.stderr + result.stdout, re.M))

    def link_backends(self, directory: Path) -> Path:
        """Return a folder for `--backend-directory`; `directory` is created if it is needed.

        The wheel's own folder is not written to: it may be read-only, or shared by processes with
        different Pythons.
        """
        if self.stub is None:
            return self.root / "backends"
        for backend in (self.root / "backends").iterdir():
            target = directory / backend.name
            target.mkdir(parents=True)
            for file in backend.iterdir():
                if file.is_file():
                    (target / file.name).symlink_to(file)
        (directory / "python" / STUB).symlink_to(self.stub)
        return directory

    def environment(self) -> dict[str, str]:
        """Environment variables for the server: the caller's, extended for the stubs.

        The stub embeds libpython. LD_LIBRARY_PATH makes it load the library of this interpreter, as
        another build of the same version fails in `import ssl`. PATH lets it find this virtual
        environment. PYTHONPATH lets Python processes that models start find this copy of charonia
        (for the models themselves see `PACKAGE_PARENT`).
        """
        env = dict(os.environ)
        env.pop("PYTHONHOME", None)
        for name, first in (
            ("LD_LIBRARY_PATH", self.lib_dirs),
            ("PATH", (Path(sys.executable).parent,)),
            ("PYTHONPATH", (PACKAGE_PARENT,)),
        ):
            inherited = [part for part in env.get(name, "").split(os.pathsep) if part]
            env[name] = os.pathsep.join([*map(str, first), *inherited])
        return env


def default_repository() -> Path:
    """The model_repository/ of the checkout (or copied tree) that contains this package.

    Raises:
        LaunchError: the package was installed without one.
    """
    root = PACKAGE_PARENT.parent
    if (root / "model_repository").is_dir():
        return root / "model_repository"
    raise LaunchError(
        f"no model_repository beside the package in {root}; name one with --model-repository"
    )


def find_tritonserver(container_root: Path = CONTAINER_ROOT) -> Installation:
    """Find the container's tritonserver, or else that of the nvidia-pytriton wheel.

    Raises:
        LaunchError: none was found, or it cannot run with this Python, machine or C library.
    """
    if (container_root / "bin" / "tritonserver").exists():
        return _container(container_root)
    return _wheel()


def _container(root: Path) -> Installation:
    stub = root / "backends" / "python" / STUB
    if not stub.exists():
        raise LaunchError(f"{root} has no Python backend: {stub} is missing")
    installation = Installation(root, None, (_libpython_dir(),))
    _check_links(stub, installation)
    return installation


def _wheel() -> Installation:
    _check_platform()
    spec = importlib.util.find_spec("pytriton")
    if spec is None or spec.origin is None:
        raise LaunchError(
            f"no tritonserver found: neither {CONTAINER_ROOT} nor the package nvidia-pytriton; "
            "run `make setup`, or pip install 'charonia[server]'"
        )
    package = Path(spec.origin).parent
    root = package / "tritonserver"
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = root / "python_backend_stubs" / python / STUB
    if python not in WHEEL_PYTHONS or not stub.exists():
        raise LaunchError(
            f"the embedded tritonserver needs CPython {' or '.join(WHEEL_PYTHONS)}; "
            f"this is {python}"
        )
    lib_dirs = (_libpython_dir(), package.parent / "nvidia_pytriton.libs")
    installation = Installation(root, stub, lib_dirs)
    _check_links(stub, installation)
    return installation


def _check_platform() -> None:
    system, machine = platform.system(), platform.machine()
    if (system, machine) != ("Linux", "x86_64"):
        raise LaunchError(
            f"the embedded tritonserver needs Linux on x86_64; this is {system} on {machine}"
        )
    name, version = platform.libc_ver()
    if name != "glibc" or tuple(map(int, version.split(".")[:2])) < MIN_GLIBC:
        needed = ".".join(map(str, MIN_GLIBC))
        raise LaunchError(
            f"the embedded tritonserver needs glibc {needed} or newer; "
            f"this is {name or 'another C library'} {version}".rstrip()
        )


def _libpython_dir() -> Path:
    """Directory of this interpreter's shared library.

    Raises:
        LaunchError: this Python was built without one.
    """
    directory = Path(sysconfig.get_config_var("LIBDIR") or "")
    library = sysconfig.get_config_var("INSTSONAME") or ""
    candidates = (directory, directory / str(sysconfig.get_config_var("MULTIARCH") or ""))
    for candidate in candidates:
        if ".so" in library and (candidate / library).exists():
            return candidate
    raise LaunchError(
        f"Python at {sys.executable} has no shared libpython, which Triton's Python backend "
        "needs; use a Python built with --enable-shared (a distribution's needs its libpython3.x "
        "package, pyenv PYTHON_CONFIGURE_OPTS=--enable-shared)"
    )


def _check_links(stub: Path, installation: Installation) -> None:
    """Check with `ldd` that the stub starts, and that it loads this Python's library."""
    result = subprocess.run(
        ["ldd", str(stub)], env=installation.environment(), capture_output=True, text=True
    )
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    if f"libpython{python}.so" not in result.stdout:
        raise LaunchError(
            f"the Python stub {stub} is not for Python {python}, which this is; start charonia "
            "with the version that it was built for"
        )
    missing = [line.split()[0] for line in result.stdout.splitlines() if "not found" in line]
    if missing:
        raise LaunchError(f"the Python stub {stub} lacks {', '.join(missing)}")


def main() -> int:
    """Print which tritonserver was found, or in one line why none was (for `make setup`)."""
    try:
        print(f"charonia: found {find_tritonserver().binary}")
    except LaunchError as error:
        print(f"charonia: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
