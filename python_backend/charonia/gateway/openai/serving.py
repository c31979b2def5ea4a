"""What every kind of request needs of the gateway, and how answers are sent.

Owns the names of the model, and the order of a stream's events. Must not know paths.
"""

import contextlib
import time
from collections.abc import Sequence
from typing import Any, Protocol

from charonia.gateway.errors import invalid, no_such_model
from charonia.gateway.generation import Generation, Run, Usage
from charonia.gateway.observing import Record
from charonia.gateway.openai.answers import UsageAnswer
from charonia.gateway.openai.logprobs import Spelling
from charonia.gateway.openai.requests import Conversation, TextRequest
from charonia.gateway.prompts import Prompt, Prompts
from charonia.gateway.settings import GatewaySettings
from charonia.gateway.upstream import Upstream
from charonia.gateway.watching import Reply
from charonia_client import Chunk, Completion, Sampling, Timeouts


class Form(Protocol):
    """How the answers of one call are written."""

    def whole(self, completions: Sequence[Completion], usage: Usage) -> Any:
        """Write the whole answer."""
        ...

    def pieces(self, prompt_index: int, chunk: Chunk) -> list[Any]:
        """Write a chunk as events without usage."""
        ...

    def last(self) -> Any:
        """Write the event without choices that carries the usage."""
        ...


class Serving:
    """Serves requests for text with one model.

    Attributes:
        created: of the model, as listed: when the gateway was started.
    """

    def __init__(self, settings: GatewaySettings, prompts: Prompts, upstream: Upstream) -> None:
        self.settings = settings
        self.prompts = prompts
        self.upstream = upstream
        self.spelling = Spelling(prompts.tokenizer)
        self.created = int(time.time())

    def check_model(self, name: str | None) -> str:
        """Return the model's name in the answer.

        Raises:
            ApiError: the request names another model.
        """
        names = self.settings.model_names
        if name is None:
            return names[0]
        if name not in names:
            raise no_such_model(name)
        return name

    def check_sizes(self, num_prompts: int) -> None:
        """Check the number of prompts. Raises ApiError."""
        most = self.settings.max_prompts
        if num_prompts > most:
            raise invalid(
                f"prompt must have at most {most} prompts, but has {num_prompts}", "prompt"
            )

    async def render(self, conversation: Conversation) -> Prompt:
        """Render and tokenize a conversation.

        Raises:
            InvalidRequestError: the template refuses the messages. ApiError: there is no template.
        """
        messages, options = conversation.rendering()
        return await self.prompts.of_messages(
            messages,
            options,
            await self.upstream.max_model_len(),
            add_special_tokens=bool(conversation.add_special_tokens),
        )

    def generation(
        self, record: Record, prompts: Sequence[Prompt], sampling: Sampling, *, hides: bool = False
    ) -> Generation:
        """Make a generation with the gateway's time limit."""
        timeouts = Timeouts(total_s=self.settings.request_timeout_s)
        return Generation(record.request_id, prompts, sampling, timeouts, hides_output=hides)

    async def answer(
        self,
        request: TextRequest,
        generation: Generation,
        form: Form,
        record: Record,
        reply: Reply,
    ) -> None:
        """Generate, and send the answer whole or as a stream."""
        run = Run(generation, self.upstream, record)
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
