"""Translates the scheduler's answers to TensorRT-LLM's.

Owns the values of the convention's outputs, see `tables`. Must not know requests.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from charonia.serving.requests.raw_request import Array, Outputs


def _int32(values: list[Any]) -> Array:
    """Make an array with the batch dimension in front, as the next ones do."""
    return np.array([values], dtype=np.int32)


def _float32(values: list[Any]) -> Array:
    return np.array([values], dtype=np.float32)


def _texts(values: list[str]) -> Array:
    """Make an array without the batch dimension, as TensorRT-LLM's postprocessing gives texts."""
    return np.array([text.encode() for text in values], dtype=np.object_)


def _log_probs(values: list[str]) -> Array:
    positions = json.loads(values[0]) or []
    found = [next(iter(position.values()))["logprob"] for position in positions]
    return _float32([[-math.inf if value is None else value for value in found]])


@dataclass(frozen=True)
class Output:
    """An output of the convention.

    Attributes:
        source: the scheduler's output. make: converts that.
        flag: the input that asks for it, if there is one.
    """

    source: str
    make: Callable[[list[Any]], Array]
    flag: str | None = None


OUTPUTS: Mapping[str, Output] = {
    "text_output": Output("text_output", _texts),
    "output_ids": Output("output_ids", lambda ids: np.array([[ids]], dtype=np.int32)),
    "sequence_length": Output("output_ids", lambda ids: _int32([len(ids)])),
    "cum_log_probs": Output("cumulative_logprob", _float32, "return_log_probs"),
    "output_log_probs": Output("logprobs", _log_probs, "return_log_probs"),
    "num_input_tokens": Output("num_input_tokens", _int32, "return_num_input_tokens"),
    "num_output_tokens": Output("num_output_tokens", _int32, "return_num_output_tokens"),
}


@dataclass(frozen=True)
class End:
    """A token that ends an answer. `text`: its text in the answer; empty if it is not shown."""

    token_id: int
    text: str

    def taken_off(self, outputs: Outputs) -> Outputs:
        """The scheduler's outputs without this token, if they end with it."""
        ids = outputs["output_ids"]
        if outputs["finish_reason"] != ["stop"] or ids[-1:] != [self.token_id]:
            return outputs
        less = {**outputs, "output_ids": ids[:-1]}
        if "text_output" in outputs:
            less["text_output"] = [text.removesuffix(self.text) for text in outputs["text_output"]]
        if "logprobs" in outputs:
            positions = json.loads(outputs["logprobs"][0])
            less["logprobs"] = [json.dumps(positions and positions[:-1])]
        if "num_output_tokens" in outputs:
            less["num_output_tokens"] = [len(less["output_ids"])]
        return less


@dataclass(frozen=True)
class Answer:
    """Makes the answers to one request.

    Attributes:
        outputs: by name. indexes: of the request in its batch, equal in every answer.
        prompt_ids: prepended to the tokens.
        end: end token, which is removed from answers; None for the checkpoint's own.
    """

    outputs: Mapping[str, Output]
    indexes: Mapping[str, int]
    prompt_ids: Array
    end: "End | None" = None

    @property
    def sources(self) -> frozenset[str]:
        """The outputs of the scheduler that are needed."""
        needed = frozenset(one.source for one in self.outputs.values())
        return needed if self.end is None else needed | {"output_ids", "finish_reason"}

    def make(self, outputs: Outputs) -> Outputs:
        """The convention's outputs for these of the scheduler's."""
        if self.end is not None:
            outputs = self.end.taken_off(outputs)
        if self.prompt_ids.size:
            ids = np.concatenate([self.prompt_ids, np.array(outputs["output_ids"], np.int32)])
            outputs = {**outputs, "output_ids": ids}
        made = {
            name: one.make(outputs[one.source])
            for name, one in self.outputs.items()
            if one.source in outputs  # there is no log-probability without a token
        }
        return made | {name: _int32([index]) for name, index in self.indexes.items()}
