"""The index of models is open, and loading and unloading them is not, on the real tritonserver."""

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc
import pytest
import tritonclient.grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from charonia.launch.server.tritonserver import TritonServer
from charonia.supervision.server.model_control import ModelControl
from support.e2e import HTTP, wait_for
from support.stand_ins import control_over_http

MakeServer = Callable[..., TritonServer]

ALL = {"engine", "generate", "scheduler"}
REFUSED = "loading and unloading models is restricted: name the model KEY:MODEL"
OVERRIDE = {"config": '{"backend": "python"}', "file:1/model.py": "aW1wb3J0IG9zOyBvcy5hYm9ydCgp"}
BODIES = (
    b"",
    b"{",
    b"[]",
    b"5",
    b"null",
    b'"engine"',
    *(
        json.dumps({"parameters": parameters}).encode()
        for parameters in (
            {},
            [],
            5,
            None,
            OVERRIDE,
            {"config": 5},
            {"config": "{}"},
            {"config": "{" * 20_000},
            {"file:1/model.py": "###"},
            {"file:" + "x" * 70_000: "YQ=="},
            {"unload_dependents": True},
            {"unload_dependents": 5},
            {"charonia-key": "x", "file:charonia-key": "eA=="},
        )
    ),
)


def names(server: TritonServer) -> tuple[str, ...]:
    """Spellings of a model to which nobody who does not know the key has a right."""
    key = server.api_key
    return (
        *ALL,
        "",
        "no-such-model",
        "..",
        "../engine",
        "engine/1",
        "engine ",
        "engine\0",
        "ENGINE",
        "'; touch x; '",
        "x" * 300,
        "x" * 3000,
        "\u00e9\U0001f600",
        ":engine",
        "%65ngine",
        f"{'x' * len(key)}:engine",
        f"{key[:-1]}:engine",
        f"{key[:-1]}\0:engine",
        f"{key}x:engine",
        f"{key.swapcase()}:engine",
        f"x{key}:engine",
        f" {key}:engine",
        f"{key}engine",
        f"{key}/engine",
        key,
    )


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def untouched(make_server: MakeServer, log: list[str]) -> Iterator[TritonServer]:
    """A server that must be the same at the end: no model was loaded, unloaded or lost."""
    with make_server(on_log=log.append) as server:
        pids = (server.pid, {model: server.pids(model) for model in ALL})
        log.clear()
        yield server
        assert ready(server) == ALL
        assert pids == (server.pid, {model: server.pids(model) for model in ALL})
        # As Triton's core says it whenever it begins to do either.
        assert [line for line in log if "loading: " in line] == []


def index(server: TritonServer, **question: Any) -> list[dict[str, str]]:
    """The index over HTTP, as anybody gets it."""
    url = f"http://{server.http_url}/v2/repository/index"
    reply = HTTP.post(url, **question)
    assert reply.status_code == 200, reply.text
    return list(reply.json())


def ready(server: TritonServer, **question: Any) -> set[str]:
    return {entry["name"] for entry in index(server, **question) if entry["state"] == "READY"}


def ready_over_grpc(server: TritonServer) -> set[str]:
    with tritonclient.grpc.InferenceServerClient(server.grpc_url) as client:
        models = client.get_model_repository_index().models
    return {model.name for model in models if model.state == "READY"}


def test_anybody_may_read_the_index(make_server: MakeServer) -> None:
    with make_server() as server:
        assert index(server) == [
            {"name": name, "version": "1", "state": "READY"} for name in sorted(ALL)
        ]
        assert ready_over_grpc(server) == ALL
        control_over_http(server, "engine", "unload").raise_for_status()
        assert ready_over_grpc(server) == ALL - {"engine"}
        states = wait_for(
            lambda: {entry["name"]: entry["state"] for entry in index(server)},
            lambda states: states["engine"] != "UNLOADING",
        )
        assert wait_for(lambda: server.pids("engine"), lambda pids: not pids) == []
        assert states == {"engine": "UNAVAILABLE", "generate": "READY", "scheduler": "READY"}
        listed = {entry["name"] for entry in index(server, json={"ready": True})}
        assert listed == ALL - {"engine"}


def test_nobody_without_the_key_loads_or_unloads_over_http(untouched: TritonServer) -> None:
    url = f"http://{untouched.http_url}/v2/repository"
    statuses = set()

    def check(path: str, body: bytes) -> None:
        reply = HTTP.post(f"{url}/{path}", content=body)
        statuses.add(reply.status_code)
        assert (REFUSED in reply.text) == (reply.status_code == 501)
        assert untouched.api_key not in reply.text

    for operation in ("load", "unload"):
        for body in BODIES:
            check(f"models/engine/{operation}", body)
        for name in names(untouched):
            check(f"models/{quote(name, safe='')}/{operation}", b"")
            if name.isascii() and name.isprintable():
                check(f"models/{name}/{operation}", b"")
        check(f"models/engine/versions/1/{operation}", b"")
        for path in ("models/engine", "models//engine", "Models/engine", "models/engine/."):
            check(f"{path}/{operation}?key={untouched.api_key}#x", b"{}")
    # Triton itself knows no path with some names, and refuses some bodies.
    assert statuses == {404, 500, 501}


def test_nobody_without_the_key_loads_or_unloads_over_grpc(untouched: TritonServer) -> None:
    parameter = service_pb2.ModelRepositoryParameter
    overrides: tuple[dict[str, Any], ...] = (
        {},
        {name: parameter(string_param=value) for name, value in OVERRIDE.items()},
        {"config": parameter(string_param="{}"), "file:1/model.py": parameter(bytes_param=b"1/0")},
        {"config": parameter(bool_param=True)},
        {"file:": parameter(bytes_param=b"x" * 1_000_000)},
        {"charonia-key": parameter(string_param="x")},
        {"unload_dependents": parameter(bool_param=True)},
        {"unload_dependents": parameter(int64_param=1)},
    )
    with grpc.insecure_channel(untouched.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        calls = (
            (stub.RepositoryModelLoad, service_pb2.RepositoryModelLoadRequest),
            (stub.RepositoryModelUnload, service_pb2.RepositoryModelUnloadRequest),
        )
        asked = [(name, parameters) for name in names(untouched) for parameters in overrides]
        codes = set()
        for call, request in calls:
            for name, parameters in asked:
                with pytest.raises(grpc.RpcError) as caught:
                    call(request(model_name=name, parameters=parameters), timeout=60)
                codes.add(caught.value.code())
                is_ours = caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
                assert is_ours == (REFUSED in caught.value.details()), (name, parameters)
    # The latter for parameters that Triton does not take.
    assert codes == {grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INVALID_ARGUMENT}


def test_the_header_that_opens_the_rest_opens_no_load(untouched: TritonServer) -> None:
    headers = untouched.api_headers
    with tritonclient.grpc.InferenceServerClient(untouched.grpc_url) as client:
        for call in (client.load_model, client.unload_model):
            with pytest.raises(InferenceServerException, match=REFUSED):
                call("engine", headers=headers)
        client.get_log_settings(headers=headers)


def test_whoever_has_the_key_loads_and_unloads_as_with_any_triton(
    make_server: MakeServer, log: list[str]
) -> None:
    config = {
        "backend": "python",
        "max_batch_size": 0,
        "input": [{"name": "x", "data_type": "TYPE_INT32", "dims": [1]}],
        "output": [{"name": "y", "data_type": "TYPE_INT32", "dims": [1]}],
        "instance_group": [{"count": 2, "kind": "KIND_CPU"}],
    }
    with (
        make_server(on_log=log.append) as server,
        tritonclient.grpc.InferenceServerClient(server.grpc_url) as client,
    ):
        engine = server.control_name("engine")
        client.unload_model(engine, unload_dependents=True)
        assert ready(server) == ALL - {"engine"}
        client.load_model(engine, config=json.dumps(config))
        assert ready(server) == ALL
        wait_for(lambda: server.pids("engine"), lambda pids: len(pids) == 2)
        assert control_over_http(server, "engine", "unload").status_code == 200
        assert ready(server) == ALL - {"engine"}
        assert control_over_http(server, "engine", "load").status_code == 200
        assert ready(server) == ALL
        reply = control_over_http(server, "no-such-model", "load")
        assert "failed to load 'no-such-model'" in reply.text
        assert server.api_key not in reply.text + "".join(log)


CONTROLLER = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        pb_utils.unload_model(model_name="engine")
        unloaded = not pb_utils.is_model_ready(model_name="engine")
        pb_utils.load_model(model_name="engine")
        text = f"{unloaded} {pb_utils.is_model_ready(model_name='engine')}"
        tensor = pb_utils.get_input_tensor_by_name(requests[0], "text_input").as_numpy()
        tensor[0] = text.encode()
        return [pb_utils.InferenceResponse([pb_utils.Tensor("text_output", tensor)])]
"""


def test_a_model_loads_and_unloads_others_without_a_key(
    make_server: MakeServer, repository: Path
) -> None:
    model = repository / "controller"
    (model / "1").mkdir(parents=True)
    (model / "1" / "model.py").write_text(CONTROLLER, encoding="utf-8")
    config = (repository / "generate" / "config.pbtxt").read_text(encoding="utf-8")
    (model / "config.pbtxt").write_text(config, encoding="utf-8")
    with make_server() as server:
        (before,) = server.pids("engine")
        url = f"http://{server.http_url}/v2/models/controller/generate"
        reply = HTTP.post(url, json={"text_input": "x"})
        assert reply.json()["text_output"] == "True True"
        assert before not in wait_for(
            lambda: server.pids("engine"), lambda pids: len(pids) == 1 and pids != [before]
        )


def test_without_a_guard_the_index_is_closed_with_the_rest(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with (
        make_server() as server,
        tritonclient.grpc.InferenceServerClient(server.grpc_url) as client,
    ):
        assert server.guard.obstacle
        assert server.control_name("engine") == "engine"
        for path in ("index", "models/engine/load", "models/engine/unload"):
            reply = HTTP.post(f"http://{server.http_url}/v2/repository/{path}")
            assert (path, reply.status_code) == (path, 403)
        for call in (
            client.get_model_repository_index,
            lambda: client.load_model("engine"),
            lambda: client.unload_model("engine"),
        ):
            with pytest.raises(InferenceServerException, match="restricted"):
                call()
        assert server.model_states(60) == dict.fromkeys(ALL, "READY")
        assert control_over_http(server, "engine", "unload").status_code == 200
        assert server.model_states(60) != dict.fromkeys(ALL, "READY")
        assert ModelControl(server, threading.Event()).reload("engine", timeout_s=60)
        assert server.model_states(60) == dict.fromkeys(ALL, "READY")
