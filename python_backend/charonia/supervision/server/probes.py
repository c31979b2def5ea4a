"""Probes a running server: whether the scheduler runs steps, and whether other models answer.

Owns the probes and the meaning of their answers. Must not know when probes are sent, or how long an
answer may take: `judge` decides that.

Triton's own /v2/health/ready stays 200 when a model's process is dead. So probes are inferences:

- The scheduler gets the probe of `charonia.serving.requests.probing`, which it answers at once. The
  probe is repeated until the engine has made a step.
- `llm`, `generate` and the scheduler's other names are asked to cancel a request that does not
  exist. This passes every process on their way, including the scheduler's, but takes no place in
  its queue.
- Facades get a request that their own process refuses. A refusal is an answer, too.
"""

import enum
import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from charonia.errors import split_answer
from charonia.local_calls import http_client
from charonia.model_config import read_config
from charonia.supervision.server.background import in_background
from charonia.supervision.server.model_control import ModelControl

PROBE_ID = "charonia-probe"
FRESH_S = 1.0  # steps run if the last one is no older than this
POLL_S = 0.05
_CANCEL = {"id": PROBE_ID, "cancel": True}
_QUESTIONS: Mapping[str, Mapping[str, Any]] = {
    "tokenizer": {"cancel": True},
    "postprocessor": {"chunk_text_output": ["a"]},
}
_FACADE_QUESTIONS: Mapping[str, Mapping[str, Any]] = {
    "ensemble": {"text_input": "a"},
    "tensorrt_llm_bls": {"text_input": "a"},
    "tensorrt_llm": {"stop": False},
    "preprocessing": {"QUERY": "a"},
    "postprocessing": {"SEQUENCE_LENGTH": [0]},
}
_QUESTION_OF = {**_QUESTIONS, **_FACADE_QUESTIONS}
_UNKNOWN = "is not found"
"""Triton's message for a model that is not in its repository."""
_DEAD = r"Stub process '{}_\d+_\d+' is not healthy"
"""Triton's message when a process of a model does not take requests."""


class Health(enum.Enum):
    """Result of a probe of the scheduler."""

    SERVING = "steps run"
    REFUSING = "the scheduler lives, but no step runs"
    SILENT = "no answer"
    DEAD = "the scheduler's process is gone or stopped"


@dataclass(frozen=True)
class ProbeResult:
    """Result of a probe of the scheduler. `detail` is the error's text, if there is one."""

    health: Health
    detail: str = ""


class Probe:
    """Probes the scheduler over HTTP. Must be closed at the end.

    Args:
        http_url: `host:port`. model: the scheduler's name.
        stop: once set, calls no longer wait for an answer.
    """

    def __init__(self, http_url: str, model: str, stop: threading.Event | None = None) -> None:
        self._url = _generate_url(http_url, model)
        self._model = model
        self._stop = stop or threading.Event()
        self._client = http_client()

    def check(self, timeout_s: float, meanwhile: Callable[[], None] = lambda: None) -> ProbeResult:
        """Probe until a step has run, at most for `timeout_s` seconds; SILENT if `stop` is set.

        Args:
            meanwhile: called several times a second; an exception that it raises ends the wait.
        """
        answer = in_background(lambda: self._ask(timeout_s))
        while not self._stop.is_set():
            wait([answer], timeout=POLL_S)
            if answer.done():
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
                    self._url,
                    json={"id": PROBE_ID, "probe": True},
                    timeout=max(timeout_s - waited_s, POLL_S),
                )
            except (httpx.HTTPError, RuntimeError) as error:  # RuntimeError: the client was closed
                return ProbeResult(Health.SILENT, str(error) or type(error).__name__)
            if reply.status_code != 200:
                return self._refused(reply)
            waited_s = time.monotonic() - began
            try:
                result, is_certain = _health(json.loads(reply.json()["text_output"]), waited_s)
            except (ValueError, TypeError, KeyError):
                return ProbeResult(Health.REFUSING, "the answer cannot be understood")
            if is_certain or waited_s + POLL_S > timeout_s or self._stop.wait(POLL_S):
                return result

    def _refused(self, reply: httpx.Response) -> ProbeResult:
        message, kind = split_answer(_error_text(reply))
        # Triton's own messages have no kind.
        is_dead = kind is None and re.search(_dead_process(self._model), message)
        return ProbeResult(Health.DEAD if is_dead else Health.REFUSING, message)


def _health(answer: Mapping[str, Any], waited_s: float) -> tuple[ProbeResult, bool]:
    """Interpret an answer that came `waited_s` seconds after the first probe.

    Returns:
        The result, and whether it is final: another probe soon would find the same.
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


@dataclass(frozen=True)
class Finding:
    """Result of a probe of the scheduler, and what Triton says of the server and the engine.

    Triton is asked about the server if no answer came, and about the engine if no step runs. An
    engine of unknown state counts as loaded.
    """

    health: Health
    is_server_live: bool = True
    is_engine_loaded: bool = True
    is_load_orphaned: bool = False


def examine(probe: Probe, control: ModelControl, engine: str, timeout_s: float) -> Finding:
    """Probe the scheduler; if no step runs, ask Triton about the engine.

    Args:
        engine: name of the engine's model. timeout_s: for the probe.
    """
    health = probe.check(timeout_s).health
    if health is Health.REFUSING:
        return Finding(health, is_load_orphaned=control.is_load_orphaned(engine))
    if health is not Health.SILENT:
        return Finding(health)
    is_loaded = control.is_loaded(engine)
    return Finding(health, is_loaded is not None, is_loaded is not False)


class Reply(enum.Enum):
    """Kind of answer to a probe of an endpoint."""

    ANSWER = "an answer"
    ERROR = "an error"
    NOTHING = "no answer"
    UNKNOWN = "there is no such model"


@dataclass(frozen=True)
class EndpointResult:
    """Result of a probe of another model. `detail` is the error's text, if there is one."""

    reply: Reply
    detail: str = ""

    def is_dead(self, model: str) -> bool:
        """Return whether Triton reports that a process of this model has ended or is stopped."""
        return re.match(_dead_process(model), self.detail) is not None


def probe_endpoint(http_url: str, model: str, timeout_s: float) -> EndpointResult:
    """Probe a model other than the scheduler once."""
    question = _QUESTION_OF.get(model, _CANCEL)
    try:
        with http_client(timeout_s=timeout_s) as client:
            answer = client.post(_generate_url(http_url, model), json=question)
    except httpx.HTTPError as error:
        return EndpointResult(Reply.NOTHING, str(error) or type(error).__name__)
    if answer.status_code == 200:
        return EndpointResult(Reply.ANSWER)
    text = _error_text(answer)
    return EndpointResult(Reply.UNKNOWN if text.endswith(_UNKNOWN) else Reply.ERROR, text)


def probed_endpoints(repository: Path) -> list[str]:
    """The models of a prepared repository that can be probed and have processes of their own."""
    models = []
    for path in sorted(repository.glob("*/config.pbtxt")):
        config = read_config(path)
        name = path.parent.name
        takes_cancel = any(one.name == "cancel" for one in config.input)
        passes_on = "scheduler_model" in config.parameters and takes_cancel
        is_facade = "convention" in config.parameters and name in _FACADE_QUESTIONS
        if passes_on or is_facade or name in _QUESTIONS:
            models.append(name)
    return models


def _generate_url(http_url: str, model: str) -> str:
    return f"http://{http_url}/v2/models/{model}/generate"


def _error_text(reply: httpx.Response) -> str:
    try:
        return str(reply.json()["error"])
    except (ValueError, TypeError, KeyError):
        return reply.text.strip()


def _dead_process(model: str) -> str:
    return _DEAD.format(re.escape(model))
