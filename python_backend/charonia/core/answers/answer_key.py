"""Keys of answers: requests with the same key have the same answer.

Owns the keys of answers. Two requests are equal if they have the same model revision, tenant, salt,
prompt and sampling parameters, but for parameters that change no token. Must not know the answers.

    revision ─┐
    parameters, tenant, salt ─► scope ─┐
                         prompt ids ───┴─► key
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

import msgspec

from charonia.config import EngineArgs
from charonia.control import Limits
from charonia.core.generation_request import GenerationRequest
from charonia.protocol import EngineInfo, SamplingParams

CHANGES_NO_TOKEN = frozenset(
    {"priority", "deadline_ms", "cache_priority", "cache_ttl_s", "use_answer_cache"}
)
"""Sampling parameters that concern scheduling and caching only. All others are part of the key, so
that a new parameter is, too."""
_OF_THIS_PROCESS = {"epoch": 0, "pids": [], "num_blocks": 0, "kept": None, "memory": None}
"""Fields of EngineInfo that change no token, and neutral values for them."""
_DIGEST_BYTES = 32


def prompt_digest(prompt_ids: Sequence[int]) -> bytes:
    """The digest of a prompt in a key. For any thread; the ids must have been checked."""
    return _digest(array("I", prompt_ids).tobytes())


def revision_of(info: EngineInfo, args: EngineArgs, limits: Limits) -> bytes | None:
    """The digest of a model, as it is served, in a key.

    It depends on the checkpoint, the arguments of the engine and the greatest length of a request.

    Returns:
        None if drafts are accepted at a synthetic rate: such answers are not the model's own.
    """
    config = args.speculative_config
    if config is not None and config.synthetic_acceptance_rate is not None:
        return None
    told = msgspec.structs.replace(info, **_OF_THIS_PROCESS)
    return _digest(_encoded([told, args, limits.max_model_len]))


def is_greedy(params: SamplingParams) -> bool:
    """Return whether sampling always takes the likeliest token, so that the seed has no effect."""
    return params.temperature == 0.0 or params.top_k == 1


def is_determined(request: GenerationRequest) -> bool:
    """Return whether a request is deterministic: it has the same answer each time."""
    params = request.params
    return is_greedy(params) or params.seed is not None


def scope_of(params: SamplingParams, revision: bytes) -> bytes:
    """The digest of all that makes requests equal except their prompts."""
    values = {
        name: _ordered(getattr(params, name))
        for name in params.__struct_fields__
        if name not in CHANGES_NO_TOKEN
    }
    if is_greedy(params):
        values["seed"] = None
    return _digest(revision + _encoded(values))


def scope_of_key(key: bytes) -> bytes:
    """The scope in a key; the rest of the key is the prompt's digest."""
    return key[:_DIGEST_BYTES]


def _ordered(value: object) -> object:
    """A value in a form in which equal values are encoded alike."""
    return sorted(value.items()) if isinstance(value, dict) else value


def _encoded(value: object) -> bytes:
    return msgspec.msgpack.encode(value, order="deterministic")


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=_DIGEST_BYTES).digest()
