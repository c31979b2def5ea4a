"""Lines about the life of each request, at the level "debug".

Owns these lines. Must not know where they go, nor who serves requests.

    request_received ──► request_started ──► request_first_token ──► request_ended
                    └──► request_refused

A request that comes while the level is another one is not followed, and costs one look at the
level.
"""

import time
from collections.abc import Callable, Mapping

from charonia.core.generation_request import GenerationRequest
from charonia.core.output.outputs import Chunk
from charonia.errors import CharoniaError
from charonia.events import Log, debug_event

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
            Is told what becomes of it; None if no details are wanted.
        """
        if request.is_probe or not self._log.shows("debug"):
            return None
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
        return FollowedRequest(request, arrived_at, self._log)

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

    def _prompt(self, prompt_ids: list[int]) -> str | None:
        if not self._max_prompt:
            return None
        # A token has a character at least, mostly.
        return self._decode(prompt_ids[: self._max_prompt])[: self._max_prompt]


class FollowedRequest:
    """A request with lines about what becomes of it.

    Args:
        arrived_at: its arrival, by the monotonic clock. log: takes the lines.
    """

    def __init__(
        self, request: GenerationRequest, arrived_at: float, log: Callable[[str], None]
    ) -> None:
        self._fields = request.log_fields
        self._arrived_at = arrived_at
        self._log = log
        self._has_started = False
        self._num_tokens = 0

    def note_started(self) -> None:
        """Note that its first step begins; further samples are ignored."""
        if not self._has_started:
            self._has_started = True
            self._say("request_started", queue_seconds=self._age)

    def note(self, chunk: Chunk) -> None:
        """Note a chunk of it."""
        if chunk.token_ids and not self._num_tokens:
            self._say("request_first_token", seconds=self._age)
        self._num_tokens += len(chunk.token_ids)
        if chunk.is_final:
            self._end(chunk)

    def _end(self, last: Chunk) -> None:
        timing = {k: v for k, v in (last.timing or {}).items() if not isinstance(v, list)}
        self._say(
            "request_ended",
            outcome=last.finish_reason if last.error is None else last.error.kind,
            reason=None if last.error is None else str(last.error)[:MAX_REASON],
            prompt_tokens=last.num_prompt_tokens or None,
            tokens=self._num_tokens,
            **timing,
        )

    @property
    def _age(self) -> float:
        return time.monotonic() - self._arrived_at

    def _say(self, name: str, **fields: object) -> None:
        self._log(debug_event(name, **self._fields, **fields))
