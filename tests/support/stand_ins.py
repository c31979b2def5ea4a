"""A supervised server over the stand-in models, and what a test may do to it.

Owns how to use the stand-ins (tests/launch/repository). Must not know what a test expects.
"""

import contextlib
import math
import os
import shutil
import signal
from pathlib import Path

import httpx

from charonia.launch.server.tritonserver import TritonServer
from charonia.supervision.server.background import in_background
from charonia.supervision.server.judge import SupervisionLimits
from support.e2e import wait_for
from support.events import events
from support.supervised import ALLOWED_S, Supervised

STAND_INS = Path(__file__).parents[1] / "launch" / "repository"
UNPROBED = SupervisionLimits(
    probe_interval_s=math.inf, model_hang_s=math.inf, stopped_s=0.5, backoff_s=0.1
)
"""Limits without probes: losses are noticed in the process table."""
PROBED = SupervisionLimits(
    probe_interval_s=0.1,
    hang_s=math.inf,
    model_hang_s=math.inf,
    server_hang_s=math.inf,
    stopped_s=0.5,
    backoff_s=0.1,
)
"""All are asked, and may be silent for ever, as far as a test does not bound it.

For an answer they have the usual time: Triton takes a second to say that a process is gone.
"""
SLOW_LINE = "the stand-in engine loads slowly"
KINDS = {signal.SIGKILL: "died", signal.SIGSTOP: "stopped"}


def add_pair(repository: Path) -> None:
    """Add `pair`: as the stand-in for `generate`, but two processes, and nobody asks it."""
    config = shutil.copytree(repository / "generate", repository / "pair") / "config.pbtxt"
    text = config.read_text(encoding="utf-8")
    config.write_text(text.replace("count: 1", "count: 2"), encoding="utf-8")


def control_over_http(server: TritonServer, model: str, operation: str) -> httpx.Response:
    """Load or unload a model with the run's key."""
    name = server.control_name(model)
    url = f"http://{server.http_url}/v2/repository/models/{name}/{operation}"
    return httpx.post(url, headers=server.api_headers, timeout=ALLOWED_S)


class Target(Supervised):
    """A supervised server with the stand-ins, and how to use them."""

    def ask(self, model: str, text: str = "x") -> httpx.Response:
        """One call of a model."""
        url = f"http://{self.server.http_url}/v2/models/{model}/generate"
        return httpx.post(url, json={"text_input": text}, timeout=ALLOWED_S)

    def wait_taken(self, text: str, count: int = 1) -> None:
        """Wait until so many processes have taken a call with a text that they treat specially."""
        taken = wait_for(
            lambda: list(self.server.repository.glob(f"{text}-*")),
            lambda found: len(found) >= count,
            ALLOWED_S,
        )
        assert len(taken) == count

    def hang(self, model: str) -> None:
        """Make a model deaf to whatever comes later."""
        in_background(lambda: self.ask(model, "hang"))
        self.wait_taken("hang")

    def lose_generate(self) -> None:
        """Kill it; it is back, and serves, when this returns."""
        num_back = len(events(self.lines, "model_back"))
        os.kill(self.server.pids("generate")[0], signal.SIGKILL)
        self.wait_events("model_back", num_back + 1)
        assert self.ask("generate").status_code == 200, "new calls wait for nobody"

    def end_at_once(self) -> None:
        """Stop, but let nobody wait for calls that were lost with a process."""
        self.stop.set()
        if (pid := self.server.pid) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def control(self, model: str, operation: str) -> None:
        """Load or unload a model, as the operator."""
        control_over_http(self.server, model, operation).raise_for_status()
