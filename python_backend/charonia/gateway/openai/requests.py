"""The fields of requests for text.

Owns the fields, and their names among the scheduler's sampling parameters. Must not know
how text is generated; the scheduler checks ranges.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import WithJsonSchema, field_validator

from charonia.errors import shown
from charonia.gateway.errors import invalid
from charonia.gateway.fields import INT32_MAX, TOKEN_IDS, Fields, are_token_ids
from charonia.gateway.sampling import COUNT, LOGPROBS, SAMPLES, SamplingFields
from charonia_client import Sampling

_SOME_IDS = {**TOKEN_IDS, "minItems": 1}
_PROMPTS = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "minItems": 1, "items": {"type": "string"}},
        _SOME_IDS,
        {"type": "array", "minItems": 1, "items": _SOME_IDS},
    ]
}
_CONTENTS = [
    {"type": "string"},
    {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
            "required": ["type", "text"],
            "additionalProperties": False,
        },
    },
    {"type": "null"},
]
_TEXT: tuple[Any, ...] = ({"type": "text"},)
_UNSERVED: Mapping[str, tuple[Any, ...]] = {
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1, 1.0),
    "logits_processors": (),
    "metadata": ({},),
    "response_format": _TEXT,
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}


class StreamOptions(Fields):
    """Options of a stream: whether its last chunk, or every chunk, has the usage.

    Chunks are never padded to hide their sizes (`include_obfuscation`).
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class TextRequest(SamplingFields):
    """Fields of both kinds of requests for text.

    `user`, `safety_identifier` and `prompt_cache_key` are accepted and ignored: they change no
    answer.
    """

    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = _UNSERVED

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def includes_usage(self) -> bool:
        """True if a stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def has_continuous_usage(self) -> bool:
        """True if each chunk has the usage so far."""
        options = self.stream_options
        return options is not None and bool(options.continuous_usage_stats)

    def check(self) -> None:
        """Check fields against each other.

        Raises:
            ApiError: they do not go together.
        """
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options needs stream = true", "stream_options")
        if self.has_continuous_usage and not self.includes_usage:
            raise invalid(
                "stream_options.continuous_usage_stats needs include_usage = true", "stream_options"
            )
        if self.prompt_logprobs is not None and self.stream:
            raise invalid("prompt_logprobs cannot be had with stream = true", "prompt_logprobs")

    def sampling(self) -> Sampling:
        """Return the scheduler's parameters.

        Without `max_tokens` the answer may be as long as fits: the scheduler lowers the maximum.
        """
        limit = self._max_tokens()
        return self.given() | Sampling(max_tokens=INT32_MAX if limit is None else limit)

    def _max_tokens(self) -> int | None:
        return self.max_tokens


class CompletionRequest(TextRequest):
    """A request to /v1/completions."""

    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **_UNSERVED,
        "prompt_embeds": (),
        "suffix": (),
    }
    long: ClassVar[frozenset[str]] = frozenset(("prompt",))
    limits: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        **SamplingFields.limits,
        "max_tokens": {**COUNT, "minimum": 0},  # 0 with `echo`
        "best_of": SAMPLES,
        "logprobs": LOGPROBS,
    }

    prompt: Annotated[Any, WithJsonSchema(_PROMPTS)]
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None

    @field_validator("prompt")
    @classmethod
    def _check_prompt(cls, value: Any) -> Any:
        return checked_prompts(value)

    @property
    def wants_prompt_alone(self) -> bool:
        """True if nothing is to be generated, usually to get the prompt's log-probabilities."""
        return bool(self.echo) and self.max_tokens == 0

    @property
    def skips_special_tokens(self) -> bool:
        """True if texts leave special tokens out."""
        return self.skip_special_tokens is not False

    @property
    def echoes_logprobs(self) -> bool:
        """True if the answer begins with the prompt's log-probabilities."""
        return bool(self.echo) and self.logprobs is not None

    def sampling(self) -> Sampling:
        """See `TextRequest`. If the prompt is echoed, so are its log-probabilities."""
        sampling = super().sampling()
        if self.best_of is not None:
            sampling["best_of"] = self.best_of
        if self.logprobs is not None:
            sampling["logprobs"] = self.logprobs
            if self.echoes_logprobs:
                sampling["prompt_logprobs"] = max(self.logprobs, self.prompt_logprobs or 0)
        if self.wants_prompt_alone:
            sampling["max_tokens"] = 1
        return sampling


class Message(Fields):
    """A message of a conversation. Empty fields of earlier answers may be sent back."""

    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    limits: ClassVar[Mapping[str, Mapping[str, Any]]] = {"content": {"anyOf": _CONTENTS}}

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    refusal: None = None
    annotations: list[None] | None = None
    audio: None = None
    function_call: None = None
    tool_calls: list[None] | None = None
    provider_specific_fields: dict[str, None] | None = None  # LiteLLM's


class Conversation(Fields):
    """Messages and settings that the chat template renders."""

    limits: ClassVar[Mapping[str, Mapping[str, Any]]] = {"messages": {"minItems": 1}}

    messages: list[Message] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def rendering(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Return the messages and the other arguments of the template.

        Raises:
            ApiError: there is no message, or one cannot be rendered.
        """
        if not self.messages:
            raise invalid("messages must have at least one", "messages")
        continues = bool(self.continue_final_message)
        adds = not continues if self.add_generation_prompt is None else self.add_generation_prompt
        if continues and adds:
            raise invalid(
                "add_generation_prompt and continue_final_message cannot both be true",
                "continue_final_message",
            )
        extra = self.chat_template_kwargs or {}
        if taken := extra.keys() & _OF_RENDERING:
            raise invalid(
                f"chat_template_kwargs must not have {shown(min(taken))}", "chat_template_kwargs"
            )
        messages = [_plain(index, message) for index, message in enumerate(self.messages)]
        return messages, {
            **extra,
            "add_generation_prompt": adds,
            "continue_final_message": continues,
        }


_OF_RENDERING = {
    "add_generation_prompt",
    "bos_token",
    "chat_template",
    "continue_final_message",
    "conversation",
    "documents",
    "eos_token",
    "messages",
    "namespace",
    "raise_exception",
    "self",
    "strftime_now",
    "tokenize",
    "tools",
}


class ChatRequest(TextRequest, Conversation):
    """A request to /v1/chat/completions."""

    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **_UNSERVED,
        "audio": (),
        "best_of": (1,),
        "chat_template": (),
        "documents": (),
        "echo": (False,),
        "function_call": ("none",),
        "functions": ([],),
        "modalities": (["text"],),
        "moderation": (),
        "parallel_tool_calls": (True, False),
        "prediction": (),
        "prompt_cache_options": ({},),
        "prompt_cache_retention": ("in_memory",),
        "reasoning_effort": ("none",),
        "tool_choice": ("none",),
        "tools": ([],),
        "verbosity": ("medium",),
        "web_search_options": (),
    }
    limits: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        **SamplingFields.limits,
        **Conversation.limits,
        "max_completion_tokens": COUNT,
        "top_logprobs": LOGPROBS,
    }

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def check(self) -> None:
        """See `TextRequest`."""
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs needs logprobs = true", "top_logprobs")
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise invalid(
                f"max_tokens = {self.max_tokens} and max_completion_tokens = "
                f"{self.max_completion_tokens} say different things; give one",
                "max_tokens",
            )

    def sampling(self) -> Sampling:
        """See `TextRequest`."""
        sampling = super().sampling()
        if self.logprobs:
            sampling["logprobs"] = self.top_logprobs or 0
        return sampling

    def _max_tokens(self) -> int | None:
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens


class TokenizeRequest(Conversation):
    """A request to /tokenize: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Fields):
    """A request to /detokenize."""

    long: ClassVar[frozenset[str]] = frozenset(("tokens",))

    model: str | None = None
    tokens: Annotated[Any, WithJsonSchema(TOKEN_IDS)]

    @field_validator("tokens")
    @classmethod
    def _check_tokens(cls, value: Any) -> Any:
        if isinstance(value, list) and are_token_ids(value):
            return value
        raise ValueError("must be a list of token ids")


def checked_prompts(value: Any) -> list[str | list[int]]:
    """Return `prompt` as a list of prompts.

    Raises:
        ValueError: it has none of the four forms.
    """
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(one, str) for one in value):
            return value
        if are_token_ids(value):
            return [value]
        if all(isinstance(one, list) and one and are_token_ids(one) for one in value):
            return value
    raise ValueError(
        "must be a text, a list of texts, a list of token ids, or a list of such lists"
    )


def _plain(index: int, message: Message) -> dict[str, Any]:
    """Convert a message for templates: to texts, and OpenAI's `developer` to `system`."""
    where = f"messages[{index}].content"
    content = message.content
    if content is None:
        raise invalid(f"{where} must be a text or a list of parts, but is null", "messages")
    if isinstance(content, list):
        content = "\n".join(_text_of(f"{where}[{i}]", part) for i, part in enumerate(content))
    plain = {"role": "system" if message.role == "developer" else message.role, "content": content}
    return plain if message.name is None else {**plain, "name": message.name}


def _text_of(where: str, part: Mapping[str, Any]) -> str:
    text = part.get("text")
    if part.keys() == {"type", "text"} and part["type"] == "text" and isinstance(text, str):
        return text
    raise invalid(
        f'{where} must be {{"type": "text", "text": …}}, the only kind that is supported, but is '
        f"{shown(dict(part))}",
        "messages",
    )
