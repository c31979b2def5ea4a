"""The systems under test, the sides of a benchmark: how each is asked, and what comes back.

Owns the driver's end of the workers' protocol (see workers/worker.py), which processes a side is
made of, and where each side's Python and worker are. Must not know what is measured, or why.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

import psutil

from paths import ROOT, WORKERS

BASE, TRITON, VLLM, LLAMA_CPP = "charonia", "triton", "vllm", "llama.cpp"
INT8, Q8_0 = "charonia int8", "llama.cpp Q8_0"
START_TIMEOUT_S = 900.0
RUN_TIMEOUT_S = 3600.0
STOP_TIMEOUT_S = 5.0


class Request(NamedTuple):
    """A prompt, as token ids, and how many tokens are to follow it."""

    prompt: list[int]
    max_tokens: int


Waves = Sequence[Sequence[Request]]
"""Requests wave by wave. Those of a wave are handed over at once, one wave after the other."""


class SideError(Exception):
    """A side cannot be started, or failed; the text says which and why."""


@dataclass(slots=True)
class Trace:
    """Times of one request's tokens, in seconds since its wave was handed over."""

    arrivals: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def gaps(self) -> list[float]:
        """Seconds between tokens; several that arrive together share their time."""
        gaps = []
        for index in range(1, len(self.arrivals)):
            count = self.counts[index]
            gaps += [(self.arrivals[index] - self.arrivals[index - 1]) / count] * count
        return gaps


@dataclass(slots=True)
class WaveTrace:
    """Times of one wave."""

    seconds: float
    requests: list[Trace]


class Side(Protocol):
    """One way to have prompts completed."""

    name: str
    versions: dict[str, str]
    notes: list[str]

    def run(self, waves: Waves, sampling: dict[str, Any] | None = None) -> list[WaveTrace]:
        """Complete all requests; greedily without `sampling`."""
        ...

    def processes(self) -> list[psutil.Process]:
        """All of the side's processes, to see what they do between their turns."""
        ...

    def close(self) -> None:
        """Let go of the model."""
        ...


class Worker:
    """A process that answers one JSON line with another.

    Args:
        name: of the side, for messages.
        python: which Python runs it. script: in workers/. settings: its first line.
        environment: variables that it gets beside the driver's own.

    Raises:
        SideError: it ended, or said why it cannot start.
    """

    def __init__(
        self,
        name: str,
        python: Path,
        script: str,
        settings: dict[str, Any],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        self._process = subprocess.Popen(
            [str(python), str(WORKERS / script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **(environment or {})},
            process_group=0,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            hello = self.ask(settings, START_TIMEOUT_S)["ready"]
        except BaseException:
            self.close()
            raise
        self.versions: dict[str, str] = hello["versions"]
        self.notes: list[str] = hello["notes"]

    def ask(self, request: dict[str, Any], timeout: float = RUN_TIMEOUT_S) -> dict[str, Any]:
        """Send one line and wait for its answer, at most so many seconds."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            raise SideError(f"{self.name}: no answer within {timeout:g} s") from None
        except BrokenPipeError:
            line = ""
        if not line:
            raise SideError(f"{self.name}: its process ended; it said last:\n{self._last_lines()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise SideError(f"{self.name}: {answer['error']}")
        return answer

    def processes(self) -> list[psutil.Process]:
        """The worker and its children."""
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self._process.pid)
            return [process, *process.children(recursive=True)]
        return []

    def pause(self) -> None:
        """Stop all its processes where they are. Should the driver die, the kernel resumes them:
        it does that to stopped process groups that become orphans, and hangs them up.
        """
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let them run on."""
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """End of input ends the worker; after some seconds a signal does, for its children too."""
        self.resume()
        children = self.processes()[1:]
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()  # type: ignore[union-attr]
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_TIMEOUT_S)
        self._signal(signal.SIGKILL)
        self._process.wait()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        self._reader.join(STOP_TIMEOUT_S)
        self._log.close()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stdout:
            for line in stdout:
                self._lines.put(line)
        self._lines.put("")

    def _last_lines(self, count: int = 12) -> str:
        self._log.seek(0)
        return "\n".join(self._log.read().decode(errors="replace").splitlines()[-count:])


class WorkerSide(Worker):
    """A side in a process of its own."""

    def run(self, waves: Waves, sampling: dict[str, Any] | None = None) -> list[WaveTrace]:
        """See `Side`."""
        asked = [[request._asdict() for request in wave] for wave in waves]
        answer = self.ask({"waves": asked, "sampling": sampling or {}})
        return [
            WaveTrace(wave["seconds"], [Trace(**request) for request in wave["requests"]])
            for wave in answer["waves"]
        ]


@dataclass(frozen=True)
class SideSpec:
    """Location of a side that runs in a process of its own.

    Attributes:
        environment: beside this repository's other files; None is the running Python.
        settings: of its own, beside those of all sides.
        peer: its name in loadtests/setup_peers.py.
    """

    script: str
    environment: str | None = None
    peer: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def python(self) -> Path:
        """Python that runs its worker."""
        if self.environment is None:
            return Path(sys.executable)
        return ROOT / self.environment / "bin" / "python"

    def missing(self) -> str | None:
        """Tell how to install it; None if it is installed."""
        if self.python.exists():
            return None
        return f"not installed; `python loadtests/setup_peers.py {self.peer}` installs it"


_PLAIN = {"enable_prefix_caching": False, "async_scheduling": False}
SPECS = {
    BASE: SideSpec("charonia_worker.py", settings=_PLAIN),
    "transformers": SideSpec("transformers_worker.py"),
    VLLM: SideSpec("vllm_worker.py", ".venv-vllm", "vllm"),
    LLAMA_CPP: SideSpec("llamacpp_worker.py", ".venv-llamacpp", "llamacpp"),
    INT8: SideSpec("charonia_worker.py", settings={**_PLAIN, "quantization": "int8"}),
    Q8_0: SideSpec("llamacpp_worker.py", ".venv-llamacpp", "llamacpp", {"kinds": ["q8_0"]}),
}
NAMES = (BASE, TRITON, "transformers", VLLM, LLAMA_CPP)
"""Sides in bfloat16, or the nearest format that they have."""
QUANTIZED = {INT8: BASE, Q8_0: LLAMA_CPP}
"""Sides with 8-bit weights, and those that they are beside."""
