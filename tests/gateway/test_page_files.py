"""The files of the page at `/`, as a browser gets them; tests/page shows what it does with them."""

import contextlib
import json
import re
from http.client import HTTPConnection
from urllib.parse import unquote, urlsplit

import pytest

from charonia.gateway.page import routes
from support.gateway import Gateway
from support.waiting import WAIT_S

NAMES = sorted(path.name for path in routes.DIRECTORY.iterdir() if path.suffix in routes.TYPES)
PATHS = ["/", "/page/facts.json", *(f"/page/{name}" for name in NAMES if name != "index.html")]
TYPES = {
    "": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "json": "application/json",
    "svg": "image/svg+xml",
}


@pytest.mark.parametrize("path", PATHS)
def test_each_file_has_its_type_a_validator_and_a_strict_policy(
    gateway: Gateway, path: str
) -> None:
    reply = gateway.http.get(path)
    assert reply.status_code == 200
    assert reply.headers["content-type"] == TYPES[path.rpartition(".")[2] if "." in path else ""]
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.headers["cache-control"] == "no-cache"
    policy = reply.headers["content-security-policy"].split("; ")
    assert "default-src 'self'" in policy
    assert "unsafe" not in reply.headers["content-security-policy"]

    head = gateway.http.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(reply.content))
    assert head.headers["etag"] == reply.headers["etag"]

    for known in (head.headers["etag"], f'"other", W/{head.headers["etag"]}'):
        again = gateway.http.get(path, headers={"if-none-match": known})
        assert (again.status_code, again.content) == (304, b"")
    other = gateway.http.get(path, headers={"if-none-match": '"other"'})
    assert other.content == reply.content


def test_whatever_a_file_names_is_served_and_nothing_is_of_another_place(gateway: Gateway) -> None:
    for path in PATHS:
        text = gateway.http.get(path).text
        found = re.findall(r"https?://[^\s\"'`)]+", text)
        assert [url for url in found if url != "http://www.w3.org/2000/svg"] == [], path
        named = re.findall(r'(?:href|src)="([^"#]+)"', text)
        named += [f"page/{name}" for name in re.findall(r'from "\./([^"]+)"', text)]
        for name in named:
            assert f"/{name}" in PATHS, (path, name)


@pytest.mark.parametrize(
    "path",
    [
        "/page/",
        "/page/none.js",
        "/page/routes.py",
        "/page/../app.py",
        "/page/%2e%2e/app.py",
        "/page/%2e%2e%2fapp.py",
        "/page/..",
        "/page//etc/passwd",
        "/page/%2fetc%2fpasswd",
    ],
)
def test_nothing_else_is_served(gateway: Gateway, path: str) -> None:
    """The path is sent as it is here; httpx would shorten it."""
    url = urlsplit(gateway.url)
    with contextlib.closing(HTTPConnection(url.netloc, timeout=WAIT_S)) as connection:
        connection.request("GET", path)
        reply = connection.getresponse()
        assert reply.status == 404
        error = json.loads(reply.read())["error"]
    assert error["code"] == "not_found"
    assert error["message"] == f"there is no {unquote(path)}", "it came as it was sent"


def test_the_page_knows_whether_there_is_a_chat_template(gateway: Gateway) -> None:
    assert gateway.http.get("/page/facts.json").json() == {"chats": True}
    assert gateway.http.post("/").status_code == 405
