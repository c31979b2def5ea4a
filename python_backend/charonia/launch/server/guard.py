"""The guard: a library preloaded into the embedded tritonserver. See guard.c, waits.c and locks.c.

Owns compiling it, once per run, and having tritonserver load it. Must not know requests.
"""

import os
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

from charonia.errors import LaunchError
from charonia.events import event, warning_event
from charonia.launch.server.discovery import Installation
from charonia.server_options import KEY_VARIABLE

MAX_ELEMENTS = 2**24
"""Maximum number of elements of any input. The longest prompt has a quarter of that."""
_SOURCES = [str(Path(__file__).with_name(name)) for name in ("guard.c", "waits.c", "locks.c")]
_FLAGS = (
    *("-O2", "-shared", "-fPIC", "-fvisibility=hidden"),
    f"-DMAX_ELEMENTS={MAX_ELEMENTS}",
    f'-DKEY_VARIABLE="{KEY_VARIABLE}"',
)
_PRELOAD = "LD_PRELOAD"


@dataclass(frozen=True)
class Guard:
    """The guard of a server, or why it has none.

    Attributes:
        preload: the library to preload; None if none is needed, or there is an obstacle.
        obstacle: why the server has no guard and certain requests can end it; empty otherwise.
    """

    preload: Path | None = None
    obstacle: str = ""

    def describe(self) -> str:
        """A line for the log."""
        if self.obstacle:
            return warning_event("request_guard_missing", reason=self.obstacle)
        return event("request_guard", max_elements=MAX_ELEMENTS if self.preload else "none")

    def add_to(self, environment: dict[str, str], key: str) -> None:
        """Extend a server's environment so that it loads the library and knows the run's key."""
        if self.preload is not None:
            others = environment.get(_PRELOAD, "").split()
            environment[_PRELOAD] = " ".join([str(self.preload), *others])
            environment[KEY_VARIABLE] = key

    def check(self, binary: Path, environment: dict[str, str]) -> None:
        """Check that a server with this environment loads the library.

        The dynamic linker ignores a library that it cannot load, for example because it was
        removed, or is on a file system mounted noexec.

        Raises:
            LaunchError: it does not load it.
        """
        if self.preload is not None:
            try:
                result = subprocess.run(
                    ["ldd", str(binary)], env=environment, capture_output=True, text=True
                )
            except OSError as error:
                raise LaunchError(f"ldd cannot be asked: {error.strerror}") from None
            if str(self.preload) not in result.stdout.split():
                lines = result.stderr.strip().splitlines() or [f"not {self.preload}"]
                raise LaunchError(f"the dynamic linker does not load the guard: {lines[0]}")


def make_guard(installation: Installation, directory: Path) -> Guard:
    """Compile a server's guard in `directory`. Needs a C compiler and takes about 0.1 s."""
    if not installation.is_embedded:
        return Guard()
    library = directory / "guard.so"
    compiler = shlex.split(os.environ.get("CC", "cc"))
    command = [*compiler, *_FLAGS, "-o", str(library), *_SOURCES, "-ldl"]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except OSError as error:
        named = f"the C compiler {compiler[0]!r} (the variable CC names another)"
        return Guard(obstacle=f"{named} cannot be run: {error.strerror}")
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or [f"exit code {error.returncode}"]
        return Guard(obstacle=f"the C compiler {compiler[0]!r} fails: {lines[0]}")
    guard = Guard(library)
    environment = installation.environment()
    guard.add_to(environment, key="")
    try:
        guard.check(installation.binary, environment)
    except LaunchError as error:
        return Guard(obstacle=str(error))
    return guard
