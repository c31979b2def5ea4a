"""/v1/completions: completes a text.

Owns the prompts of a request, and the form of its answers. Must not know connections.
"""

import time
from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, UnsetType

from charonia.gateway.fields import read
from charonia.gateway.generation import Usage
from charonia.gateway.observing import Record
from charonia.gateway.openai.answering import answer
from charonia.gateway.openai.answers import TextAnswer, TextChoice, UsageAnswer
from charonia.gateway.openai.logprobs import Offsets, Spelling, TextLogprobs, of_prompt
from charonia.gateway.openai.requests import CompletionRequest
from charonia.gateway.prompts import Prompt
from charonia.gateway.serving import Serving
from charonia.gateway.upstream import all_of
from charonia.gateway.watching import Reply
from charonia_client import Chunk, Completion, PositionLogprobs


async def complete(serving: Serving, record: Record, body: bytes, reply: Reply) -> None:
    """Answer a request. Raises what `Work` turns into an answer."""
    request = await serving.prompts.run(len(body), lambda: read(CompletionRequest, body))
    request.check()
    model = serving.check_model(request.model)
    serving.check_size("prompt", len(request.prompt))
    prompts = await _prompts(serving, request, len(body))
    echoes = await _echoes(serving, request, prompts, len(body))
    generation = serving.generation(
        record.request_id,
        prompts,
        request.sampling(),
        record.key_tenant,
        hides=request.wants_prompt_alone,
    )
    spelling = Spelling(serving.prompts.tokenizer)
    form = TextForm(spelling, request, prompts, echoes, record.request_id, model)
    await answer(serving, request, generation, form, record, reply)


async def _prompts(serving: Serving, request: CompletionRequest, body_bytes: int) -> list[Prompt]:
    limit = await serving.upstream.max_model_len()
    adds = request.add_special_tokens is not False

    async def prompt_of(one: str | list[int]) -> Prompt:
        if isinstance(one, str):
            return await serving.prompts.of_text(
                one, limit, add_special_tokens=adds, body_bytes=body_bytes
            )
        return serving.prompts.of_ids(one, limit)

    return await all_of([prompt_of(one) for one in request.prompt])


async def _echoes(
    serving: Serving, request: CompletionRequest, prompts: Sequence[Prompt], body_bytes: int
) -> list[str]:
    """The texts that come before the answers to each prompt."""
    tokenizer, skips_special = serving.prompts.tokenizer, request.skips_special_tokens

    async def echo_of(prompt: Prompt) -> str:
        if not request.echo:
            return ""
        if prompt.text is not None:
            return prompt.text
        return await serving.prompts.run(
            body_bytes, lambda: tokenizer.decode(prompt.ids, skips_special)
        )

    return await all_of([echo_of(prompt) for prompt in prompts])


class TextForm:
    """Writes completions. Choice i of prompt p has the index p·n + i.

    Args:
        echoes: the text before the answers to each prompt.
    """

    def __init__(
        self,
        spelling: Spelling,
        request: CompletionRequest,
        prompts: Sequence[Prompt],
        echoes: Sequence[str],
        request_id: str,
        model: str,
    ) -> None:
        self._spelling = spelling
        self._request = request
        self._prompts = prompts
        self._echoes = echoes
        self._has_several = len(prompts) > 1
        self._id = f"cmpl-{request_id}"
        self._model = model
        self._created = int(time.time())
        self._num_choices = request.n or 1
        self._offsets: dict[int, Offsets] = {}
        self._prompt_logprobs: dict[int, Sequence[PositionLogprobs | None] | None] = {}
        self._waiting: dict[int, list[Chunk]] = {}

    def whole(self, completions: Sequence[Completion], usage: Usage) -> TextAnswer:
        """See `Form`."""
        choices = []
        for prompt_index, completion in enumerate(completions):
            self._prompt_logprobs[prompt_index] = completion.prompt_logprobs
            for sample in completion.samples:
                choice = self._choice(
                    prompt_index,
                    sample.index,
                    sample.text,
                    sample.token_ids,
                    sample.logprobs,
                    sample.finish_reason,
                )
                choice.prompt_logprobs = self._in_vllms_form(completion)
                choices.append(choice)
                if self._has_several:
                    choice.tell(completion.timing)
        answer = self._answer(choices)
        if not self._has_several:
            answer.tell(completions[0].timing)
        answer.usage = UsageAnswer.of(usage)
        return answer

    def pieces(self, prompt_index: int, chunk: Chunk) -> list[TextAnswer]:
        """See `Form`.

        The prompt's log-probabilities come with the first chunk of sample 0. If they are echoed,
        chunks of other samples wait for it.
        """
        if chunk.index == 0:
            self._prompt_logprobs.setdefault(prompt_index, chunk.prompt_logprobs)
        waiting = self._waiting.setdefault(prompt_index, [])
        if self._request.echoes_logprobs and prompt_index not in self._prompt_logprobs:
            waiting.append(chunk)
            return []
        chunks = [chunk, *waiting]
        waiting.clear()
        return [self._piece(prompt_index, one) for one in chunks]

    def _piece(self, prompt_index: int, chunk: Chunk) -> TextAnswer:
        choice = self._choice(
            prompt_index,
            chunk.index,
            chunk.text,
            chunk.token_ids,
            chunk.logprobs,
            chunk.finish_reason,
        )
        answer = self._answer([choice])
        (choice if self._has_several else answer).tell(chunk.timing)
        return answer

    def last(self) -> TextAnswer:
        """See `Form`."""
        return self._answer([])

    def _answer(self, choices: list[TextChoice]) -> TextAnswer:
        return TextAnswer(self._id, self._created, self._model, choices)

    def _choice(
        self,
        prompt_index: int,
        sample: int,
        text: str,
        token_ids: Sequence[int],
        positions: Sequence[PositionLogprobs] | None,
        finish_reason: str | None,
    ) -> TextChoice:
        index = prompt_index * self._num_choices + sample
        is_first = index not in self._offsets
        offsets = self._offsets.setdefault(
            index, self._spelling.offsets(self._request.skips_special_tokens)
        )
        if self._request.wants_prompt_alone:
            text, token_ids, positions = "", (), () if positions is not None else None
        all_positions: list[PositionLogprobs | None] = list(positions or ())
        all_ids = list(token_ids)
        begins: list[int] = []
        if is_first and self._request.echo:
            echo = self._echoes[prompt_index]
            text = echo + text
            all_ids[:0] = self._prompts[prompt_index].ids
            all_positions[:0] = self._prompt_logprobs.get(prompt_index) or ()
            if self._request.logprobs is not None:
                begins = offsets.echo(self._prompts[prompt_index].ids, echo)
        logprobs: TextLogprobs | None = None
        if self._request.logprobs is not None:
            begins += (offsets.next(token_id) for token_id in token_ids)
            num_top = self._request.logprobs
            logprobs = self._spelling.text_logprobs(all_ids, all_positions, num_top, begins)
        return TextChoice(index, text, logprobs, finish_reason)

    def _in_vllms_form(
        self, completion: Completion
    ) -> list[dict[str, Any] | None] | UnsetType | None:
        num_top = self._request.prompt_logprobs
        if num_top is None or completion.prompt_logprobs is None:
            return UNSET
        return of_prompt(completion.prompt_logprobs, num_top)
