"""From a request as it came to a live one: read, checked, tokenized, and handed to the engine.

Owns the order of these, who may be cancelled meanwhile, and the count of what is refused. Must not
know Triton, nor how anything is scheduled.

    read ─► short prompt or ids ──────────► session ─► engine service
         └► long prompt ─► session ─► tokenizing ─────►

What is too long is refused by its size: the text is not decoded, and the ids are not listed.
"""

import contextlib
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial

from charonia.engine.admission import GenerationRequest
from charonia.engine.outputs import Chunk
from charonia.engine.service import EngineService, Sink
from charonia.errors import CharoniaError, RequestCancelledError, UnavailableError
from charonia.serving.outlets import Outlet, failing_with_errors
from charonia.serving.probing import Prober
from charonia.serving.request_key import Sealer
from charonia.serving.schema import (
    CancelCall,
    GenerateCall,
    ProbeCall,
    PromptLimits,
    parse,
)
from charonia.serving.sessions import Sessions
from charonia.serving.tensors import INTERNAL_ERROR, Outputs, RawRequest
from charonia.serving.tokenizing import INLINE_BYTES, Prompt, Tokenizing
from charonia.text.tokenizer import Tokenizer

NOTHING: Outputs = {"text_output": [""]}
"""Answers a client's request that generates no text."""


class Intake:
    """Takes requests in, from any thread.

    Args:
        log: takes one line, from any thread.
    """

    def __init__(
        self,
        service: EngineService,
        sessions: Sessions,
        tokenizer: Tokenizer,
        tokenizing: Tokenizing,
        sealer: Sealer,
        *,
        log: Callable[[str], None],
    ) -> None:
        self._service = service
        self._sessions = sessions
        self._tokenizer = tokenizer
        self._tokenizing = tokenizing
        self._sealer = sealer
        self._prober = Prober(service, tokenizer)
        self._log = log

    def take(
        self, read: Callable[[], RawRequest], outlet: Outlet, relayed_key: str | None = None
    ) -> None:
        """Take a request in; whatever is wrong with it becomes its answer.

        Args:
            read: gives the request. relayed_key: see `schema.parse`.
        """
        with failing_with_errors(outlet, self._log):
            with self._counting():
                call = parse(read(), relayed_key, limits=self._limits(), sealer=self._sealer)
            match call:
                case GenerateCall():
                    self._generate(call, outlet)
                case CancelCall(request_id, tenant):
                    for key in self._sessions.find(request_id, tenant):
                        self._sessions.cancel(key)
                    outlet.send(NOTHING, is_final=True)
                case ProbeCall(wants_text):
                    answer = {"text_output": [self._prober.answer()]} if wants_text else {}
                    outlet.send(answer, is_final=True)

    def cancel(self, key: str) -> None:
        """End a request, wherever it is."""
        if not self._tokenizing.cancel(key):
            self._service.cancel(key)

    def _limits(self) -> PromptLimits:
        """Of prompts; the widest while no engine says how long they may be."""
        try:
            limits = self._service.limits
        except UnavailableError:
            return PromptLimits()
        return PromptLimits.of(limits.max_model_len - 1, self._tokenizer.max_bytes_per_token)

    @contextlib.contextmanager
    def _counting(self) -> Iterator[None]:
        """Count what is refused before it reaches the service, which counts for itself."""
        try:
            yield
        except CharoniaError as error:
            self._service.count_rejection(error)
            raise

    def _generate(self, call: GenerateCall, outlet: Outlet) -> None:
        arrived_at = time.monotonic()
        with self._counting():
            self._check_length(1 if call.prompt_ids is None else call.prompt_ids.size)
            ids = self._ids_at_once(call)
            echo = self._echo(call, ids)
            sink = self._sessions.open(
                call.key,
                call.options,
                echo,
                outlet,
                request_id=call.request_id,
                tenant=call.params.tenant,
                num_bytes=call.num_bytes,
            )
        try:
            if ids is not None:
                self._submit(call, ids, arrived_at, sink)
            else:
                with self._counting():
                    self._tokenize(call, arrived_at, sink)
        except BaseException:
            self._sessions.drop(call.key)
            raise

    def _ids_at_once(self, call: GenerateCall) -> list[int] | None:
        """The ids of a prompt for which that takes no time worth mentioning."""
        if call.prompt_ids is not None:
            ids: list[int] = call.prompt_ids.tolist()
            return ids
        assert call.text is not None
        return self._encode(call.text) if len(call.text) <= INLINE_BYTES else None

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, check_length=self._check_length)

    def _check_length(self, num_ids: int) -> None:
        self._service.limits.check_prompt(num_ids)

    def _echo(self, call: GenerateCall, ids: list[int] | None) -> Callable[[], str]:
        """What is prepended to the answer; made when it is sent, of a request that was checked."""
        text = call.text if call.prompt_text is None else call.prompt_text
        if text is not None:
            return lambda: text
        assert ids is not None
        return partial(
            self._tokenizer.decode, ids, skip_special_tokens=call.params.skip_special_tokens
        )

    def _tokenize(self, call: GenerateCall, arrived_at: float, sink: Sink) -> None:
        """Have the prompt tokenized, and go on with its ids."""
        assert call.text is not None
        times_s = [call.timeout_s, call.params.deadline_ms and call.params.deadline_ms / 1000]
        time_s = min((limit for limit in times_s if limit is not None), default=None)

        def go_on(outcome: list[int] | CharoniaError) -> None:
            try:
                if isinstance(outcome, CharoniaError):
                    self._count_end(outcome)
                    raise outcome
                self._submit(call, outcome, arrived_at, sink)
            except CharoniaError as error:
                sink(Chunk(call.key, error=error))
            except Exception:
                self._log(f"a request failed: {traceback.format_exc()}")
                sink(Chunk(call.key, error=CharoniaError(INTERNAL_ERROR)))

        self._tokenizing.submit(
            Prompt(
                key=call.key,
                encode=partial(self._encode, call.text),
                num_bytes=call.num_bytes,
                expires_at=None if time_s is None else arrived_at + time_s,
                done=go_on,
            )
        )

    def _count_end(self, error: CharoniaError) -> None:
        """Count a request that got no further than being tokenized."""
        if isinstance(error, RequestCancelledError):
            self._service.count_cancellation()
        else:
            self._service.count_rejection(error)

    def _submit(self, call: GenerateCall, ids: list[int], arrived_at: float, sink: Sink) -> None:
        request = GenerationRequest(
            key=call.key,
            request_id=call.request_id,
            prompt_ids=ids,
            params=call.params,
            return_cumulative_logprob=call.wants_cumulative_logprob,
            timeout_s=call.timeout_s,
        )
        self._service.submit(request, sink, arrived_at)
        if self._sessions.is_cancelled(call.key):  # while the service did not know it yet
            self._service.cancel(call.key)
