"""The Python API: generates in this process, without Triton, with the same engine core.

Owns the interface that users of offline inference know. No other module imports it.
"""

import itertools
import numbers
import operator
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from tqdm import tqdm

from charonia.config import EngineArgs, SchedulerArgs, make_paths_absolute
from charonia.core.engine_core import EngineCore
from charonia.core.generation_request import GenerationRequest
from charonia.core.inline import InlineExecutor
from charonia.core.output.outputs import (
    Chunk,
    Logprob,
    OutputStream,
    Timing,
    merge_samples,
    name_logprobs,
)
from charonia.core.request_events import RequestEvents
from charonia.core.request_registry import LiveRequest
from charonia.errors import CharoniaError, ConfigError, InvalidRequestError, shown
from charonia.metrics.metrics import Metrics
from charonia.parallel.engine import load_engine
from charonia.protocol import FinishReason, SamplingParams, TokenLogprobs
from charonia.sampling_defaults import SamplingDefaults
from charonia.text.draft import check_draft_tokenizer
from charonia.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Logprobs = list[dict[int, Logprob]]


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence."""

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    logprobs: Logprobs | None = None
    cumulative_logprob: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """The result of one prompt. `prompt` is None if token ids were given."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    timing: Timing | None = None


class _Arrivals(RequestEvents):
    """Chunks of requests that have not been taken.

    Attributes:
        chunks: in order.
    """

    def __init__(self) -> None:
        self.chunks: deque[Chunk] = deque()

    def on_chunk(self, chunk: Chunk) -> None:
        """See `RequestEvents`."""
        self.chunks.append(chunk)


class LLM:
    """A model loaded into this process, for one thread at a time.

    Args:
        model: directory of a checkpoint in Hugging Face format.
        verbose: print what is loaded.
        engine_args: those of `engine/1/model.json`, see `charonia.config.EngineArgs`.
            `async_scheduling` is off by default, because this process cannot compute while it plans
            a step.

    Raises:
        ConfigError: an argument is unknown or ill-typed, or the draft model has another tokenizer.
        CheckpointError: the checkpoint cannot be loaded.
    """

    def __init__(self, model: str, *, verbose: bool = False, **engine_args: Any) -> None:
        log = print if verbose else _ignore
        paths = {"kv_cache_path": engine_args.get("kv_cache_path")}
        make_paths_absolute(paths, Path.cwd())
        args = EngineArgs.from_dict(
            {"model": str(model), "async_scheduling": False, **engine_args, **paths}, log
        )
        if args.kv_events is not None:
            raise ConfigError("kv_events_config is for servers: no router sends requests here")
        self._tokenizer = Tokenizer.from_dir(args.tokenizer_dir)
        self._defaults = SamplingDefaults.of_engine(args)
        for line in self._defaults.describe():
            log(line)
        if args.speculative_config and args.speculative_config.model:
            check_draft_tokenizer(self._tokenizer, Path(args.speculative_config.model))
        self._keys = itertools.count()
        self._core = EngineCore(
            InlineExecutor(partial(load_engine, args, log=log)),
            args,
            SchedulerArgs(max_queue_size=2**31),
            partial(OutputStream, tokenizer=self._tokenizer),
            clock=time.monotonic,
            log=log,
        )
        self._core.step()
        if not self._core.is_up:
            raise ConfigError(str(self._core.down_reason))

    @property
    def metrics(self) -> Metrics:
        """Metrics of this engine since it was created."""
        return self._core.metrics

    def get_default_sampling_params(self) -> SamplingParams:
        """The sampling parameters that are used if none are given: those of the checkpoint."""
        return self._defaults.fill({})

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete all prompts together.

        Args:
            prompts: a text, a list of token ids, or a list of either.
            sampling_params: for all prompts, or one for each. The checkpoint's defaults are not
                applied to them. None is `get_default_sampling_params()`.
            use_tqdm: show a progress bar.

        Returns:
            One output per prompt, in order.

        Raises:
            InvalidRequestError: one of them cannot be served; raised before anything runs.
            CharoniaError: a request failed; the others are cancelled.
        """
        many = _as_list(prompts)
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        params = _as_params(sampling_params, len(many))
        requests = [self._request(p, s) for p, s in zip(many, params, strict=True)]
        self._check(requests)
        chunks: dict[str, list[Chunk]] = {request.key: [] for request in requests}
        arrivals = _Arrivals()
        live: list[LiveRequest] = []
        num_live = len(requests)
        progress = tqdm(total=len(requests), unit="prompt", disable=not use_tqdm)
        try:
            live.extend(self._core.add(request, arrivals) for request in requests)
            while num_live:
                chunk = self._next(arrivals)
                chunks[chunk.key].append(chunk)
                if chunk.is_final:
                    num_live -= 1
                    progress.update()
        finally:
            progress.close()
            for one in live:
                self._core.cancel(one)
        return [
            self._output(prompt, request, chunks[request.key])
            for prompt, request in zip(many, requests, strict=True)
        ]

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[Chunk]:
        """Complete one prompt, chunk by chunk; closing the iterator cancels it.

        Raises:
            InvalidRequestError: the request cannot be served.
            CharoniaError: the request failed later.
        """
        request = self._request(prompt, sampling_params or self.get_default_sampling_params())
        self._check([request])
        return self._stream(request)

    def close(self) -> None:
        """Release the model."""
        self._core.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # ------------------------------------------------------------------ parts

    def _request(self, prompt: Prompt, params: SamplingParams) -> GenerationRequest:
        ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else _token_ids(prompt)
        return GenerationRequest(
            key=str(next(self._keys)),
            prompt_ids=ids,
            params=params,
            bad_words_ids=self._tokenizer.encode_bad_words(params.bad_words),
            return_cumulative_logprob=params.logprobs is not None,
        )

    def _check(self, requests: Sequence[GenerationRequest]) -> None:
        """Refuse requests that cannot be served; first replace the engine if it was lost."""
        if not self._core.is_up:
            self._core.step()
        for request in requests:
            self._core.check(request)

    def _stream(self, request: GenerationRequest) -> Iterator[Chunk]:
        arrivals = _Arrivals()
        live = self._core.add(request, arrivals)
        try:
            while True:
                chunk = self._next(arrivals)
                yield chunk
                if chunk.is_final:
                    return
        finally:
            self._core.cancel(live)

    def _next(self, arrivals: _Arrivals) -> Chunk:
        """Run steps until there is a chunk; raise its error if it has one."""
        while not arrivals.chunks:
            try:
                self._core.step()
            except BaseException as error:  # also KeyboardInterrupt: the step is only half done
                name = type(error).__name__
                self._core.abandon(CharoniaError(f"the step was interrupted by {name}"))
                self._core.step()
                raise
        chunk = arrivals.chunks.popleft()
        if chunk.error is not None:
            raise chunk.error
        return chunk

    def _output(
        self, prompt: Prompt, request: GenerationRequest, chunks: Sequence[Chunk]
    ) -> RequestOutput:
        """Make the result of a prompt from all its chunks."""
        whole = merge_samples(chunks, request.params.n)
        prompt_logprobs = whole[0].prompt_logprobs
        return RequestOutput(
            request_id=request.key,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=request.prompt_ids,
            outputs=[
                CompletionOutput(
                    index=one.index,
                    text=one.text,
                    token_ids=list(one.token_ids),
                    finish_reason=one.finish_reason,
                    logprobs=self._named(one.logprobs),
                    cumulative_logprob=one.cumulative_logprob,
                )
                for one in whole
            ],
            prompt_logprobs=None
            if prompt_logprobs is None
            else [
                None if entry is None else name_logprobs(entry, self._tokenizer)
                for entry in prompt_logprobs
            ],
            timing=chunks[-1].timing,
        )

    def _named(self, entries: tuple[TokenLogprobs, ...] | None) -> Logprobs | None:
        if entries is None:
            return None
        return [name_logprobs(entry, self._tokenizer) for entry in entries]


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | bytes | Mapping):
        return [prompts]
    if len(prompts) and isinstance(prompts[0], numbers.Integral):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _token_ids(prompt: Sequence[int]) -> list[int]:
    """The ids as Python's integers; numpy's and torch's are taken, too."""
    try:
        if isinstance(prompt, bytes | Mapping):
            raise TypeError
        return list(map(operator.index, prompt))
    except TypeError:
        raise InvalidRequestError(
            f"a prompt must be a text or a list of token ids, but is {shown(prompt)}"
        ) from None


def _as_params(
    params: SamplingParams | Sequence[SamplingParams], count: int
) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise InvalidRequestError(f"{len(params)} sampling_params for {count} prompts")
    return list(params)


def _ignore(line: str) -> None:
    """Take a log line and do nothing with it."""
