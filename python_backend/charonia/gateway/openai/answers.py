"""The JSON of answers.

Owns their fields. Must not know where the values come from.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from charonia.gateway.generation import Usage
from charonia.gateway.openai.logprobs import ChatLogprobs, TextLogprobs


class PromptDetails(msgspec.Struct):
    """Details of the prompt's tokens."""

    cached_tokens: int


class UsageAnswer(msgspec.Struct):
    """Token usage."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails | None

    @classmethod
    def of(cls, usage: Usage) -> "UsageAnswer":
        """Convert the usage so far. Cached tokens are known only at the end."""
        cached = usage.cached_tokens
        return cls(
            usage.prompt_tokens,
            usage.completion_tokens,
            usage.prompt_tokens + usage.completion_tokens,
            None if cached is None else PromptDetails(cached),
        )


class Origin(msgspec.Struct, kw_only=True):
    """Origin of an answer. Without fields it was computed for its request.

    Attributes:
        cached: "exact", "semantic" or "joined", as in the scheduler's `timing`.
        similarity: with "semantic", the cosine of the two prompts.
    """

    cached: str | UnsetType = UNSET
    similarity: float | UnsetType = UNSET

    def tell(self, timing: Mapping[str, Any] | None) -> None:
        """Take over what the last chunk of a request says."""
        if timing is not None and timing.get("cached"):
            self.cached = timing["cached"]
            self.similarity = timing.get("similarity", UNSET)


class TextChoice(Origin):
    """One completion or a piece of it. With several prompts each has its own origin."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: str | None
    prompt_logprobs: list[dict[str, Any] | None] | UnsetType | None = UNSET


class TextAnswer(Origin):
    """The answer of /v1/completions, whole or a piece."""

    id: str
    created: int
    model: str
    choices: list[TextChoice]
    usage: UsageAnswer | UnsetType | None = UNSET
    object: str = "text_completion"


class ChatMessage(msgspec.Struct):
    """A whole message."""

    content: str
    role: str = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ChatAnswer(Origin):
    """The answer of /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageAnswer
    prompt_logprobs: list[dict[str, Any] | None] | UnsetType | None = UNSET
    object: str = "chat.completion"


class Delta(msgspec.Struct):
    """The new part of a message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatPiece(msgspec.Struct):
    """A piece of one answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ChatChunk(Origin):
    """A piece of the answer of /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChatPiece]
    usage: UsageAnswer | UnsetType | None = UNSET
    object: str = "chat.completion.chunk"


class Model(msgspec.Struct):
    """A model of /v1/models.

    Attributes:
        id: the name that was asked for. root: the model's first name. vLLM's clients need it.
    """

    id: str
    created: int
    max_model_len: int | None
    root: str
    owned_by: str = "charonia"
    object: str = "model"


class Models(msgspec.Struct):
    """The list of models."""

    data: list[Model]
    object: str = "list"


class TokenizeAnswer(msgspec.Struct):
    """The answer of /tokenize."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(msgspec.Struct):
    """The answer of /detokenize."""

    prompt: str
