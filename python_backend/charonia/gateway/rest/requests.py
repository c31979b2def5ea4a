"""The fields of REST requests.

Owns the fields; sampling parameters have the scheduler's names. Must not know how text is
generated; the scheduler checks ranges.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import WithJsonSchema, field_validator

from charonia.gateway.errors import invalid
from charonia.gateway.fields import INT32_MAX, TOKEN_IDS, Fields, are_token_ids
from charonia.gateway.sampling import COUNT, LOGPROBS, SAMPLES, SamplingFields
from charonia.protocol.sampling_params import MAX_CHARACTERS
from charonia_client import Sampling

TOKEN_IDS_OR_NULL = {"anyOf": [{**TOKEN_IDS, "minItems": 1}, {"type": "null"}]}
_ENTRIES = {
    "type": "array",
    "minItems": 1,
    "items": {"$ref": "#/components/schemas/PromptRequest"},
}


class AllSamplingFields(SamplingFields):
    """All of the scheduler's sampling parameters."""

    limits: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        **SamplingFields.limits,
        "best_of": SAMPLES,
        "logprobs": LOGPROBS,
        "deadline_ms": COUNT,
        "tenant": {"maxLength": MAX_CHARACTERS["tenant"]},
    }

    best_of: int | None = None
    logprobs: int | None = None
    deadline_ms: int | None = None
    tenant: str | None = None
    speculation: bool | None = None

    def sampling(self) -> Sampling:
        """Return the parameters that were given.

        Without `max_tokens` the answer may be as long as fits: the scheduler lowers the maximum.
        """
        return Sampling(max_tokens=INT32_MAX) | self.given(AllSamplingFields)


class PromptRequest(AllSamplingFields):
    """A prompt and how it is to be completed: an entry of a batch."""

    long: ClassVar[frozenset[str]] = frozenset(("prompt_tokens",))

    model: str | None = None
    prompt: str | None = None
    prompt_tokens: Annotated[Any, WithJsonSchema(TOKEN_IDS_OR_NULL)] = None

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

    requests: Annotated[Any, WithJsonSchema(_ENTRIES)]
    stream: bool | None = None

    @field_validator("requests")
    @classmethod
    def _check_entries(cls, value: Any) -> Any:
        if isinstance(value, list) and value:
            return value
        raise ValueError("must be a list of requests")
