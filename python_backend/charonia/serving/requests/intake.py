"""Takes requests in: reads, checks and tokenizes them, and passes them to the engine service.

Owns the order of these, cancellation meanwhile, and the count of refusals. Must not know Triton,
nor scheduling.

    read ─► tenant ─► ids or short texts ──────────► session ─► engine service
                   └► long texts ─► session ─► tokenizing ─────►

The texts of a request are its prompt and its bad words. A tenant that has reached its limits is
refused before they are tokenized.

Inputs that are too long are refused by their size, before texts are decoded or ids converted.
"""

import contextlib
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial

from charonia.config import EngineArgs
from charonia.core.generation_request import GenerationRequest
from charonia.core.output.outputs import Chunk
from charonia.core.request_log import RequestLog
from charonia.core.service import EngineService
from charonia.errors import (
    CharoniaError,
    CheckpointError,
    NotSupportedError,
    RequestCancelledError,
    UnavailableError,
)
from charonia.events import exception_event
from charonia.protocol import SamplingParams
from charonia.sampling_defaults import SamplingDefaults
from charonia.serving.conventions.interface import DRAFT_IDS
from charonia.serving.conventions.parameters import tenant_of_header
from charonia.serving.conventions.schema import (
    CancelCall,
    GenerateCall,
    ProbeCall,
    PromptLimits,
    parse,
)
from charonia.serving.requests.cancellations import Cancellations
from charonia.serving.requests.probing import Prober
from charonia.serving.requests.raw_request import Outputs, RawRequest
from charonia.serving.requests.request_key import Sealer
from charonia.serving.requests.responders import LogFields, Responder, failing_with_errors
from charonia.serving.requests.session import Session
from charonia.serving.requests.sessions import Sessions
from charonia.serving.requests.tensors import INTERNAL_ERROR
from charonia.serving.requests.tokenizing import INLINE_CHARACTERS, Prompt, Tokenizing
from charonia.serving.requests.traced import ending_with_errors, note_call
from charonia.text.tokenizer import Tokenizer
from charonia.tracing.request_trace import RequestTrace

BeginTrace = Callable[[str | None, float], RequestTrace | None]
NOTHING: Outputs = {"text_output": [""]}
"""The answer to a request that generates no text, such as a cancellation."""


@dataclass(frozen=True)
class _Waiting:
    """A request whose prompt is still to be tokenized; see `ChunkSource`."""

    tokenizing: Tokenizing
    prompt: Prompt[GenerationRequest]

    def cancel(self) -> None:
        """Cancel the request."""
        self.tokenizing.cancel(self.prompt)

    def cancel_samples(self, indexes: Collection[int]) -> None:
        """Nothing: the next source is told of them."""


class Intake:
    """Takes requests in, from any thread.

    Args:
        is_forwarded: whether Triton forwards a header of this name as a parameter.
        tenant_header: see `schema.parse`.
        request_log: is told of refused requests.
        begin_trace: returns the trace of a request with this `traceparent` and arrival; None if it
            is not traced.
        log: takes one line, from any thread.

    Raises:
        CheckpointError: the checkpoint's sampling defaults cannot be read.
    """

    def __init__(
        self,
        service: EngineService,
        sessions: Sessions,
        tokenizer: Tokenizer,
        tokenizing: Tokenizing,
        sealer: Sealer,
        *,
        is_forwarded: Callable[[str], bool],
        tenant_header: str | None = None,
        request_log: RequestLog,
        begin_trace: BeginTrace = lambda traceparent, arrived_at: None,
        log: Callable[[str], None],
    ) -> None:
        self._service = service
        self._sessions = sessions
        self._tokenizer = tokenizer
        self._tokenizing = tokenizing
        self._sealer = sealer
        self._is_forwarded = is_forwarded
        self._tenant_header = tenant_header
        self._prober = Prober(service, tokenizer)
        self._cancellations = Cancellations()
        self._request_log = request_log
        self._begin_trace = begin_trace
        self._log = log
        args = service.engine_args
        self._defaults = args, self._read_defaults(args)

    def take(
        self, read: Callable[[], RawRequest], responder: Responder, relayed_key: str | None = None
    ) -> None:
        """Take a request; an error becomes its answer.

        Args:
            read: returns the request. relayed_key: see `schema.parse`.
        """
        with failing_with_errors(responder, self._log) as log_fields:
            with self._counting():
                raw = read()
            log_fields.update(self._names_of(raw))
            with self._counting(log_fields):
                call = parse(
                    raw,
                    relayed_key,
                    limits=self._limits(),
                    sealer=self._sealer,
                    defaults=self._sampling_defaults(),
                    is_forwarded=self._is_forwarded,
                    tenant_header=self._tenant_header,
                )
            match call:
                case GenerateCall():
                    log_fields.update(call.log_fields)
                    trace = self._begin_trace(raw.traceparent, time.monotonic())
                    with ending_with_errors(trace):
                        self._generate(call, responder, trace)
                case CancelCall():
                    self._cancel_named(call)
                    # The same answer if there was none, so that ids cannot be guessed.
                    responder.send(NOTHING, is_final=True)
                case ProbeCall(wants_text):
                    answer = {"text_output": [self._prober.answer()]} if wants_text else {}
                    responder.send(answer, is_final=True)

    def _names_of(self, raw: RawRequest) -> LogFields:
        """The names of a request that is not understood yet; a header counts where one is to."""
        if self._tenant_header is None:
            return raw.log_fields
        tenant = None
        with contextlib.suppress(CharoniaError):
            tenant = tenant_of_header(raw.parameters, self._tenant_header) or None
        return {**raw.log_fields, "tenant": tenant}

    def _cancel_named(self, call: CancelCall) -> None:
        """Cancel all requests of an id and tenant, or their samples, here and on their way."""
        self._cancellations.note(call.request_id, call.tenant, call.samples)
        for session in self._sessions.find(call.request_id, call.tenant):
            if call.samples is None:
                self._sessions.cancel(session)
            else:
                self._sessions.cancel_samples(session, call.samples)

    def _limits(self) -> PromptLimits:
        """Limits of prompts; the widest ones while there is no engine."""
        try:
            limits = self._service.limits
        except UnavailableError:
            return PromptLimits()
        return PromptLimits.of(limits.max_model_len - 1, self._tokenizer.max_bytes_per_token)

    def _sampling_defaults(self) -> SamplingDefaults:
        """The sampling defaults of the present model."""
        args, (before, defaults) = self._service.engine_args, self._defaults
        if args != before:  # another engine was loaded
            try:
                defaults = self._read_defaults(args)
            except (
                CheckpointError
            ) as error:  # `charonia reload` checks this; Triton's own loads don't
                self._log(f"warning: defaults of sampling parameters stay as they were: {error}")
            self._defaults = args, defaults
        return defaults

    def _read_defaults(self, args: EngineArgs) -> SamplingDefaults:
        """Raises CheckpointError."""
        defaults = SamplingDefaults.of_engine(args)
        for line in defaults.describe():
            self._log(line)
        return defaults

    @contextlib.contextmanager
    def _counting(
        self, log_fields: LogFields | None = None, params: SamplingParams | None = None
    ) -> Iterator[None]:
        """Count and log refusals before the service, which does it with its own.

        Args:
            log_fields, params: of the request, if they are known.
        """
        try:
            yield
        except CharoniaError as error:
            self._service.count_rejection(error, params)
            self._request_log.note_refused(error, log_fields or {})
            raise

    def _generate(
        self, call: GenerateCall, responder: Responder, trace: RequestTrace | None
    ) -> None:
        arrived_at = time.monotonic() if call.arrived_at is None else call.arrived_at
        tenant = call.params.tenant
        if trace is not None:
            note_call(trace, call, self._service.engine_args.model)
        with self._counting(call.log_fields, call.params):
            self._service.check_tenant(call.params, self._tokenizing.num_of(tenant))
            self._check_drafts(call)
            self._check_length(1 if call.prompt_ids is None else call.prompt_ids.size)
            request = self._tokenize(call, trace) if _is_short(call) else None
            session = self._sessions.open(
                call.key,
                call.options,
                partial(self._echo, call),
                responder,
                request_id=call.request_id,
                tenant=tenant,
                num_bytes=call.num_bytes,
                num_samples=call.params.n,
                trace=trace,
                trace_id=call.trace_id,
            )
        self._cancel_as_noted(session, call, arrived_at)
        try:
            if request is not None:
                self._submit(request, arrived_at, session)
            else:
                with self._counting(call.log_fields, call.params):
                    self._tokenize_later(call, arrived_at, session, trace)
        except BaseException:
            self._sessions.drop(session)
            raise

    def _cancel_as_noted(self, session: Session, call: GenerateCall, arrived_at: float) -> None:
        """Cancel a request, or samples, that its client cancelled before it arrived here."""
        name = call.request_id, call.params.tenant
        if self._cancellations.cover(*name, arrived_at):
            self._sessions.cancel(session)
        elif samples := self._cancellations.samples(*name, arrived_at, call.params.n):
            self._sessions.cancel_samples(session, samples)

    def _tokenize(self, call: GenerateCall, trace: RequestTrace | None) -> GenerationRequest:
        """The request for the service, with token ids instead of texts."""
        began_at = time.monotonic()
        if call.prompt_ids is not None:
            ids: list[int] = call.prompt_ids.tolist()
        else:
            assert call.text is not None
            ids = self._tokenizer.encode(call.text, check_length=self._check_length)
        bad_words_ids = self._tokenizer.encode_bad_words(call.params.bad_words)
        if trace is not None:
            trace.note_tokenized(began_at, time.monotonic(), len(ids))
        return GenerationRequest(
            key=call.key,
            request_id=call.request_id,
            prompt_ids=ids,
            params=call.params,
            bad_words_ids=bad_words_ids,
            draft_ids=[] if call.draft_ids is None else call.draft_ids.tolist(),
            return_cumulative_logprob=call.wants_cumulative_logprob,
            timeout_s=call.timeout_s,
            trace=trace,
            trace_id=call.trace_id,
        )

    def _check_drafts(self, call: GenerateCall) -> None:
        args = self._service.engine_args
        if call.draft_ids is not None and args.speculative_config is None:
            raise NotSupportedError(
                f"{DRAFT_IDS} is verified by speculative decoding, which this engine does without:"
                " leave it out, or give the engine a speculative_config"
            )

    def _check_length(self, num_ids: int) -> None:
        self._service.limits.check_prompt(num_ids)

    def _echo(self, call: GenerateCall) -> str:
        """The text that is prepended to the answer; made when the answer is sent."""
        text = call.text if call.prompt_text is None else call.prompt_text
        if text is not None:
            return text
        assert call.prompt_ids is not None
        skips_special = call.params.skip_special_tokens
        return self._tokenizer.decode(call.prompt_ids.tolist(), skip_special_tokens=skips_special)

    def _tokenize_later(
        self, call: GenerateCall, arrived_at: float, session: Session, trace: RequestTrace | None
    ) -> None:
        """Have the texts tokenized in another thread, then submit the request."""
        limit = call.time_limit

        def go_on(outcome: GenerationRequest | CharoniaError) -> None:
            try:
                if isinstance(outcome, CharoniaError):
                    self._count_end(outcome, call)
                    raise outcome
                self._submit(outcome, arrived_at, session)
            except CharoniaError as error:
                self._sessions.take(session, Chunk(call.key, error=error))
            except Exception:
                self._log(exception_event("request_failed", **call.log_fields))
                end = Chunk(call.key, error=CharoniaError(INTERNAL_ERROR))
                self._sessions.take(session, end)

        prompt = Prompt(
            tenant=call.params.tenant,
            encode=partial(self._tokenize, call, trace),
            num_bytes=call.num_bytes,
            expires_at=None if limit is None else arrived_at + limit.seconds,
            is_until_start=limit is None or limit.is_until_start,
            done=go_on,
            log_fields=call.log_fields,
        )
        self._sessions.attach(session, _Waiting(self._tokenizing, prompt))
        self._tokenizing.submit(prompt)

    def _count_end(self, error: CharoniaError, call: GenerateCall) -> None:
        """Count and log a request that ended while it was tokenized."""
        self._request_log.note_ended(error, call.log_fields)
        if isinstance(error, RequestCancelledError):
            self._service.count_cancellation()
        else:
            self._service.count_rejection(error, call.params)

    def _submit(self, request: GenerationRequest, arrived_at: float, session: Session) -> None:
        sink = partial(self._sessions.take, session)
        self._sessions.attach(session, self._service.submit(request, sink, arrived_at))


def _is_short(call: GenerateCall) -> bool:
    """Return whether its texts are short enough to be tokenized at once."""
    texts = (call.text or "", *call.params.bad_words)
    return sum(map(len, texts)) <= INLINE_CHARACTERS
