"""API keys: who has none is refused, and a key's tenant is that of its requests."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai as sdk
import pytest

from charonia.errors import ConfigError
from charonia.events import parse_event
from charonia.gateway import routes
from charonia.gateway.errors import ApiError
from charonia.gateway.keys import Keys
from charonia.launch.server.tritonserver import TritonServer
from support.gateway import Gateway, running_gateway

NUMBERS = itertools.count()
TENANTS, FREE = "sk-of-a-team", "sk-of-whoever"
FILE = f"# whoever calls\n\n{TENANTS} team a\n{FREE}\n"


@pytest.fixture(scope="module")
def keyed(
    server: TritonServer, chatting: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(FILE)
    with running_gateway([server.grpc_url], chatting, "--api-key-file", str(path)) as gateway:
        yield gateway
    assert not [line for line in gateway.lines if "sk-" in line], "keys are not logged"


def ask(gateway: Gateway, path: str, key: str, **body: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return gateway.http.post(path, json={"max_tokens": 1, **body}, headers=headers)


@pytest.mark.parametrize("header", [None, "Bearer", f"Basic {FREE}", "Bearer sk-nope", "Bearer é"])
def test_without_a_known_key_only_some_routes_answer(keyed: Gateway, header: str | None) -> None:
    headers = {} if header is None else {"authorization": header.encode()}
    for route in routes.ROUTES:
        path = route.path.format(**route.parameters)
        reply = keyed.http.request(route.method, path, content=b"{}", headers=headers)
        assert (reply.status_code == 401) == (401 in route.errors), path
        if reply.status_code == 401:
            assert reply.headers["www-authenticate"] == "Bearer"
            assert reply.json()["error"]["code"] == "invalid_api_key"
    assert keyed.http.get("/nowhere", headers=headers).status_code == 401
    for path in ("/", "/page/main.js"):
        assert keyed.http.get(path, headers=headers).status_code == 200


def test_the_sdk_calls_with_a_key(keyed: Gateway) -> None:
    client = keyed.openai.with_options(api_key=FREE)
    (model,) = client.models.list()
    assert client.completions.create(model=model.id, prompt="x", max_tokens=1).choices
    with pytest.raises(sdk.AuthenticationError, match="the API key is not known here"):
        keyed.openai.with_options(api_key="sk-nope").models.list()


def test_requests_are_of_the_tenant_of_their_key(keyed: Gateway) -> None:
    """Tenants have their own caches, so a hit tells who asked before."""

    def num_cached(key: str, path: str = "/v1/completions", **more: Any) -> int:
        body = {"prompt": list(range(5, 69)), "max_tokens": 1, **more}
        reply = ask(keyed, path, key, **body)
        assert reply.status_code == 200, reply.text
        details = reply.json()["usage"]["prompt_tokens_details"]
        return int(details["cached_tokens"])

    assert num_cached(TENANTS) == 0
    assert num_cached(TENANTS) > 0
    assert num_cached(FREE) == 0
    named = {"prompt_tokens": list(range(100, 164)), "tenant": "team a"}
    assert ask(keyed, "/v1/generate", FREE, **named).status_code == 200
    assert num_cached(TENANTS, prompt=named["prompt_tokens"]) > 0
    assert keyed.wait_line(" request ", 'tenant="team a"', "status=200")


@pytest.mark.parametrize(
    ("path", "key", "body", "tenant"),
    [
        ("/v1/generate", FREE, {"prompt": "x", "tenant": "named"}, "named"),
        ("/v1/generate", FREE, {"prompt": "x", "tenant": "named", "model": "none"}, "named"),
        ("/v1/generate", FREE, {"prompt": "x", "tenant": "named", "stream": True}, "named"),
        ("/v1/generate", FREE, {"prompt": "x", "tenant": 300 * "n"}, 256 * "n"),
        ("/v1/generate", FREE, {"prompt": "x"}, None),
        ("/v1/generate", TENANTS, {"prompt": "x", "tenant": "named"}, "team a"),
        ("/v1/batch", FREE, {"requests": [{"prompt": "x", "tenant": "named"}] * 2}, "named"),
        ("/v1/batch", FREE, {"requests": [{"prompt": "x", "tenant": one} for one in "ab"]}, None),
        ("/v1/completions", TENANTS, {"prompt": "x"}, "team a"),
    ],
)
def test_the_line_of_a_request_has_its_tenant_whether_a_key_or_the_body_names_it(
    keyed: Gateway, path: str, key: str, body: dict[str, Any], tenant: str | None
) -> None:
    name = f"line-{next(NUMBERS)}"
    headers = {"authorization": f"Bearer {key}", "x-request-id": name}
    keyed.http.post(path, json=body, headers=headers)
    found = parse_event(keyed.wait_line(f"request_id={name}").partition("charonia: ")[2])
    assert found is not None
    assert found[1].get("tenant") == tenant


def test_a_key_is_not_for_another_tenant(keyed: Gateway) -> None:
    reply = ask(keyed, "/v1/generate", TENANTS, prompt="x", tenant="team b")
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (403, "wrong_tenant", "tenant")
    assert error["message"].startswith("tenant must be 'team a', that of the API key, or not")
    entries = [{"prompt": "x", "max_tokens": 1, "tenant": one} for one in ("team b", "team a")]
    headers = {"authorization": f"Bearer {TENANTS}"}
    batch = keyed.http.post("/v1/batch", json={"requests": entries}, headers=headers).json()
    wrong, right = batch["responses"]
    assert (wrong["error"]["status"], wrong["error"]["code"]) == (403, "wrong_tenant")
    assert right["generated_tokens"] == 1


def test_lines_end_with_lf_or_cr_lf_and_comments_may_have_anything(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_bytes("# of a team\u2028sk-c\r\n\r\n\tsk-a \t team a \r\n\nsk-b".encode())
    keys = Keys.from_file(path)
    assert keys.tenant_of("Bearer sk-a") == "team a"
    assert keys.tenant_of("Bearer sk-b") is None
    with pytest.raises(ApiError, match="not known here"):
        keys.tenant_of("Bearer sk-c")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "has no API key; each line must be `KEY` or `KEY TENANT`"),
        (b"# none\n", "has no API key"),
        (b"sk-a\n\nsk-a team\n", "line 3: the same key is in a line above"),
        ("sk-é\n".encode(), "line 1: a key must be printable ASCII"),
        (b"sk-a t\x01m\n", "line 1: a tenant must have at most 256 printable characters"),
        (b"sk-a " + 257 * b"x", "line 1: a tenant must have at most 256 printable"),
        (b"sk-a # whose it is", "must not begin with #"),
        (b"team sk-a\x01", "line 1: a tenant"),
        (b"\xff", "it is not UTF-8"),
        ("sk-a team\x85sk-b\n".encode(), "line 1: a tenant must have at most 256 printable"),
        ("sk-a team\u2028sk-b\n".encode(), "line 1: a tenant must have at most 256 printable"),
        (b"sk-a team\x0csk-b\n", "line 1: a tenant must have at most 256 printable"),
        (b"sk-a\x0bsk-b\n", "line 1: a key must be printable ASCII"),
        (b"sk-a\rsk-b\n", "line 1: a key must be printable ASCII"),
        ("sk-a\u2003team\n".encode(), "line 1: a key must be printable ASCII"),
        (b"\x0c\nsk-a\n", "line 1: a key must be printable ASCII"),
    ],
)
def test_a_wrong_file_of_keys_is_refused(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "keys"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="keys") as caught:
        Keys.from_file(path)
    assert says in str(caught.value)
    assert "sk-" not in str(caught.value)
