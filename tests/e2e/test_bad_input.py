"""Malformed requests by every way in: each gets a clear error, and nobody beside them notices.

The cases are in `support.malformed`. Each runs once by itself, and all of them once more beside a
stream, whose tokens must be those of an undisturbed run.
"""

import contextlib
import re
from functools import partial
from typing import Any

import pytest
import tritonclient.grpc as grpc

from charonia.launch.server.tritonserver import TritonServer
from support.bystander import Bystander
from support.e2e import GrpcStream, at_once, error_of, infer_grpc, request_inputs, wait_idle
from support.long import long
from support.malformed import CASES, PROMPT, Case

NEVER_SAID = re.compile(r"Traceback|\.py\b|File \"|/(?:tmp|root|home|usr|opt|proc|dev|var|work)/")
NUM_BESIDE = 20
"""Cases beside one stream, which must not come to its end meanwhile."""


def test_there_are_at_least_60_cases() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 60


def check(case: Case, server: TritonServer) -> None:
    """Send a malformed request and look at its error."""
    text = case.send(server)
    for expected in case.says:
        assert re.search(expected, text), f"{case.name}: {text!r} does not say {expected!r}"
    assert not NEVER_SAID.search(text), text
    assert server.api_key not in text
    assert len(text) < 1000, f"{case.name}: {len(text)} characters"


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_malformed_request_gets_a_clear_error(server: TritonServer, case: Case) -> None:
    check(case, server)


@long  # hundreds of malformed requests at once
def test_a_stream_beside_all_of_them_is_not_disturbed(
    server: TritonServer, server_log: list[str]
) -> None:
    wait_idle(server)
    num_logged = len(server_log)
    for start in range(0, len(CASES), NUM_BESIDE):
        with Bystander(server, seed=9) as bystander:
            cases = CASES[start : start + NUM_BESIDE]
            at_once([partial(check, case, server) for case in cases], num_threads=4)
            bystander.wait_tokens(20)
        assert bystander.token_ids == bystander.undisturbed()
    wait_idle(server)
    logged = "\n".join(server_log[num_logged:])
    assert "Traceback" not in logged
    assert "internal error" not in logged


def test_an_error_does_not_end_the_stream_that_it_came_on(server: TritonServer) -> None:
    with GrpcStream(server) as stream:
        stream.send(request_inputs(PROMPT, {"max_tokens": -1}))
        assert "max_tokens" in error_of(stream.next).message()
        stream.send(request_inputs(PROMPT, {"max_tokens": 3}))
        assert stream.next().text.startswith(PROMPT)


@pytest.mark.parametrize(
    ("sampling", "code"),
    [({"top_p": 2}, "StatusCode.INVALID_ARGUMENT"), ({"num_beams": 2}, "StatusCode.UNIMPLEMENTED")],
)
def test_a_unary_error_has_a_code_that_tells_whose_fault_it_is(
    server: TritonServer, sampling: dict[str, Any], code: str
) -> None:
    error = error_of(lambda: infer_grpc(server, request_inputs(PROMPT, sampling)))
    assert error.status() == code


def test_the_index_of_models_is_there_for_everybody(server: TritonServer) -> None:
    with contextlib.closing(grpc.InferenceServerClient(server.grpc_url)) as client:
        index = client.get_model_repository_index()
    assert {model.name for model in index.models} >= {"llm", "scheduler", "engine", "generate"}
