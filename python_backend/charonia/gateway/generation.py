"""One client call as requests of the scheduler, one per prompt.

Owns how the answers to several prompts are combined, and their token usage. Must not know the form
in which a client wants them.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from charonia.gateway.errors import invalid
from charonia.gateway.observing import Record
from charonia.gateway.prompts import Prompt
from charonia.gateway.upstream import Upstream, all_of
from charonia_client import Chunk, Completion, Sampling, Timeouts


@dataclass
class Usage:
    """Tokens of one call, as far as they are known.

    Attributes:
        cached_tokens: tokens of the prompts that were not computed; None until all have ended.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int | None = None


@dataclass(frozen=True)
class Generation:
    """Content of a client's call.

    Attributes:
        prompts: at least one. sampling: in the scheduler's names, the same for each prompt.
        hides_output: whether the output is dropped. The scheduler generates at least one token, so
            a client that wants only the prompt neither gets nor pays for that token.

    Raises:
        ApiError: a prompt has no token.
    """

    request_id: str
    prompts: Sequence[Prompt]
    sampling: Sampling
    timeouts: Timeouts
    hides_output: bool = False

    def __post_init__(self) -> None:
        """Check the prompts."""
        if not all(prompt.ids for prompt in self.prompts):
            raise invalid("the prompt must have at least one token, but has none", "prompt")

    @property
    def num_choices(self) -> int:
        """Choices per prompt."""
        return self.sampling.get("n") or 1


class Run:
    """A running generation.

    Attributes:
        usage: of everything received so far.
    """

    def __init__(self, generation: Generation, upstream: Upstream, record: Record) -> None:
        self.generation = generation
        self._upstream = upstream
        self._record = record
        self.usage = Usage(sum(len(prompt.ids) for prompt in generation.prompts))

    async def complete(self) -> list[Completion]:
        """Return the whole answers, one per prompt.

        Raises:
            CharoniaClientError, ApiError: the first failure; the other requests are cancelled.
        """
        ended = await all_of(
            [self._complete(index) for index in range(len(self.generation.prompts))]
        )
        self._record.prompt_tokens += self.usage.prompt_tokens
        for index, (completion, seconds) in enumerate(ended):
            num_tokens = self._count(completion.num_output_tokens)
            self._count_cached(index, completion.timing)
            self._record.note_answer(num_tokens, seconds)
        return [completion for completion, _ in ended]

    async def stream(self) -> AsyncGenerator[tuple[int, Chunk], None]:
        """Yield the chunks of all answers as they come, each with the index of its prompt.

        Closing the generator cancels the requests that have not ended.
        """
        came_at: dict[tuple[int, int], float] = {}  # the last token, by prompt and sample
        prompts = range(len(self.generation.prompts))
        num_tokens = [0 for _ in prompts]
        streams = [self._chunks(index) for index in prompts]
        both = streams[0] if len(streams) == 1 else merged(streams)
        has_begun = False
        async with contextlib.aclosing(both) as chunks:
            async for index, chunk in chunks:
                if not has_begun:
                    self._record.first_token()
                    self._record.prompt_tokens += self.usage.prompt_tokens
                    has_begun = True
                num_tokens[index] += self._count(chunk.num_output_tokens)
                self._time(came_at, (index, chunk.index), chunk.num_output_tokens)
                if chunk.is_final:
                    self._count_cached(index, chunk.timing)
                yield index, chunk
                if chunk.is_final:
                    self._record.note_answer(num_tokens[index], self._record.seconds)

    def _time(
        self, came_at: dict[tuple[int, int], float], place: tuple[int, int], count: int | None
    ) -> None:
        """Note the time between the tokens of a sample."""
        if not count or self.generation.hides_output:
            return
        now = time.monotonic()
        if place in came_at:
            self._record.note_gap(now - came_at[place], count)
        came_at[place] = now

    async def _complete(self, index: int) -> tuple[Completion, float]:
        """Return the answer to a prompt, and how long it took since the request came."""
        generation = self.generation
        completion = await self._upstream.complete(
            generation.prompts[index].ids,
            generation.sampling,
            self._id(index),
            generation.timeouts,
            self._record.trace_headers,
        )
        return completion, self._record.seconds

    async def _chunks(self, index: int) -> AsyncGenerator[tuple[int, Chunk], None]:
        generation = self.generation
        stream = self._upstream.stream(
            generation.prompts[index].ids,
            generation.sampling,
            self._id(index),
            generation.timeouts,
            self._record.trace_headers,
        )
        async with contextlib.aclosing(stream) as chunks:
            async for chunk in chunks:
                yield index, chunk

    def _id(self, index: int) -> str:
        return f"{self.generation.request_id}-{index}"

    def _count(self, num_tokens: int | None) -> int:
        """Count tokens that came, unless they are hidden. Returns how many were counted."""
        if self.generation.hides_output or num_tokens is None:
            return 0
        self.usage.completion_tokens += num_tokens
        self._record.count_tokens(num_tokens)
        return num_tokens

    def _count_cached(self, index: int, timing: object) -> None:
        """Count the cached tokens of a prompt, once for all its samples."""
        if not isinstance(timing, dict):
            return
        num_cached = int(timing.get("prompt_cached_tokens", timing.get("cached_tokens")) or 0)
        if timing.get("cached"):  # another request's answer: nothing was computed
            num_cached = len(self.generation.prompts[index].ids)
        self.usage.cached_tokens = (self.usage.cached_tokens or 0) + num_cached


async def merged(
    streams: Sequence[AsyncGenerator[tuple[int, Chunk], None]],
) -> AsyncGenerator[tuple[int, Chunk], None]:
    """Merge several streams; each may be one chunk ahead of the reader.

    The first failure ends the others.
    """
    pieces: asyncio.Queue[tuple[int, Chunk] | None] = asyncio.Queue(maxsize=1)

    async def follow(stream: AsyncGenerator[tuple[int, Chunk], None]) -> None:
        async with contextlib.aclosing(stream) as chunks:
            async for piece in chunks:
                await pieces.put(piece)

    async def follow_all() -> None:
        try:
            await all_of([follow(stream) for stream in streams])
        finally:
            await pieces.put(None)

    task = asyncio.create_task(follow_all())
    try:
        while (piece := await pieces.get()) is not None:
            yield piece
        await task
    finally:
        task.cancel()
        while not task.done():  # it may still be waiting to report its end
            with contextlib.suppress(asyncio.QueueEmpty):
                pieces.get_nowait()
            await asyncio.sleep(0)
        await asyncio.gather(task, return_exceptions=True)
