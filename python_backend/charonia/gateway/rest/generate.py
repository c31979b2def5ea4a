"""/v1/generate: completes one prompt.

Owns the form of its answers. Must not know connections.
"""

import contextlib

from msgspec import UNSET

from charonia.gateway.fields import read
from charonia.gateway.generation import Generation, Run
from charonia.gateway.observing import Record
from charonia.gateway.prompts import Prompt
from charonia.gateway.rest.answers import (
    GenerateAnswer,
    Piece,
    positions_of,
    prompt_positions_of,
)
from charonia.gateway.rest.requests import GenerateRequest, PromptRequest
from charonia.gateway.serving import Serving
from charonia.gateway.watching import Reply


async def generate(serving: Serving, record: Record, body: bytes, reply: Reply) -> None:
    """Answer a request. Raises what `Work` turns into an answer."""
    request = await serving.prompts.run(len(body), lambda: read(GenerateRequest, body))
    record.named_tenant = request.tenant
    if not request.stream:
        await reply.whole(await answer_of(serving, record, request, record.request_id, len(body)))
        return
    model = serving.check_model(request.model)
    generation = await _generation(serving, record, request, record.request_id, len(body))
    run = Run(generation, serving.upstream, record)
    async with contextlib.aclosing(run.stream()) as chunks:
        async for _, chunk in chunks:
            piece = Piece(
                request_id=record.request_id,
                sample=chunk.index if generation.num_choices > 1 else UNSET,
                text=chunk.text,
                token_ids=list(chunk.token_ids),
                finish_reason=chunk.finish_reason,
                logprobs=positions_of(chunk.logprobs),
                prompt_logprobs=prompt_positions_of(chunk.prompt_logprobs),
            )
            if chunk.is_final:
                piece.model = model
                piece.prompt_tokens = run.usage.prompt_tokens
                piece.generated_tokens = num_tokens = run.usage.completion_tokens
                piece.latency_ms = 1000 * record.seconds
                piece.throughput_tokens_per_sec = num_tokens / record.seconds
            await reply.event(piece)
    await reply.done()


async def answer_of(
    serving: Serving, record: Record, request: PromptRequest, request_id: str, body_bytes: int
) -> GenerateAnswer:
    """Return the whole answer to one prompt.

    Args:
        body_bytes: of the HTTP request, which may have further prompts.

    Raises:
        CharoniaClientError, CharoniaError, ApiError: the request is wrong, or it failed.
    """
    model = serving.check_model(request.model)
    generation = await _generation(serving, record, request, request_id, body_bytes)
    run = Run(generation, serving.upstream, record)
    (completion,) = await run.complete()
    return GenerateAnswer.of(
        completion,
        request_id=request_id,
        model=model,
        num_prompt=run.usage.prompt_tokens,
        seconds=record.seconds,
    )


async def _generation(
    serving: Serving, record: Record, request: PromptRequest, request_id: str, body_bytes: int
) -> Generation:
    request.check()
    prompt = await _prompt(serving, request, body_bytes)
    return serving.generation(request_id, [prompt], request.sampling(), record.key_tenant)


async def _prompt(serving: Serving, request: PromptRequest, body_bytes: int) -> Prompt:
    limit = await serving.upstream.max_model_len()
    if request.prompt is not None:
        return await serving.prompts.of_text(
            request.prompt, limit, add_special_tokens=True, body_bytes=body_bytes
        )
    return serving.prompts.of_ids(request.prompt_tokens, limit)
