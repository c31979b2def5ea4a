"""The routes of the page and its files.

Owns the files' content types, validators and security headers. Must not know what they show.

Files are read once, when the gateway starts. Browsers revalidate them on every visit, so a newer
gateway never meets an older script.
"""

import hashlib
from http import HTTPStatus
from pathlib import Path

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from charonia.gateway.errors import NOT_FOUND, ApiError

PAGE = "/"
FILES = "/page/{name}"
FACTS = "facts.json"
DIRECTORY = Path(__file__).parent
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".json": "application/json",
}
_POLICY = (
    "default-src 'self'",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
    "object-src 'none'",
    "require-trusted-types-for 'script'",
    "trusted-types 'none'",
)
_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "; ".join(_POLICY),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class File:
    """One file, as it is sent."""

    def __init__(self, name: str, content: bytes) -> None:
        self._content = content
        self._etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        self._type = TYPES[Path(name).suffix]

    def answer(self, request: Request) -> Response:
        """Return the file, or 304 if the client has it. The server drops the body for HEAD."""
        headers = {**_HEADERS, "etag": self._etag}
        known = {tag.strip() for tag in request.headers.get("if-none-match", "").split(",")}
        if known & {self._etag, f"W/{self._etag}", "*"}:
            return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
        return Response(self._content, headers={**headers, "content-type": self._type})


def add_page(app: FastAPI, *, chats: bool) -> None:
    """Add the page to an application.

    Args:
        chats: whether there is a chat template.
    """
    files = {
        path.name: File(path.name, path.read_bytes())
        for path in DIRECTORY.iterdir()
        if path.suffix in TYPES
    }
    index = files.pop("index.html")
    files[FACTS] = File(FACTS, msgspec.json.encode({"chats": chats}))

    async def page(request: Request) -> Response:
        """Return the page."""
        return index.answer(request)

    async def part(request: Request) -> Response:
        """Return a file of the page."""
        file = files.get(request.path_params["name"])
        if file is None:
            raise ApiError(
                HTTPStatus.NOT_FOUND,
                f"there is no {request.url.path}",
                kind=NOT_FOUND,
                code="not_found",
            )
        return file.answer(request)

    # Starlette's routes answer HEAD as well, and are not in the document of the API.
    app.add_route(PAGE, page, include_in_schema=False)
    app.add_route(FILES, part, include_in_schema=False)
