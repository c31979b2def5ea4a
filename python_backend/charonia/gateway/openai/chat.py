"""/v1/chat/completions: the next message of a conversation.

Owns the form of its answers. Must not know connections.
"""

import time
from collections.abc import Sequence

from charonia.gateway.fields import read
from charonia.gateway.generation import Usage
from charonia.gateway.observing import Record
from charonia.gateway.openai.answering import answer, render
from charonia.gateway.openai.answers import (
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatMessage,
    ChatPiece,
    Delta,
    UsageAnswer,
)
from charonia.gateway.openai.logprobs import ChatLogprobs, Spelling, of_prompt
from charonia.gateway.openai.requests import ChatRequest
from charonia.gateway.serving import Serving
from charonia.gateway.watching import Reply
from charonia_client import Chunk, Completion, PositionLogprobs


async def chat(serving: Serving, record: Record, body: bytes, reply: Reply) -> None:
    """Answer a request. Raises what `Work` turns into an answer."""
    request = await serving.prompts.run(len(body), lambda: read(ChatRequest, body))
    request.check()
    model = serving.check_model(request.model)
    prompt = await render(serving, request, len(body))
    generation = serving.generation(
        record.request_id, [prompt], request.sampling(), record.key_tenant
    )
    form = ChatForm(Spelling(serving.prompts.tokenizer), request, record.request_id, model)
    await answer(serving, request, generation, form, record, reply)


class ChatForm:
    """Writes messages."""

    def __init__(
        self, spelling: Spelling, request: ChatRequest, request_id: str, model: str
    ) -> None:
        self._spelling = spelling
        self._request = request
        self._id = f"chatcmpl-{request_id}"
        self._model = model
        self._created = int(time.time())
        self._begun: set[int] = set()

    def whole(self, completions: Sequence[Completion], usage: Usage) -> ChatAnswer:
        """See `Form`."""
        (completion,) = completions
        choices = [
            ChatChoice(
                sample.index,
                ChatMessage(sample.text),
                self._logprobs(sample.logprobs),
                sample.finish_reason,
            )
            for sample in completion.samples
        ]
        answer = ChatAnswer(self._id, self._created, self._model, choices, UsageAnswer.of(usage))
        num_top = self._request.prompt_logprobs
        if num_top is not None and completion.prompt_logprobs is not None:
            answer.prompt_logprobs = of_prompt(completion.prompt_logprobs, num_top)
        answer.tell(completion.timing)
        return answer

    def pieces(self, prompt_index: int, chunk: Chunk) -> list[ChatChunk]:
        """See `Form`. The first piece of each message has the role, as OpenAI's does."""
        pieces = []
        if chunk.index not in self._begun:
            self._begun.add(chunk.index)
            pieces.append(self._chunk(ChatPiece(chunk.index, Delta("assistant", ""), None, None)))
        logprobs = self._logprobs(chunk.logprobs)
        piece = ChatPiece(chunk.index, Delta(content=chunk.text), logprobs, chunk.finish_reason)
        pieces.append(self._chunk(piece))
        pieces[-1].tell(chunk.timing)
        return pieces

    def last(self) -> ChatChunk:
        """See `Form`."""
        return self._chunk()

    def _chunk(self, *choices: ChatPiece) -> ChatChunk:
        return ChatChunk(self._id, self._created, self._model, list(choices))

    def _logprobs(self, positions: Sequence[PositionLogprobs] | None) -> ChatLogprobs | None:
        if not self._request.logprobs or positions is None:
            return None
        return self._spelling.chat(positions, self._request.top_logprobs or 0)
