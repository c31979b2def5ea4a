"""Asks the models beside the scheduler for an answer that costs nothing.

Owns one question for each, by the name that it has in the project's repository, and how long it has
gone unanswered. Must not know what is done about that.

`llm`, `generate` and all that have another name of the scheduler's are asked to cancel a request
that does not exist: that goes through every process on their way, the scheduler's too, but takes no
place in its queue. Facades are asked what their own process refuses, which is an answer as well.
"""

import enum
import re
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from charonia.model_config import read_config
from charonia.supervision.server.background import in_background

_CANCEL = {"id": "charonia-probe", "cancel": True}
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
"""How Triton says that no such model is in its repository."""
_DEAD = r"^Stub process '{}_\d+_\d+' is not healthy"
"""How it says that a process of a model does not take its requests."""


class Reply(enum.Enum):
    """What came of a question."""

    ANSWER = "an answer"
    ERROR = "an error"
    NOTHING = "no answer"
    UNKNOWN = "there is no such model"


@dataclass(frozen=True)
class Asked:
    """`detail` is the error's text, where there is one."""

    reply: Reply
    detail: str = ""


def models_with_questions(repository: Path) -> list[str]:
    """The models in a prepared repository that can be asked and have processes of their own."""
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


def ask(http_url: str, model: str, timeout_s: float) -> Asked:
    """Ask a model once."""
    url = f"http://{http_url}/v2/models/{model}/generate"
    try:
        answer = httpx.post(url, json=_QUESTION_OF.get(model, _CANCEL), timeout=timeout_s)
    except httpx.HTTPError as error:
        return Asked(Reply.NOTHING, str(error) or type(error).__name__)
    if answer.status_code == 200:
        return Asked(Reply.ANSWER)
    try:
        text = str(answer.json()["error"])
    except (ValueError, TypeError, KeyError):
        text = answer.text.strip()
    return Asked(Reply.UNKNOWN if text.endswith(_UNKNOWN) else Reply.ERROR, text)


class Inquiry:
    """One model, asked again and again in the background.

    Args:
        interval_s: between two questions. timeout_s: for an answer to one.
        hang_s: without any answer, an error neither.
    """

    def __init__(
        self, http_url: str, model: str, *, interval_s: float, timeout_s: float, hang_s: float
    ) -> None:
        self.model = model
        self._http_url = http_url
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._hang_s = hang_s
        self._asked: Future[Asked] | None = None
        self._asked_at = self._answered_at = time.monotonic()

    def excuse(self, now: float) -> None:
        """Take what came so far for answered: somebody else keeps it from answering."""
        self._answered_at = now

    def forget(self, now: float) -> None:
        """Begin anew: what was asked so far, other processes were asked."""
        self._asked = None
        self._asked_at = self._answered_at = now

    def look(self, now: float) -> str | None:
        """Whether the model is lost, as `Loss.kind`. Asks again when it is time."""
        if self._asked is None:
            if now - self._asked_at >= self._interval_s:
                self._asked_at = now
                self._asked = in_background(
                    lambda: ask(self._http_url, self.model, self._timeout_s)
                )
        elif self._asked.done():
            asked, self._asked = self._asked.result(), None
            if re.search(_DEAD.format(re.escape(self.model)), asked.detail):
                return "died"
            if asked.reply is not Reply.NOTHING:
                self._answered_at = now
        return "hung" if now - self._answered_at > self._hang_s else None
