"""`charonia serve` with those who observe it: a collector of its traces, a reader of its metrics.

Owns these processes, and that a turn ends when all spans of it were sent. Must not know what is
measured.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx

from paths import LOADTESTS, TESTS
from systems_under_test import SideError, Waves, WaveTrace
from triton_side import run_waves, settings_as_text

# It shares `charonia serve` as a command with the tests.
sys.path.append(str(TESTS))

from support.serving import Serving

READ_EVERY_S = 1.0
SEND_EVERY_MS = 200
"""Interval at which spans are sent, in milliseconds. By default it is five seconds, and spans of
one turn would be sent in the next."""
QUIET_S = 0.5
"""Silence after which senders have nothing left, in seconds."""
DRAIN_S = 30.0
NUM_SENDERS = 2
"""tritonserver and the scheduler."""
_ADDRESS = re.compile(r"^ +(gRPC|metrics) +(\S+)$", re.MULTILINE)


class ObservedSide:
    """A server in processes of its own; its log goes to a file that is removed.

    Args:
        model: its checkpoint. settings: engine arguments, and `scheduler.NAME` of the scheduler's.
        is_traced: every request is traced, by tritonserver and by the scheduler.
        is_read: its metrics are read during each turn.
        options: further ones of `charonia serve`.
        source: another checkout whose code serves; None is this one.

    Raises:
        SideError: it cannot be started.

    Attributes:
        reads, failed_reads: of its metrics so far.
        server: its tritonserver.
    """

    def __init__(
        self,
        model: Path,
        settings: dict[str, Any],
        *,
        is_traced: bool,
        is_read: bool,
        options: Sequence[str] = (),
        source: Path | None = None,
    ) -> None:
        self.reads = self.failed_reads = 0
        self._is_read = is_read
        self._exit = contextlib.ExitStack()
        self._collector = self._exit.enter_context(running_collector()) if is_traced else None
        arguments = [f"--model={model}", *(f"--set={one}" for one in settings_as_text(settings))]
        further = list(options)
        if self._collector is not None:
            arguments += [f"--otlp-traces-endpoint={self._collector.url}", "--trace-rate=1"]
            quick = f"--trace-config=opentelemetry,bsp_schedule_delay={SEND_EVERY_MS}"
            further += ["--", quick]
        paths = (
            [] if source is None else [str(source / one) for one in ("python_backend", "client")]
        )
        try:
            with _variable("PYTHONPATH", os.pathsep.join(paths)) if paths else nullcontext():
                self._serve([*arguments, *further])
        except BaseException:
            self.close()
            raise

    def _serve(self, arguments: Sequence[str]) -> None:
        log = self._exit.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - closed in close()
        with _variable("OTEL_BSP_SCHEDULE_DELAY", str(SEND_EVERY_MS)):
            serving = Serving(*arguments, stderr=log)
        self._exit.callback(serving.end, signal.SIGINT)
        try:
            addresses = dict(_ADDRESS.findall(serving.wait_announced()))
        except AssertionError:
            log.seek(0)
            said = "\n".join(log.read().decode(errors="replace").splitlines()[-12:])
            raise SideError(f"charonia serve cannot be started; it said last:\n{said}") from None
        self.server = serving.server()
        self._grpc_url, self._metrics_url = addresses["gRPC"], addresses["metrics"]

    def run(self, waves: Waves) -> list[WaveTrace]:
        """Complete all requests, observed; afterwards nobody is busy with them any more."""
        with self._reading() if self._is_read else nullcontext():
            traces = run_waves(self._grpc_url, waves)
        if self._collector is not None:
            self._collector.wait_quiet()
        return traces

    def check_senders(self) -> None:
        """Check that both senders have sent spans, if it is traced.

        Raises:
            SideError: one has not, so that its time means nothing.
        """
        if self._collector is None:
            return
        senders = self._collector.counted()["senders"]
        if len(senders) != NUM_SENDERS:
            raise SideError(f"spans came from {senders}; {NUM_SENDERS} senders were expected")

    def close(self) -> None:
        """Stop the server and its collector."""
        self._exit.close()

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Read the metrics page every second, first after a second, as Prometheus does."""
        stop = threading.Event()

        def read() -> None:
            with httpx.Client() as http:
                while not stop.wait(READ_EVERY_S):
                    self.reads += 1
                    try:
                        http.get(self._metrics_url).raise_for_status()
                    except httpx.HTTPError:
                        self.failed_reads += 1

        thread = threading.Thread(target=read)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


class Collector:
    """A collector that drops spans, in a process of its own.

    Attributes:
        url: its endpoint.
    """

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        assert process.stdout is not None
        self.url = f"http://127.0.0.1:{int(process.stdout.readline())}"

    def counted(self) -> dict[str, Any]:
        """Count the requests that came so far, and their senders."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        counted: dict[str, Any] = json.loads(self._process.stdout.readline())
        return counted

    def wait_quiet(self) -> None:
        """Wait until nothing has come for a while.

        Raises:
            SideError: spans come without end.
        """
        deadline = time.monotonic() + DRAIN_S
        before = self.counted()["requests"]
        while time.monotonic() < deadline:
            time.sleep(QUIET_S)
            requests = self.counted()["requests"]
            if requests == before:
                return
            before = requests
        raise SideError(f"spans still come {DRAIN_S:g} s after the last request")


@contextlib.contextmanager
def running_collector() -> Iterator[Collector]:
    """A collector for the duration of this context."""
    command = [sys.executable, str(LOADTESTS / "workers" / "otlp_sink.py")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield Collector(process)


@contextlib.contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """A variable of this process's environment, which the processes started here inherit."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
