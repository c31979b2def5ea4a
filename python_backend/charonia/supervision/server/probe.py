"""Asks the scheduler whether it and its engine serve.

Owns what an answer says about the health of the server. Must not know what to do about it.

Triton's own /v2/health/ready stays 200 when the scheduler's process is dead, so only an inference
tells: the probe of `charonia.serving.requests.probing`, which is answered at once. It is asked
again until the engine has made a step.
"""

import enum
import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from dataclasses import dataclass
from typing import Any

import httpx

from charonia.errors import LaunchError, LostError, split_answer
from charonia.supervision.server.background import in_background
from charonia.supervision.server.protocols import Server
from charonia.supervision.server.timeouts import STOPPED_S

PROBE_ID = "charonia-probe"
FIRST_TIMEOUT_S = 60.0  # the first inference of all may compile or page in weights
MAX_REFUSING_S = 60.0  # a new scheduler refuses until it has found its engine, which is loaded
FRESH_S = 1.0  # a step that long ago shows that steps run
POLL_S = 0.05


class Health(enum.Enum):
    """What a probe found."""

    SERVING = "steps run"
    REFUSING = "the scheduler lives, but no step runs"
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
        # No kept connections: tritonserver would wait for them when it stops. A limit of the pool's
        # would leave one open that is made while another thread closes the client.
        self._client = httpx.Client(headers={"Connection": "close"})

    def check(self, timeout_s: float, meanwhile: Callable[[], None] = lambda: None) -> ProbeResult:
        """Ask until a step has run, at most `timeout_s` seconds; SILENT when `stop` is set.

        Args:
            meanwhile: called several times a second; what it raises ends the wait.
        """
        answer = in_background(lambda: self._ask(timeout_s))
        while not self._stop.is_set():
            if wait([answer], timeout=POLL_S).done:
                return answer.result()
            meanwhile()
        return ProbeResult(Health.SILENT, "stop requested")

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _ask(self, timeout_s: float) -> ProbeResult:
        began = time.monotonic()
        while True:
            waited_s = time.monotonic() - began
            try:
                reply = self._client.post(
                    f"{self._base}/{self._model}/generate",
                    json={"id": PROBE_ID, "probe": True},
                    timeout=max(timeout_s - waited_s, POLL_S),
                )
            except (httpx.HTTPError, RuntimeError) as error:  # RuntimeError: closed meanwhile
                return ProbeResult(Health.SILENT, str(error) or type(error).__name__)
            if reply.status_code != 200:
                return self._refused(reply)
            waited_s = time.monotonic() - began
            try:
                result, is_certain = _judge(json.loads(reply.json()["text_output"]), waited_s)
            except (ValueError, TypeError, KeyError):
                return ProbeResult(Health.REFUSING, "the answer cannot be understood")
            if is_certain or waited_s + POLL_S > timeout_s or self._stop.wait(POLL_S):
                return result

    def _refused(self, reply: httpx.Response) -> ProbeResult:
        try:
            text = str(reply.json()["error"])
        except (ValueError, TypeError, KeyError):
            text = reply.text.strip()
        message, kind = split_answer(text)
        # Triton's own words have no kind.
        is_dead = kind is None and re.search(
            rf"Stub process '{self._model}_\d+_\d+' is not healthy", message
        )
        return ProbeResult(Health.DEAD if is_dead else Health.REFUSING, message)


def _judge(answer: Mapping[str, Any], waited_s: float) -> tuple[ProbeResult, bool]:
    """What an answer says that came `waited_s` seconds after the first question.

    Returns:
        The result, and whether asking again soon would find the same.
    """
    step_age_s, turn_age_s = answer["step_age_s"], answer["turn_age_s"]
    if answer["engine_up"] and step_age_s is not None and step_age_s <= max(FRESH_S, waited_s):
        return ProbeResult(Health.SERVING), True
    if answer["reason"] is not None:
        return ProbeResult(Health.REFUSING, answer["reason"]), True
    if turn_age_s is None or turn_age_s > max(FRESH_S, waited_s):
        return ProbeResult(Health.SILENT, "the scheduling thread is held up"), False
    if answer["engine_up"]:
        return ProbeResult(Health.REFUSING, f"no step within {waited_s:.1f} s"), False
    return ProbeResult(Health.REFUSING, "the engine is being brought back"), False


def wait_serving(
    server: Server,
    probe: Probe,
    timeout_s: float,
    stop: threading.Event | None = None,
    stopped_s: float = STOPPED_S,
) -> bool:
    """Wait until Triton is ready and steps run; False when `stop` was set.

    Raises:
        LostError: the server, or the scheduler's process, ended after clients could reach it, or
            tritonserver was stopped for `stopped_s` seconds.
        LaunchError: so it did earlier, or it did not get so far within `timeout_s` seconds.
    """
    stop = stop or threading.Event()
    started = time.monotonic()
    server.wait_ready(timeout_s, stop, stopped_s)
    ready = time.monotonic()
    while not stop.is_set():
        result = probe.check(FIRST_TIMEOUT_S, lambda: server.raise_if_lost(stopped_s))
        if result.health is Health.SERVING:
            return True
        server.raise_if_lost(stopped_s)
        if result.health is Health.DEAD:
            raise LostError(f"the scheduler's process was lost: {result.detail}")
        now = time.monotonic()
        is_refusing = result.health is Health.REFUSING and now - ready > MAX_REFUSING_S
        if is_refusing or now - started > timeout_s:
            raise LaunchError(f"tritonserver is up, but does not serve: {result.detail}")
        stop.wait(0.1)
    return False
