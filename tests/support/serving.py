"""Runs `charonia serve` as a person or a container does: as a command in a process of its own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import psutil

from charonia.launch.server.processes import find_by_argument
from support.supervised import ALLOWED_S

CHARONIA = (sys.executable, "-m", "charonia.launch.commands.cli")


class Serving:
    """A `charonia serve` on free ports.

    Args:
        arguments: beside the ports. stderr: where the log goes; a pipe by default.
        variables: further ones of its environment.
    """

    def __init__(
        self,
        *arguments: object,
        stderr: IO[bytes] | int = subprocess.PIPE,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        ports = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")
        self.process = subprocess.Popen(
            [*CHARONIA, "serve", *ports, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, **(variables or {})},
        )

    def wait_announced(self) -> str:
        """Wait until it serves (again), and return what it printed on stdout."""
        assert self.process.stdout is not None
        lines = []
        for line in self.process.stdout:
            lines.append(line)
            if "curl" in line:
                return "".join(lines)
        raise AssertionError(self.process.communicate())

    def server(self) -> psutil.Process:
        """Wait for its tritonserver, and return it."""
        deadline = time.monotonic() + ALLOWED_S
        while time.monotonic() < deadline:
            children = psutil.Process(self.process.pid).children()
            for server in find_by_argument(children, "--load-model=*"):
                return server
            time.sleep(0.01)
        raise AssertionError("no tritonserver was started")

    @property
    def runtime_dir(self) -> Path:
        """The directory of this run."""
        option = next(a for a in self.server().cmdline() if a.startswith("--model-repository="))
        return Path(option.partition("=")[2]).parent

    def end(self, signum: signal.Signals) -> tuple[float, str]:
        """Send a signal; returns the seconds until the end, and stderr."""
        started = time.monotonic()
        self.process.send_signal(signum)
        _, stderr = self.process.communicate(timeout=ALLOWED_S)
        return time.monotonic() - started, stderr
