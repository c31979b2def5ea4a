"""A supervised server over the stand-in models, and what a test may do to it.

Owns how to use the stand-ins (tests/launch/repository). Must not know what a test expects.
"""

import dataclasses
import os
import shutil
import signal
from pathlib import Path

import httpx
import pytest

from charonia.launch.patience import SupervisionLimits
from charonia.launch.server import TritonServer
from support.e2e import wait_for
from support.events import events
from support.supervised import ALLOWED_S, Supervised

STAND_INS = Path(__file__).parents[1] / "launch" / "repository"
QUICK = SupervisionLimits(
    probe_interval_s=0.5,
    probe_timeout_s=1.0,
    hang_s=2.0,
    stopped_s=0.5,
    server_hang_s=1.0,
    backoff_s=0.1,
)
PATIENT = dataclasses.replace(QUICK, hang_s=5.0, server_hang_s=5.0)
"""For who must not be restarted, on a machine that may stand still for a second or two."""
UNPROBED = SupervisionLimits(probe_interval_s=3600, stopped_s=0.5)
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

    def generate(self, **parameters: object) -> httpx.Response:
        return httpx.post(
            f"http://{self.server.http_url}/v2/models/scheduler/generate",
            json={"text_input": "x", **parameters},
            timeout=ALLOWED_S,
        )

    def ask_generate(
        self, text: str, timeout: float = ALLOWED_S, model: str = "generate"
    ) -> httpx.Response:
        """One call of the model beside the scheduler, or of another like it."""
        url = f"http://{self.server.http_url}/v2/models/{model}/generate"
        return httpx.post(url, json={"text_input": text}, timeout=timeout)

    def lose_generate(self) -> None:
        """Kill it; it is back, and serves, when this returns."""
        num_back = len(events(self.lines, "model_back"))
        os.kill(self.server.pids("generate")[0], signal.SIGKILL)
        wait_for(lambda: events(self.lines, "model_back"), lambda back: len(back) > num_back)
        assert self.ask_generate("x").status_code == 200, "new calls wait for nobody"

    def hang(self) -> None:
        """Make the scheduler deaf to whatever comes later."""
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"http://{self.server.http_url}/v2/models/scheduler/generate",
                json={"text_input": "x", "hang": True},
                timeout=0.5,
            )

    def control(self, model: str, operation: str) -> None:
        """Load or unload a model, as the operator."""
        control_over_http(self.server, model, operation).raise_for_status()
