"""Attributes of a request's trace that describe the request itself.

Owns the names of these attributes: those of OpenTelemetry's conventions for generative AI where
they have one, else `charonia.` and our own name of it. Prompts and answers are never part of them.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from charonia.core.output.outputs import Chunk
from charonia.errors import CharoniaError
from charonia.serving.conventions.schema import GenerateCall
from charonia.serving.requests.tensors import INTERNAL_ERROR
from charonia.tracing.request_trace import RequestTrace, Value


def note_call(trace: RequestTrace, call: GenerateCall, model: str) -> None:
    """Describe what a client asks for.

    Args:
        model: directory of the checkpoint.
    """
    params = call.params
    described: dict[str, Value | None] = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "charonia",
        "gen_ai.request.model": Path(model).name,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.choice.count": params.n,
        "charonia.request_id": call.request_id or None,
        "charonia.key": call.key,
        "charonia.tenant": params.tenant or None,
        "charonia.priority": params.priority or None,
    }
    trace.attributes.update({k: value for k, value in described.items() if value is not None})


def note_sent(
    trace: RequestTrace,
    chunks: Sequence[Chunk],
    began_at: float,
    ended_at: float,
    *,
    is_last: bool,
    has_failed: bool = False,
) -> None:
    """Note a response with these chunks, and the request's end after the last one.

    Args:
        has_failed: whether it could not be sent.
    """
    trace.note_sent(began_at, ended_at, sum(len(chunk.token_ids) for chunk in chunks))
    if is_last:
        last = chunks[-1]
        error = None if last.error is None else (last.error.answer, last.error.kind)
        if has_failed:
            error = (INTERNAL_ERROR, CharoniaError.kind)
        trace.attributes["gen_ai.usage.output_tokens"] = trace.num_tokens
        trace.end(ended_at, attributes=_outcome(last), error=error)


def _outcome(last: Chunk) -> Mapping[str, Value]:
    """Describe the whole request by its last chunk."""
    outcome: dict[str, Value] = {"gen_ai.usage.input_tokens": last.num_prompt_tokens}
    if last.finish_reason is not None:
        outcome["gen_ai.response.finish_reasons"] = (last.finish_reason,)
    for name, value in (last.timing or {}).items():
        if not isinstance(value, list):
            outcome[f"charonia.{name}"] = value
    return outcome


@contextmanager
def ending_with_errors(trace: RequestTrace | None) -> Iterator[None]:
    """End a trace with the error of a request that is refused."""
    try:
        yield
    except CharoniaError as error:
        if trace is not None:
            trace.end(time.monotonic(), error=(error.answer, error.kind))
        raise
    except Exception:
        if trace is not None:
            trace.end(time.monotonic(), error=(INTERNAL_ERROR, CharoniaError.kind))
        raise
