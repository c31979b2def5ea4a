"""Attacks of requests that are whole: too heavy, too many, too large, or nonsense.

Owns those requests and what may be answered. Must not know how bytes are sent.
"""

import re
from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any

import grpc
import numpy as np

from support.e2e import array_of, at_once, generate
from support.hostile.target import CALL_TIMEOUT_S, Target, infer_request

VOCAB_SIZE = 384
PROMPT_BYTES = 2**24
PROMPT_IDS = 2**22
NEVER_SAID = re.compile(r"Traceback|\.py\b|File \"|/(?:tmp|root|home|usr|opt|proc|dev|var)/")
MAX_MESSAGE = 2000  # characters
HEAVY: dict[str, Any] = {
    "max_tokens": 64,
    "min_tokens": 64,
    "temperature": 1.5,
    "top_k": 50,
    "top_p": 0.99,
    "min_p": 0.001,
    "presence_penalty": 1.0,
    "frequency_penalty": 1.0,
    "repetition_penalty": 1.1,
    "logprobs": 20,
    "prompt_logprobs": 20,
    "stop": ["\U0001f41a" * 127 + chr(0x4E00 + i) for i in range(64)],
    "stop_token_ids": list(range(VOCAB_SIZE)) + [5] * (1024 - VOCAB_SIZE),
    "bad_words": ["zebra " * 5 + chr(0x4E00 + i) for i in range(256)],
    "allowed_token_ids": list(range(VOCAB_SIZE)) + [5] * (4096 - VOCAB_SIZE),
    "logit_bias": {str(token_id): -0.5 for token_id in range(VOCAB_SIZE)},
}
FLAGS = ("logprobs", "cumulative_logprob", "token_ids", "timing", "finish_reason")


def heaviest_parameters(target: Target, strength: int) -> None:
    """All that a request may ask for at once, a few dozen times."""
    inputs = {f"return_{flag}": True for flag in FLAGS}
    inputs |= {"input_ids": [7] * 1500, "sampling_parameters": HEAVY}
    codes = call_all(target, [infer_request("generate", inputs)] * (12 * strength))
    assert codes.keys() == {grpc.StatusCode.OK}, codes


def thousand_unary(target: Target, strength: int) -> None:
    """A thousand unary requests at once: all are answered, by text or by UNAVAILABLE."""
    inputs = {"text_input": "a", "sampling_parameters": {"max_tokens": 2}}
    codes = call_all(target, [infer_request("generate", inputs)] * (1000 * strength))
    assert codes.keys() <= {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}, codes
    assert codes[grpc.StatusCode.OK], codes


def floods_of_cancels(target: Target, strength: int) -> None:
    """Cancellations of nobody, and of requests just sent."""
    running = {"text_input": "a", "sampling_parameters": {"max_tokens": 1000, "ignore_eos": True}}
    requests = []
    for index in range(500 * strength):
        request_id = f"victim-{index}"
        if index % 10 == 0:
            requests.append(infer_request("generate", running, request_id=request_id))
        requests.append(infer_request("generate", {"cancel": True}, request_id=request_id))
    codes = call_all(target, requests)
    assert codes.keys() <= {
        grpc.StatusCode.OK,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.UNAVAILABLE,
    }, codes


def large_prompts(target: Target, strength: int) -> None:
    """Prompts at the limit of bytes and of ids, by the dozen: each is refused."""
    text = np.array([b"xq" * (PROMPT_BYTES // 2)], dtype=object)
    ids = np.full(PROMPT_IDS, 5, np.int32)
    for inputs in ({"text_input": text}, {"input_ids": ids}):
        requests = [infer_request("generate", inputs)] * (12 * strength)
        codes = call_all(target, requests, num_channels=4)
        assert grpc.StatusCode.OK not in codes, codes
        streams = [infer_request(model, inputs) for model in ("scheduler", "llm") * strength]
        for text_of_error in at_once([partial(stream_error, target, r) for r in streams], 4):
            assert text_of_error, "a prompt beyond any limit was taken"


def nonsense_for_inner_models(target: Target, strength: int) -> None:
    """Send the models of the pipeline directly what they are not meant to get."""
    blob = np.array([b"\xff\xfe" * 500_000], dtype=object)
    inputs = {
        "engine": [
            {"question": array_of(True)},
            {"question": np.zeros(6_000_000, np.bool_)},
            {"plan": blob},
            {"request": blob, "question": [1, 2]},
        ],
        "postprocessor": [
            {},
            {"request_key": "nobody"},
            {"request_key": b"\xff\xfe"},
            {"request_key": np.array([b"a", b"b"], dtype=object)},
            {"request_key": "k" * 10**6, "chunk_text_output": blob},
            {"chunk_text_output": [1], "request_key": "a"},
            {"chunk_output_ids": np.zeros(10**6, np.int32)},
        ],
        "tokenizer": [
            {},
            {"text_input": b"\xff\xfe"},
            {"text_input": "x" * 10**6},
            {"input_ids": np.zeros(10**6, np.int32)},
            {"input_ids": np.zeros((2, 3), np.int32), "cancel": True},
            {"text_input": [1, 2]},
            {"cancel": True, "text_input": ""},
        ],
        "scheduler": [{"request_key": "k" * 10**6, "text_input": "a"}],
    }
    requests = [infer_request(model, values) for model, each in inputs.items() for values in each]
    call_all(target, requests * (4 * strength))


def odd_requests(target: Target, strength: int) -> None:
    """Unknown parameters over and over, odd names and metadata, shapes without tensors."""
    odd = [
        infer_request("generate", {"text_input": "a"}, parameters={"x" * 10**5: "y" * 10**5}),
        infer_request(
            "generate", {"text_input": "a"}, parameters={f"p{i}": "1" for i in range(999)}
        ),
        infer_request("generate", {"text_input": "a", "max_tokens": "1"}),
        infer_request("../scheduler", {"text_input": "a"}),
        infer_request("\0" + "x" * 10**5, {}),
        infer_request("generate", {}),
        infer_request("generate", {"text_input": "a"}, parameters={"sequence_id": "-1"}),
        infer_request("generate", {"text_input": "a"}, parameters={"timeout": "soon"}),
        infer_request("generate", {"x" * 10**6: "a"}),
        infer_request("generate", {"cancel": True}, request_id="i" * 10**6),
    ]
    for shape in ([2**40], [-1], [0], [2**62, 2**62], [1] * 10_000):
        request = infer_request("generate", {"input_ids": [1]})
        del request.inputs[0].shape[:]
        request.inputs[0].shape.extend(shape)
        odd.append(request)
    request = infer_request("generate", {"text_input": "a"})
    request.raw_input_contents[0] = b"\xff\xff\xff\xff"  # a string longer than its tensor
    odd.append(request)
    request = infer_request("generate", {"text_input": "a"})
    request.parameters["shared_memory_region"].string_param = "x" * 1000
    request.inputs[0].parameters["shared_memory_region"].string_param = "x" * 1000
    odd.append(request)
    metadata = [("x-header", "y" * 1000)] * 4 + [("triton-grpc-protocol-key", "y")]
    call_all(target, odd * (10 * strength), metadata=metadata)
    repeated = b'{"text_input": "a", ' + b'"beam": 1, ' * 5000 + b'"max_tokens": 1}'
    for body in (repeated, b'{"text_input": "\xff"}', b'{"text_input": "a", "id": "\\ud800"}'):
        for _ in range(5 * strength):
            check_message(generate(target, body).text)


def call_all(
    target: Target,
    requests: Iterable[Any],
    *,
    num_channels: int = 8,
    metadata: Iterable[tuple[str, str]] = (),
) -> Counter[grpc.StatusCode]:
    """Send unary requests all at once, and wait for every answer.

    Returns:
        How many ended with which code; errors say what they may say.
    """
    shares: list[list[Any]] = [[] for _ in range(num_channels)]
    for index, request in enumerate(requests):
        shares[index % num_channels].append(request)

    def run(share: list[Any]) -> list[grpc.StatusCode]:
        codes = []
        with target.stub() as stub:
            options = {"timeout": CALL_TIMEOUT_S, "metadata": tuple(metadata)}
            for call in [stub.ModelInfer.future(request, **options) for request in share]:
                codes.append(call.code())
                if call.code() is not grpc.StatusCode.OK:
                    assert call.code() is not grpc.StatusCode.DEADLINE_EXCEEDED, "no answer"
                    check_message(call.details())
        return codes

    codes = at_once([partial(run, share) for share in shares], num_channels)
    return Counter(code for each in codes for code in each)


def stream_error(target: Target, request: Any) -> str:
    """The error that a request over a gRPC stream ends with; empty where there is none."""
    with target.stub() as stub:
        for response in stub.ModelStreamInfer(iter([request]), timeout=CALL_TIMEOUT_S):
            if response.error_message:
                check_message(response.error_message)
                return str(response.error_message)
    return ""


def check_message(text: str) -> None:
    """Assert that an error says nothing of the server's inside."""
    assert not NEVER_SAID.search(text), text[:500]
