"""Prompts from conversations, and the sending of answers.

Owns the order of a stream's events. Must not know paths.
"""

import contextlib
from collections.abc import Sequence
from typing import Any, Protocol

from charonia.gateway.generation import Generation, Run, Usage
from charonia.gateway.observing import Record
from charonia.gateway.openai.answers import UsageAnswer
from charonia.gateway.openai.requests import Conversation, TextRequest
from charonia.gateway.prompts import Prompt
from charonia.gateway.serving import Serving
from charonia.gateway.watching import Reply
from charonia_client import Chunk, Completion


class Form(Protocol):
    """Format of the answers of one call."""

    def whole(self, completions: Sequence[Completion], usage: Usage) -> Any:
        """Write the whole answer."""
        ...

    def pieces(self, prompt_index: int, chunk: Chunk) -> list[Any]:
        """Write a chunk as events without usage."""
        ...

    def last(self) -> Any:
        """Write the event without choices that carries the usage."""
        ...


async def render(serving: Serving, conversation: Conversation, body_bytes: int) -> Prompt:
    """Render and tokenize a conversation.

    Args:
        body_bytes: of the request.

    Raises:
        InvalidRequestError: the template refuses the messages. ApiError: there is no template.
    """
    messages, options = await serving.prompts.run(body_bytes, conversation.rendering)
    return await serving.prompts.of_messages(
        messages,
        options,
        await serving.upstream.max_model_len(),
        add_special_tokens=bool(conversation.add_special_tokens),
        body_bytes=body_bytes,
    )


async def answer(
    serving: Serving,
    request: TextRequest,
    generation: Generation,
    form: Form,
    record: Record,
    reply: Reply,
) -> None:
    """Generate, and send the answer whole or as a stream."""
    run = Run(generation, serving.upstream, record)
    if not request.stream:
        completions = await run.complete()
        await reply.whole(form.whole(completions, run.usage))
        return
    async with contextlib.aclosing(run.stream()) as chunks:
        async for prompt_index, chunk in chunks:
            for piece in form.pieces(prompt_index, chunk):
                if request.includes_usage:
                    piece.usage = None
                if request.has_continuous_usage:
                    piece.usage = UsageAnswer.of(run.usage)
                await reply.event(piece)
    if request.includes_usage:
        piece = form.last()
        piece.usage = UsageAnswer.of(run.usage)
        await reply.event(piece)
    await reply.done()
