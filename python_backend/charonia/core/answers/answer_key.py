"""Which requests have the same answer.

Owns what makes two requests equal: the model's revision, whose they are, their prompts, and every
sampling parameter but those that change no token. Must not know what becomes of an answer.

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
from charonia.core.admission import GenerationRequest
from charonia.protocol import EngineInfo, SamplingParams

CHANGES_NO_TOKEN = frozenset(
    {"priority", "deadline_ms", "cache_priority", "cache_ttl_s", "use_answer_cache"}
)
"""Sampling parameters that say when a request is served, how long, and what is kept of it. All
others count, so that one that is new counts, too."""
_OF_THIS_PROCESS = {"epoch": 0, "pids": [], "num_blocks": 0, "kept": None, "memory": None}
"""What an EngineInfo says that changes no token: `Limits` say how long an answer may be."""
_DIGEST_BYTES = 32


def prompt_digest(prompt_ids: Sequence[int]) -> bytes:
    """What stands for a prompt in a key. For any thread; ids must have been checked."""
    return _digest(array("I", prompt_ids).tobytes())


def revision_of(info: EngineInfo, args: EngineArgs, limits: Limits) -> bytes | None:
    """What stands for a model, as it is served, in a key.

    It is another one for each checkpoint, each argument of the engine, and each length that a
    request may have.

    Returns:
        None where no answer is the model's own, as drafts are accepted whatever they are.
    """
    config = args.speculative_config
    if config is not None and config.synthetic_acceptance_rate is not None:
        return None
    told = msgspec.structs.replace(info, **_OF_THIS_PROCESS)
    return _digest(_encoded([told, args, limits.max_model_len]))


def is_greedy(params: SamplingParams) -> bool:
    """Whether the likeliest token is taken, so that no seed counts."""
    return params.temperature == 0.0 or params.top_k == 1


def is_determined(request: GenerationRequest) -> bool:
    """Whether there is one answer to a request, each time it comes."""
    params = request.params
    return is_greedy(params) or params.seed is not None


def scope_of(params: SamplingParams, revision: bytes) -> bytes:
    """What requests have in common that have the same answer where they have the same prompt."""
    values = {
        name: _ordered(getattr(params, name))
        for name in params.__struct_fields__
        if name not in CHANGES_NO_TOKEN
    }
    if is_greedy(params):
        values["seed"] = None
    return _digest(revision + _encoded(values))


def scope_of_key(key: bytes) -> bytes:
    """The scope of a key, which is that and the digest of a prompt."""
    return key[:_DIGEST_BYTES]


def _ordered(value: object) -> object:
    """A value of which equal ones are encoded alike."""
    return sorted(value.items()) if isinstance(value, dict) else value


def _encoded(value: object) -> bytes:
    return msgspec.msgpack.encode(value, order="deterministic")


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=_DIGEST_BYTES).digest()
