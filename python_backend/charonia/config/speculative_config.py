"""The engine argument `speculative_config`.

Owns its keys. Knows nothing about how tokens are drafted.
"""

from typing import Annotated, Literal

import msgspec

from charonia.config.values import PositiveInt
from charonia.errors import ConfigError

MAX_SPECULATIVE_TOKENS = 64
_SPECULATIVE_TOKENS = {"draft_model": 5, "ngram": 10, "suffix": 16}


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Drafting of tokens, so that one pass of the model can commit several.

    No method changes a request's tokens. Names are vLLM's where the meaning is the same.

    Attributes:
        method: where drafts come from. "draft_model": a small model with the same tokenizer;
            "ngram": what followed the last tokens earlier in the same text; "suffix": the same with
            matches of any length, also in earlier responses of the same tenant. None is
            "draft_model" if a `model` is given.
        model: directory of the draft model's checkpoint.
        quantization: number format of the draft model's weights. "auto" is int8 with our CPU
            kernels, otherwise as None; None is the model's own format. Drafts are verified, so it
            changes no token.
        num_speculative_tokens: most drafts per request and step, 1 to 64; None is 5 for
            "draft_model", 10 for "ngram" and 16 for "suffix".
        prompt_lookup_max, prompt_lookup_min: most and fewest tokens that must match for "ngram",
            1 to 32; None is 5 and 2, or what the other one allows.
        adaptive: choose the number of drafts, which may be none, by measured acceptance and step
            times; False always drafts as many as it can.
        draft_tensor_parallel_size: ranks that the draft model is split among, at most the model's
            `tensor_parallel_size`; None is 1.
        synthetic_acceptance_rate: accept each draft with this probability, whether it is right or
            not. For benchmarks of the machinery alone: the text is NOT the model's.
    """

    method: Literal["draft_model", "ngram", "suffix"] | None = None
    model: str | None = None
    quantization: Literal["auto", "int8", "w8a8"] | None = "auto"
    num_speculative_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_SPECULATIVE_TOKENS)] | None = (
        None
    )
    prompt_lookup_max: Annotated[int, msgspec.Meta(ge=1, le=32)] | None = None
    prompt_lookup_min: Annotated[int, msgspec.Meta(ge=1, le=32)] | None = None
    adaptive: bool = True
    draft_tensor_parallel_size: PositiveInt | None = None
    synthetic_acceptance_rate: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None

    def __post_init__(self) -> None:
        if self.method is None and self.model is None:
            raise ConfigError(
                "speculative_config names neither a method nor a model; methods are"
                " 'draft_model', 'ngram' and 'suffix'"
            )
        if self.has_draft_model and self.model is None:
            raise ConfigError("speculative_config: method 'draft_model' needs a model")
        if not self.has_draft_model and self.model is not None:
            raise ConfigError(
                f"speculative_config: method {self.method!r} takes no model, but one is named"
            )
        shortest, longest = self.prompt_lookup
        if shortest > longest:
            raise ConfigError(
                f"speculative_config: prompt_lookup_min = {shortest} must be at most"
                f" prompt_lookup_max ({longest})"
            )

    @property
    def has_draft_model(self) -> bool:
        """True if the drafts come from a draft model, in the engine."""
        return self.method in (None, "draft_model")

    @property
    def max_drafts(self) -> int:
        """Most drafts per request and step."""
        return self.num_speculative_tokens or _SPECULATIVE_TOKENS[self.method or "draft_model"]

    @property
    def prompt_lookup(self) -> tuple[int, int]:
        """Least and greatest length of an n-gram."""
        longest = self.prompt_lookup_max or max(5, self.prompt_lookup_min or 0)
        return self.prompt_lookup_min or min(2, longest), longest
