"""The fields of REST requests.

Owns the fields; sampling parameters have the scheduler's names. Must not know how text is
generated; the scheduler checks ranges.
"""

from typing import Any, ClassVar, cast

from pydantic import field_validator

from charonia.gateway.errors import invalid
from charonia.gateway.fields import INT32_MAX, Fields, are_token_ids
from charonia_client import Sampling


class SamplingFields(Fields):
    """The scheduler's sampling parameters, each under its own name. null is the default."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int | None = None
    best_of: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    bad_words: list[str] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    priority: int | None = None
    deadline_ms: int | None = None
    tenant: str | None = None
    cache_salt: str | None = None
    speculation: bool | None = None
    cache_priority: int | list[dict[str, int | float | None]] | None = None
    cache_ttl_s: float | None = None
    use_answer_cache: bool | None = None

    def sampling(self) -> Sampling:
        """Return the parameters that were given.

        Without `max_tokens` the answer may be as long as fits: the scheduler lowers the maximum.
        """
        values = {name: getattr(self, name) for name in SamplingFields.model_fields}
        given = {name: value for name, value in values.items() if value is not None}
        return cast(Sampling, {"max_tokens": INT32_MAX, **given})


class PromptRequest(SamplingFields):
    """A prompt and how it is to be completed: an entry of a batch."""

    long: ClassVar[frozenset[str]] = frozenset(("prompt_tokens",))

    model: str | None = None
    prompt: str | None = None
    prompt_tokens: Any = None

    @field_validator("prompt_tokens")
    @classmethod
    def _check_ids(cls, value: Any) -> Any:
        if value is None or (isinstance(value, list) and value and are_token_ids(value)):
            return value
        raise ValueError("must be a list of token ids")

    def check(self) -> None:
        """Check fields against each other.

        Raises:
            ApiError: they do not go together.
        """
        if (self.prompt is None) == (self.prompt_tokens is None):
            raise invalid("exactly one of prompt and prompt_tokens must be given", "prompt")


class GenerateRequest(PromptRequest):
    """A request to /v1/generate."""

    stream: bool | None = None


class BatchRequest(Fields):
    """A request to /v1/batch. Its entries are read one by one: a wrong one fails alone."""

    long: ClassVar[frozenset[str]] = frozenset(("requests",))

    requests: Any
    stream: bool | None = None

    @field_validator("requests")
    @classmethod
    def _check_entries(cls, value: Any) -> Any:
        if isinstance(value, list) and value:
            return value
        raise ValueError("must be a list of requests")
