"""Asks the scheduler for one token, to learn whether it serves.

Owns what an answer says about the health of the server. Must not know what to do about it.

Triton's own /v2/health/ready stays 200 when the scheduler's process is dead, so only an inference
tells. The request carries a deadline that a living scheduler keeps even when its queue is long, by
refusing it: any answer of the scheduler, errors too, shows that it lives.
"""

import enum
import re
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass

import httpx

from charonia.launch.errors import LaunchError
from charonia.launch.server import TritonServer

PROBE_ID = "charonia-probe"
FIRST_TIMEOUT_S = 60.0  # the first inference of all may compile or page in weights
MAX_REFUSING_S = 60.0  # a new scheduler refuses until it has found its engine, which is loaded
DEADLINE_SHARE = 0.8  # of the timeout: after it a living scheduler refuses the probe
POLL_S = 0.05


class Health(enum.Enum):
    """What a probe found."""

    SERVING = "a token came"
    REFUSING = "the scheduler lives, but answers with an error"
    SILENT = "no answer"
    DEAD = "the scheduler's process is gone or stopped"


@dataclass(frozen=True)
class ProbeResult:
    """`detail` is the error's text, where there is one."""

    health: Health
    detail: str = ""


class Probe:
    """Probes one model over HTTP; `close` it at the end.

    Args:
        http_url: `host:port`. model: the scheduler's name.
        stop: once set, no call waits for an answer any more.
    """

    def __init__(self, http_url: str, model: str, stop: threading.Event | None = None) -> None:
        self._base = f"http://{http_url}/v2/models"
        self._model = model
        self._stop = stop or threading.Event()
        # No kept connections: tritonserver would wait for them when it stops.
        self._client = httpx.Client(limits=httpx.Limits(max_keepalive_connections=0))

    def check(self, timeout_s: float) -> ProbeResult:
        """One inference of one token; SILENT after `timeout_s` seconds, or when `stop` is set."""
        answer: Future[ProbeResult] = Future()
        thread = threading.Thread(
            target=lambda: answer.set_result(self._ask(timeout_s)), daemon=True, name=PROBE_ID
        )
        thread.start()
        while not self._stop.is_set():
            try:
                return answer.result(timeout=POLL_S)
            except FutureTimeoutError:
                continue
        return ProbeResult(Health.SILENT, "stop requested")

    def is_loaded(self, model: str) -> bool:
        """Whether Triton says that a model is loaded."""
        try:
            return self._client.get(f"{self._base}/{model}/ready").status_code == 200
        except httpx.HTTPError:
            return False

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _ask(self, timeout_s: float) -> ProbeResult:
        request = {
            "id": PROBE_ID,
            "text_input": "a",
            "max_tokens": 1,
            "temperature": 0,
            "timeout": int(timeout_s * DEADLINE_SHARE * 1e6),
        }
        url = f"{self._base}/{self._model}/generate"
        try:
            reply = self._client.post(url, json=request, timeout=timeout_s)
        except (httpx.HTTPError, RuntimeError) as error:  # RuntimeError: closed meanwhile
            return ProbeResult(Health.SILENT, str(error) or type(error).__name__)
        if reply.status_code == 200:
            return ProbeResult(Health.SERVING)
        # The same words about another model would be the scheduler's own, of its engine.
        is_dead = re.search(rf"Stub process '{self._model}_\d+_\d+' is not healthy", reply.text)
        return ProbeResult(Health.DEAD if is_dead else Health.REFUSING, reply.text.strip())


def wait_serving(
    server: TritonServer, probe: Probe, timeout_s: float, stop: threading.Event | None = None
) -> bool:
    """Wait until Triton is ready and the scheduler gives a token; False when `stop` was set.

    Raises:
        LaunchError: the server ended, or did not get so far within `timeout_s` seconds.
    """
    stop = stop or threading.Event()
    started = time.monotonic()
    server.wait_ready(timeout_s, stop)
    ready = time.monotonic()
    while not stop.is_set():
        result = probe.check(FIRST_TIMEOUT_S)
        if result.health is Health.SERVING:
            return True
        server.raise_if_ended()
        now = time.monotonic()
        is_refusing = result.health is Health.REFUSING and now - ready > MAX_REFUSING_S
        if result.health is Health.DEAD or is_refusing or now - started > timeout_s:
            raise LaunchError(f"tritonserver is up, but does not serve: {result.detail}")
        stop.wait(0.1)
    return False
