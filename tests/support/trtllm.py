"""Requests of TensorRT-LLM's convention for tests, from plain values, and what becomes of them.

Owns the tokenizer and the two plainest requests. Must not know what a test asks of them.
"""

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from charonia.config import DEMO_CHECKPOINT
from charonia.errors import CharoniaError
from charonia.serving.conventions.convention import Part
from charonia.serving.conventions.parameters import parse_sampling_params
from charonia.serving.conventions.trtllm.facade import Facade, TextFacade, TokenFacade
from charonia.serving.conventions.trtllm.tables import MODELS
from charonia.serving.requests.raw_request import NUMPY_TYPES, Outputs, RawRequest
from charonia.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_dir(DEMO_CHECKPOINT)
PART_OF_CHARACTER = TOKENIZER.encode("\U0001f9ff", add_special_tokens=False)[0]
TOKENS: dict[str, Any] = {"input_ids": [5, 6, 7], "input_lengths": 3, "request_output_len": 4}
TEXT: dict[str, Any] = {"text_input": "a prompt", "max_tokens": 4}


def raw_request(model: str, rows: list[dict[str, Any]], **fields: Any) -> RawRequest:
    """A request for a batch; each row has the same inputs, as plain values."""
    types = {one.name: one for one in MODELS[model].inputs}
    tensors = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        one = types[name]
        if one.datatype == "STRING":
            values = [
                [text.encode() if isinstance(text, str) else text for text in value]
                if isinstance(value, list)
                else [value.encode() if isinstance(value, str) else value]
                for value in values
            ]
        elif len(one.dims) == 1 and not isinstance(values[0], list):
            values = [[value] for value in values]
        tensors[name] = np.array(values, dtype=NUMPY_TYPES[one.datatype])
    names = frozenset(one.name for one in MODELS[model].outputs)
    return RawRequest(tensors, {}, **({"output_names": names} | fields))


def facade(model: str = "tensorrt_llm", *, is_decoupled: bool = True) -> Facade:
    """Make the facade that splits the requests of a model."""
    kind = TokenFacade if model == "tensorrt_llm" else TextFacade
    return kind(model, TOKENIZER, is_decoupled=is_decoupled)


@dataclass(frozen=True)
class Split:
    """A request of the scheduler, and what its answers mean."""

    request: RawRequest
    part: Part

    def answer(self, outputs: Outputs) -> Outputs | None:
        """The scheduler's outputs as the client gets them."""
        return self.part.answer(outputs)

    def failure(self, error: CharoniaError) -> CharoniaError | None:
        """The scheduler's error as the client gets it."""
        return self.part.failure(error)


def split(
    model: str, *rows: dict[str, Any], is_decoupled: bool = True, **fields: Any
) -> list[Split]:
    """The scheduler's requests of a batch."""
    raw = raw_request(model, [*rows], **fields)
    return [Split(*pair) for pair in facade(model, is_decoupled=is_decoupled).split(raw)]


def sampling_of(part: Split) -> dict[str, Any]:
    """Return its sampling parameters, which the scheduler takes."""
    values: dict[str, Any] = json.loads(part.request.tensors["sampling_parameters"].item())
    parse_sampling_params(values)
    return values


def sampling(model: str, **inputs: Any) -> dict[str, Any]:
    """Return the sampling parameters of the plainest request of a model, with more inputs."""
    (part,) = split(model, (TOKENS if model == "tensorrt_llm" else TEXT) | inputs)
    return sampling_of(part)
