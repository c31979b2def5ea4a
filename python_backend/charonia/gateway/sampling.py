"""The sampling parameters that every API has under the scheduler's own names.

Owns these fields. Must not know how text is generated; the scheduler checks ranges.
"""

from typing import ClassVar, cast

from charonia.gateway.fields import Fields
from charonia_client import Sampling


class SamplingFields(Fields):
    """Sampling parameters by the scheduler's names. null is the default.

    Attributes:
        further: the names of those that a subclass adds.
    """

    further: ClassVar[tuple[str, ...]] = ()

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    bad_words: list[str] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    prompt_logprobs: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    cache_priority: int | list[dict[str, int | float | None]] | None = None
    cache_ttl_s: float | None = None
    use_answer_cache: bool | None = None

    def given(self) -> Sampling:
        """Return the parameters that were given."""
        names = (*SamplingFields.model_fields, *self.further)
        values = {name: getattr(self, name) for name in names}
        return cast(Sampling, {name: one for name, one in values.items() if one is not None})
