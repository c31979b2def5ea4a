"""/v1/batch: completes several prompts at once.

Owns the form of its answers, and that an entry fails alone. Must not know connections.
"""

import asyncio
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from charonia.errors import CharoniaError
from charonia.gateway import errors
from charonia.gateway.errors import ApiError
from charonia.gateway.fields import read, read_values
from charonia.gateway.observing import Record
from charonia.gateway.rest.answers import (
    BatchAnswer,
    BatchLine,
    Failure,
    GenerateAnswer,
    Totals,
)
from charonia.gateway.rest.generate import answer_of
from charonia.gateway.rest.requests import BatchRequest, PromptRequest
from charonia.gateway.serving import Serving
from charonia.gateway.upstream import all_of
from charonia.gateway.watching import Reply
from charonia_client import CharoniaClientError


async def batch(serving: Serving, record: Record, body: bytes, reply: Reply) -> None:
    """Answer a request. Raises what `Work` turns into an answer."""
    request, entries = await serving.prompts.run(len(body), lambda: _read(serving, body))
    record.named_tenant = _tenant_of(entries)
    ids = [f"{record.request_id}-{index}" for index in range(len(entries))]

    async def respond(index: int) -> GenerateAnswer | Failure:
        response = await _respond(serving, record, entries[index], ids[index], len(body))
        if isinstance(response, Failure):
            record.note_entry(response.error["status"], response.error["message"])
        else:
            record.note_entry(HTTPStatus.OK, None)
        return response

    places = range(len(ids))
    if not request.stream:
        responses = await all_of([respond(index) for index in places])
        totals = _totals(ids, responses, record.seconds)
        await reply.whole(BatchAnswer(**totals, responses=responses))
        return
    lock = asyncio.Lock()
    found: list[GenerateAnswer | Failure] = []

    async def tell(index: int) -> None:
        response = await respond(index)
        found.append(response)
        async with lock:
            await reply.line(BatchLine(index, response))

    await all_of([tell(index) for index in places])
    await reply.line(Totals(**_totals(ids, found, record.seconds)))
    await reply.done()


def _read(serving: Serving, body: bytes) -> tuple[BatchRequest, list[PromptRequest | ApiError]]:
    """Read a batch, and each entry or why it is wrong. It may take long: not for the event loop."""
    request = read(BatchRequest, body)
    serving.check_size("requests", len(request.requests))
    return request, [_read_entry(one, index) for index, one in enumerate(request.requests)]


def _read_entry(entry: Any, index: int) -> PromptRequest | ApiError:
    try:
        return read_values(PromptRequest, entry, f"requests[{index}]")
    except ApiError as error:
        return error


def _tenant_of(entries: Sequence[PromptRequest | ApiError]) -> str | None:
    """The tenant that all entries name; None if they differ."""
    named = {one.tenant for one in entries if isinstance(one, PromptRequest)}
    return named.pop() if len(named) == 1 else None


async def _respond(
    serving: Serving,
    record: Record,
    entry: PromptRequest | ApiError,
    request_id: str,
    body_bytes: int,
) -> GenerateAnswer | Failure:
    try:
        if isinstance(entry, ApiError):
            raise entry
        return await serving.answered(
            record, lambda one: answer_of(one, record, entry, request_id, body_bytes)
        )
    except (ApiError, CharoniaClientError, CharoniaError) as error:
        found = errors.of_any(error)
        return Failure(request_id, {**found.body["error"], "status": int(found.status)})


def _totals(
    ids: list[str], responses: Sequence[GenerateAnswer | Failure], seconds: float
) -> dict[str, Any]:
    answers = [one for one in responses if isinstance(one, GenerateAnswer)]
    return {
        "request_ids": ids,
        "total_latency_ms": 1000 * seconds,
        "batch_throughput_tokens_per_sec": sum(one.generated_tokens for one in answers) / seconds,
    }
