"""The sampling parameters that every API has under the scheduler's own names.

Owns these fields, and what the OpenAPI document says of their ranges. Must not know how text is
generated; the scheduler checks ranges.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, cast

from charonia.gateway.fields import INT32_MAX, TOKEN_IDS, Fields
from charonia.protocol import sampling_params as ranges
from charonia_client import Sampling

COUNT = {"minimum": 1, "maximum": INT32_MAX}
SAMPLES = {"minimum": 1, "maximum": ranges.MAX_SAMPLES}
LOGPROBS = {"minimum": 0, "maximum": ranges.MAX_LOGPROBS}
_NULL = {"type": "null"}
_PENALTY = {"minimum": -2, "maximum": 2}
_SCALE = {"exclusiveMinimum": 0, "maximum": 1e6}
_TTL = {"exclusiveMinimum": 0, "maximum": ranges.MAX_TTL_S}
_CACHE_PRIORITY = {"type": "integer", "minimum": 0, "maximum": ranges.MAX_CACHE_PRIORITY}
_CACHE_RANGE = {
    "type": "object",
    "properties": {
        "start": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": INT32_MAX}, _NULL]},
        "end": {"anyOf": [{"type": "integer", **COUNT}, _NULL]},
        "priority": _CACHE_PRIORITY,
        "ttl_s": {"anyOf": [{"type": "number", **_TTL}, _NULL]},
    },
    "required": ["priority"],
    "additionalProperties": False,
}


def _texts(name: str) -> dict[str, Any]:
    """Describe a list of non-empty texts; all of them together have at most `maxLength`."""
    text = {"type": "string", "minLength": 1, "maxLength": ranges.MAX_CHARACTERS[name]}
    return {"type": "array", "maxItems": ranges.MAX_ENTRIES[name], "items": text}


class SamplingFields(Fields):
    """Sampling parameters by the scheduler's names. null is the default."""

    limits: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "max_tokens": COUNT,
        "temperature": {"minimum": 0, "maximum": 1e6},
        "top_p": {"exclusiveMinimum": 0, "maximum": 1},
        "top_k": {"minimum": -1, "maximum": INT32_MAX},
        "min_p": {"minimum": 0, "maximum": 1},
        "seed": {"minimum": -(2**63), "maximum": ranges.UINT64_MAX},
        "n": SAMPLES,
        "stop": {"anyOf": [_texts("stop")["items"], _texts("stop"), _NULL]},
        "stop_token_ids": {
            "anyOf": [{**TOKEN_IDS, "maxItems": ranges.MAX_ENTRIES["stop_token_ids"]}, _NULL]
        },
        "bad_words": {"anyOf": [_texts("bad_words"), _NULL]},
        "allowed_token_ids": {
            "anyOf": [
                {**TOKEN_IDS, "minItems": 1, "maxItems": ranges.MAX_ENTRIES["allowed_token_ids"]},
                _NULL,
            ]
        },
        "min_tokens": {"minimum": 0, "maximum": INT32_MAX},
        "presence_penalty": _PENALTY,
        "frequency_penalty": _PENALTY,
        "repetition_penalty": _SCALE,
        "logit_bias": {
            "anyOf": [
                {
                    "type": "object",
                    "maxProperties": ranges.MAX_ENTRIES["logit_bias"],
                    "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"},
                    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
                },
                _NULL,
            ]
        },
        "prompt_logprobs": LOGPROBS,
        "priority": {"minimum": -INT32_MAX, "maximum": INT32_MAX},
        "cache_salt": {"maxLength": ranges.MAX_CHARACTERS["cache_salt"]},
        "cache_priority": {
            "anyOf": [
                _CACHE_PRIORITY,
                {"type": "array", "maxItems": ranges.MAX_CACHE_RANGES, "items": _CACHE_RANGE},
                _NULL,
            ]
        },
        "cache_ttl_s": _TTL,
    }

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
    allowed_token_ids: list[int] | None = None
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

    def given(self, kind: "type[SamplingFields] | None" = None) -> Sampling:
        """Return the parameters that were given.

        Args:
            kind: the class whose fields are parameters; None is this one, without subclasses.
        """
        values = {name: getattr(self, name) for name in (kind or SamplingFields).model_fields}
        return cast(Sampling, {name: one for name, one in values.items() if one is not None})
