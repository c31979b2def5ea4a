"""Lines about the life of each request.

Owns these lines. Must not know where they go, nor who serves requests.

    request_received ──► request_started ──► request_first_token ──► request_ended
                    └──► request_refused

They are details, at the level "debug", but for the end of an accepted request that failed, see
`ended_line`. A request that comes while the level is another one costs little more than one look at
the level.
"""

import time
from collections.abc import Callable, Mapping

from charonia.core.generation_request import GenerationRequest
from charonia.core.output.outputs import Chunk
from charonia.errors import (
    CharoniaError,
    EngineDownError,
    RequestQuarantinedError,
    ShuttingDownError,
    UnavailableError,
)
from charonia.events import Log, debug_event, error_event, event, warning_event

MAX_REASON = 500
"""Limit for a reason in the log, in characters."""


class RequestLog:
    """Writes the lines, for any thread. Keeps no request.

    Args:
        log: takes the lines.
        max_prompt: most characters of a prompt in a line; 0 shows nothing of it.
        decode: returns the text of token ids.
    """

    def __init__(
        self,
        log: Log,
        *,
        max_prompt: int = 0,
        decode: Callable[[list[int]], str] = lambda token_ids: "",
    ) -> None:
        self._log = log
        self._max_prompt = max_prompt
        self._decode = decode

    def follow(self, request: GenerationRequest, arrived_at: float) -> "FollowedRequest | None":
        """Follow a request that is about to be admitted.

        Args:
            arrived_at: its arrival, by the monotonic clock.

        Returns:
            Is told what becomes of it; None for a probe.
        """
        if request.is_probe:
            return None
        has_details = self._log.shows("debug")
        if has_details:
            self._note_received(request)
        return FollowedRequest(request, arrived_at, self._log, has_details=has_details)

    def _note_received(self, request: GenerationRequest) -> None:
        params = request.params
        self._log(
            debug_event(
                "request_received",
                **request.log_fields,
                prompt_tokens=len(request.prompt_ids),
                max_tokens=params.max_tokens,
                samples=params.n if params.n > 1 else None,
                priority=params.priority or None,
                deadline_ms=params.deadline_ms,
                prompt=self._prompt(request.prompt_ids),
            )
        )

    def note_refused(self, error: CharoniaError, fields: Mapping[str, str | None]) -> None:
        """Note that a request was refused.

        Args:
            fields: what is known of it, see `events.request_fields`.
        """
        if self._log.shows("debug"):
            self._log(
                debug_event(
                    "request_refused", **fields, kind=error.kind, reason=str(error)[:MAX_REASON]
                )
            )

    def note_ended(self, error: CharoniaError, fields: Mapping[str, str | None]) -> None:
        """Note that a request ended with an error before it was to be admitted.

        Args:
            fields: as in `note_refused`.
        """
        self._log(ended_line(error, fields))

    def _prompt(self, prompt_ids: list[int]) -> str | None:
        if not self._max_prompt:
            return None
        # A token has a character at least, mostly.
        return self._decode(prompt_ids[: self._max_prompt])[: self._max_prompt]


class FollowedRequest:
    """A request with lines about what becomes of it.

    Args:
        arrived_at: its arrival, by the monotonic clock. log: takes the lines.
        has_details: whether there is a line whatever becomes of it.
    """

    def __init__(
        self,
        request: GenerationRequest,
        arrived_at: float,
        log: Callable[[str], None],
        *,
        has_details: bool,
    ) -> None:
        self._fields = request.log_fields
        self._arrived_at = arrived_at
        self._log = log
        self._has_details = has_details
        self._has_started = False
        self._num_tokens = 0

    def note_started(self) -> None:
        """Note that its first step begins; further samples are ignored."""
        if self._has_details and not self._has_started:
            self._has_started = True
            self._log(debug_event("request_started", **self._fields, queue_seconds=self._age))

    def note(self, chunk: Chunk) -> None:
        """Note a chunk of it."""
        if self._has_details and chunk.token_ids and not self._num_tokens:
            self._log(debug_event("request_first_token", **self._fields, seconds=self._age))
        self._num_tokens += len(chunk.token_ids)
        if chunk.is_final:
            self._end(chunk)

    def _end(self, last: Chunk) -> None:
        error = last.error
        if not self._has_details and (error is None or error.is_clients_doing):
            return
        timing = {k: v for k, v in (last.timing or {}).items() if not isinstance(v, list)}
        figures = {
            "prompt_tokens": last.num_prompt_tokens or None,
            "tokens": self._num_tokens,
            **timing,
        }
        if error is not None:
            self._log(ended_line(error, self._fields, **figures))
        else:
            outcome = last.finish_reason
            self._log(debug_event("request_ended", **self._fields, outcome=outcome, **figures))

    @property
    def _age(self) -> float:
        return time.monotonic() - self._arrived_at


def ended_line(error: CharoniaError, fields: Mapping[str, str | None], **figures: object) -> str:
    """The line of a request that was accepted and ended with an error.

    It is an error if charonia failed, and a warning if there was no engine or no server any more.
    Where there was too little time or room the load is the cause, or what the client asked for:
    then it is information, as a cancellation is. What is the client's doing, or has a line of its
    own, is a detail.

    Args:
        fields: see `events.request_fields`. figures: further fields.
    """
    make = error_event
    if error.is_clients_doing or isinstance(error, RequestQuarantinedError):
        make = debug_event
    elif type(error) in (UnavailableError, EngineDownError, ShuttingDownError):
        make = warning_event
    elif isinstance(error, UnavailableError):
        make = event
    reason = str(error)[:MAX_REASON]
    return make("request_ended", **fields, outcome=error.kind, reason=reason, **figures)
