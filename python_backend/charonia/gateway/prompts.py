"""Converts texts to token ids, in threads if they are long or many.

Owns the tokenizer, the chat template and their threads. Must not know requests, but for their size:
what is done for a large one blocks the event loop for long, whatever its single parts are.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from charonia.gateway.errors import invalid, too_long
from charonia.text.tokenizer import Tokenizer

SHORT_BYTES = 2048
"""Requests up to this size are read, rendered and tokenized on the event loop; a thread would take
longer."""
T = TypeVar("T")


@dataclass(frozen=True)
class Prompt:
    """The prompt of a request.

    Attributes:
        text: the text of the ids; None if the client gave ids.
    """

    ids: Sequence[int]
    text: str | None = None


class Template(Protocol):
    """Renders a conversation as text; `text.chat_template.ChatTemplate` is one."""

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **extra: Any,
    ) -> str:
        """Render messages. Raises InvalidRequestError if the template refuses them."""
        ...


class Prompts:
    """Makes prompts. Belongs to one event loop.

    Args:
        template: the chat template, or the reason why there is none.
        num_threads: for large requests.
    """

    def __init__(self, tokenizer: Tokenizer, template: Template | str, num_threads: int) -> None:
        self.tokenizer = tokenizer
        self._template = template
        self._threads = ThreadPoolExecutor(num_threads, "charonia-tokenizing")

    @property
    def has_template(self) -> bool:
        """True if conversations can be rendered."""
        return not isinstance(self._template, str)

    async def of_text(
        self, text: str, max_model_len: int | None, *, add_special_tokens: bool, body_bytes: int
    ) -> Prompt:
        """Tokenize a text.

        Args:
            max_model_len: refuses a text at once that cannot fit; None refuses nothing.
            body_bytes: of the whole request, which may have many texts.

        Raises:
            InvalidRequestError: it cannot be tokenized. ApiError: it is too long.
        """
        per_token = self.tokenizer.max_bytes_per_token
        num_bytes = len(text) if text.isascii() else len(text.encode(errors="replace"))
        if max_model_len is not None and per_token and num_bytes > max_model_len * per_token:
            raise too_long(
                f"This model's maximum context length is {max_model_len} tokens, which have at most"
                f" {max_model_len * per_token} bytes. However, the prompt has {num_bytes} bytes."
            )

        def encode() -> list[int]:
            return self.tokenizer.encode(
                text, add_special_tokens, lambda num_ids: _check_length(num_ids, max_model_len)
            )

        return Prompt(await self.run(max(num_bytes, body_bytes), encode), text)

    def of_ids(self, ids: Sequence[int], max_model_len: int | None) -> Prompt:
        """Take token ids. Raises ApiError if there are too many."""
        _check_length(len(ids), max_model_len)
        return Prompt(ids)

    async def of_messages(
        self,
        messages: list[dict[str, Any]],
        options: dict[str, Any],
        max_model_len: int | None,
        *,
        add_special_tokens: bool,
        body_bytes: int,
    ) -> Prompt:
        """Render a conversation and tokenize the text. The template writes its own BOS.

        Args:
            options: further arguments of the template.
            body_bytes: of the request that has both.

        Raises:
            InvalidRequestError: the template refuses it. ApiError: there is no template, or the
                prompt is too long.
        """
        template = self._template
        if isinstance(template, str):
            raise invalid(template, "messages", "no_chat_template")
        text = await self.run(body_bytes, lambda: template.render(messages, **options))
        return await self.of_text(
            text, max_model_len, add_special_tokens=add_special_tokens, body_bytes=body_bytes
        )

    async def run(self, num_bytes: int, call: Callable[[], T]) -> T:
        """Run a call on so many bytes, in a thread if they are many."""
        if num_bytes <= SHORT_BYTES:
            return call()
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def close(self) -> None:
        """Stop the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _check_length(num_ids: int, max_model_len: int | None) -> None:
    if max_model_len is not None and num_ids >= max_model_len:
        raise too_long(
            f"This model's maximum context length is {max_model_len} tokens. However, the prompt"
            f" has {num_ids} tokens, and at least one must be generated."
        )
