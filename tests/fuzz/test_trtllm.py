"""Requests of TensorRT-LLM's convention, whatever is in their tensors: parts, or a clear error."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from charonia.config import DEMO_CHECKPOINT
from charonia.errors import InvalidRequestError, NotSupportedError
from charonia.serving.conventions.interface import Tensor
from charonia.serving.conventions.schema import GenerateCall
from charonia.serving.conventions.trtllm.facade import Facade, TextFacade, TokenFacade
from charonia.serving.conventions.trtllm.tables import MODELS
from charonia.serving.conventions.trtllm.text import Postprocessing, Preprocessing
from charonia.serving.requests.raw_request import NUMPY_TYPES, RawRequest
from charonia.text.tokenizer import Tokenizer
from support.calls import parse
from support.fuzzing import only_clear_errors

TOKENIZER = Tokenizer.from_dir(DEMO_CHECKPOINT)
FACADES: dict[str, Facade] = {
    "ensemble": TextFacade("ensemble", TOKENIZER, is_decoupled=True),
    "tensorrt_llm": TokenFacade("tensorrt_llm", TOKENIZER, is_decoupled=True),
}
REQUIRED = {
    "text_input": np.array([[b"a"]], dtype=np.object_),
    "max_tokens": np.array([[4]], dtype=np.int32),
    "input_ids": np.array([[5, 6]], dtype=np.int32),
    "input_lengths": np.array([[2]], dtype=np.int32),
    "request_output_len": np.array([[4]], dtype=np.int32),
}


def of(tensor: Tensor) -> st.SearchStrategy[Any]:
    """Arrays that Triton would let through, and some that it would not."""
    shapes = st.tuples(
        st.sampled_from([1, 1, 1, 2, 0]),
        *(st.integers(0, 4) if size < 0 else st.just(size) for size in tensor.dims),
    )
    if tensor.datatype == "STRING":
        contents = st.binary(max_size=4) | st.text(max_size=4).map(str.encode)
        return shapes.flatmap(
            lambda shape: st.lists(
                contents, min_size=int(np.prod(shape)), max_size=int(np.prod(shape))
            ).map(lambda values: np.array([*values, b""], dtype=np.object_)[:-1].reshape(shape))
        )
    return arrays.arrays(NUMPY_TYPES[tensor.datatype], shapes)


def requests(model: str) -> st.SearchStrategy[dict[str, Any]]:
    known = {one.name: one for one in MODELS[model].inputs}
    names = st.lists(st.sampled_from(sorted(known)), max_size=4, unique=True)
    chosen = names.flatmap(
        lambda some: st.fixed_dictionaries({name: of(known[name]) for name in some})
    )
    needed = {name: value for name, value in REQUIRED.items() if name in known}
    return st.booleans().flatmap(
        lambda is_whole: chosen.map(lambda some: (needed if is_whole else {}) | some)
    )


@pytest.mark.parametrize("model", FACADES)
@given(data=st.data())
def test_a_request_becomes_requests_of_the_scheduler(model: str, data: st.DataObject) -> None:
    tensors = data.draw(requests(model))
    names = frozenset(one.name for one in MODELS[model].outputs)
    with only_clear_errors(InvalidRequestError, NotSupportedError):
        parts = FACADES[model].split(RawRequest(tensors, {}, request_id="1", output_names=names))
        for request, part in parts:
            call = parse(request)
            if isinstance(call, GenerateCall):
                answer_to(part, call)


def answer_to(part: Any, call: GenerateCall) -> None:
    """What the scheduler may answer gets the convention's types and dimensions."""
    outputs: dict[str, list[Any]] = {
        "text_output": ["a"],
        "output_ids": [1, 2],
        "finish_reason": ["stop"],
        "cumulative_logprob": [-0.5],
        "logprobs": [json.dumps([{"1": {"logprob": None}}, {"2": {"logprob": -0.5}}])],
        "num_input_tokens": [2],
        "num_output_tokens": [2],
    }
    assert call.options.names <= outputs.keys()
    table = {
        one.name: one for one in (*MODELS["ensemble"].outputs, *MODELS["tensorrt_llm"].outputs)
    }
    for name, array in part.answer({name: outputs[name] for name in call.options.names}).items():
        assert array.dtype == NUMPY_TYPES[table[name].datatype]
        assert array.ndim == len(table[name].dims) + (name != "text_output")


@given(data=st.data())
def test_texts_become_tokens_and_tokens_texts(data: st.DataObject) -> None:
    for name, model in (
        ("preprocessing", Preprocessing(TOKENIZER, Path("nowhere"))),
        ("postprocessing", Postprocessing(TOKENIZER)),
    ):
        with only_clear_errors(InvalidRequestError, NotSupportedError):
            model.answer(RawRequest(data.draw(requests(name)), {}))
