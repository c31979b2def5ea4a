"""One call of a client as requests of the scheduler: one for each prompt.

Owns how the answers to several prompts come together, and what was used. Must not know the form in
which a client wants them.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from charonia.gateway.observing import Record
from charonia.gateway.prompts import Prompt
from charonia.gateway.upstream import Upstream, all_of
from charonia_client import Chunk, Completion, Sampling, Timeouts


@dataclass
class Usage:
    """Tokens of one call, as far as is known.

    Attributes:
        cached_tokens: of the prompts, those that were not computed; None until all have ended.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int | None = None


@dataclass(frozen=True)
class Generation:
    """What is asked for.

    Attributes:
        prompts: at least one. sampling: by the scheduler's names, the same for each prompt.
        hides_output: whether one token is generated that nobody asked for, because a request of
            the scheduler has at least one: who wants the prompt alone gets and pays none.
    """

    request_id: str
    prompts: Sequence[Prompt]
    sampling: Sampling
    timeouts: Timeouts
    hides_output: bool = False

    @property
    def num_choices(self) -> int:
        """For each prompt."""
        return self.sampling.get("n") or 1


class Run:
    """A generation under way.

    Attributes:
        usage: of all that has come so far.
    """

    def __init__(self, generation: Generation, upstream: Upstream, record: Record) -> None:
        self.generation = generation
        self._upstream = upstream
        self._record = record
        self.usage = Usage(sum(len(prompt.ids) for prompt in generation.prompts))
        record.prompt_tokens = self.usage.prompt_tokens

    async def complete(self) -> list[Completion]:
        """The whole answers, one for each prompt.

        Raises:
            CharoniaClientError, ApiError: the first that failed; the others are cancelled.
        """
        generation = self.generation
        completions = await all_of(
            [
                self._upstream.complete(
                    prompt.ids, generation.sampling, self._id(index), generation.timeouts
                )
                for index, prompt in enumerate(generation.prompts)
            ]
        )
        for index, completion in enumerate(completions):
            self._count(completion.num_output_tokens)
            self._count_cached(index, completion.timing)
        return completions

    async def stream(self) -> AsyncGenerator[tuple[int, Chunk], None]:
        """The chunks of all answers as they come, each with the index of its prompt.

        Closing the generator cancels what has not ended.
        """
        prompts = range(len(self.generation.prompts))
        streams = [self._chunks(index) for index in prompts]
        both = streams[0] if len(streams) == 1 else merged(streams)
        async with contextlib.aclosing(both) as chunks:
            async for index, chunk in chunks:
                self._record.first_token()
                self._count(chunk.num_output_tokens)
                if chunk.is_final:
                    self._count_cached(index, chunk.timing)
                yield index, chunk

    async def _chunks(self, index: int) -> AsyncGenerator[tuple[int, Chunk], None]:
        generation = self.generation
        stream = self._upstream.stream(
            generation.prompts[index].ids,
            generation.sampling,
            self._id(index),
            generation.timeouts,
        )
        async with contextlib.aclosing(stream) as chunks:
            async for chunk in chunks:
                yield index, chunk

    def _id(self, index: int) -> str:
        return f"{self.generation.request_id}-{index}"

    def _count(self, num_tokens: int | None) -> None:
        if not self.generation.hides_output:
            self.usage.completion_tokens += num_tokens or 0
            self._record.completion_tokens = self.usage.completion_tokens

    def _count_cached(self, index: int, timing: object) -> None:
        """Count what of a prompt was cached, once, however many samples it has."""
        if not isinstance(timing, dict):
            return
        num_cached = int(timing.get("prompt_cached_tokens", timing.get("cached_tokens")) or 0)
        if timing.get("cached"):  # another one's answer: nothing was computed
            num_cached = len(self.generation.prompts[index].ids)
        self.usage.cached_tokens = (self.usage.cached_tokens or 0) + num_cached


async def merged(
    streams: Sequence[AsyncGenerator[tuple[int, Chunk], None]],
) -> AsyncGenerator[tuple[int, Chunk], None]:
    """Several streams as one, each of which may be one chunk ahead of the reader.

    The first that fails ends the others.
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
        while not task.done():  # it may wait to say that it has ended
            with contextlib.suppress(asyncio.QueueEmpty):
                pieces.get_nowait()
            await asyncio.sleep(0)
        await asyncio.gather(task, return_exceptions=True)
