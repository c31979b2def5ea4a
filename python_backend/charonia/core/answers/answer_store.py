"""The cached answers: an LRU cache that is bounded by bytes and age.

Owns the answers and their compact form. Must not know requests; the time is an argument.

An answer is stored as MessagePack, so its size is known: the bytes of that and `ENTRY_BYTES`.
"""

from collections import OrderedDict, deque
from typing import Literal, NamedTuple

import msgspec

from charonia.core.output.outputs import Chunk
from charonia.protocol import FinishReason, TokenLogprobs

PIECE_TOKENS = 32
"""Tokens of one sample in one piece of a streamed answer."""
ENTRY_BYTES = 800
"""Memory of an answer beside its content: its key and its entries in the indexes."""

Eviction = Literal["bytes", "age"]


class Piece(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A part of one sample's output; see `Chunk`."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    cumulative_logprob: float | None
    prompt_logprobs: list[TokenLogprobs | None] | None
    finish_reason: FinishReason | None


class Answer(NamedTuple):
    """A whole answer.

    Attributes:
        content: its pieces, encoded. num_bytes: its memory, with all that belongs to it.
        has_scores: whether it has log-probabilities.
        expires_at: in seconds. number: how many answers were stored before it.
    """

    content: bytes
    num_bytes: int
    has_scores: bool
    expires_at: float
    number: int

    def pieces(self) -> list[Piece]:
        """Decode its pieces, in order."""
        return _decoder.decode(self.content)


_COMPLETE = ("stop", "length")
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Piece])


class Pieces:
    """Gathers the chunks of one request into pieces.

    Chunks of one sample are joined up to `PIECE_TOKENS` tokens, so they need little more memory
    than their texts and tokens.
    """

    def __init__(self) -> None:
        self._whole: list[Chunk] = []
        self._parts: dict[int, list[Chunk]] = {}  # of each sample's unfinished piece
        self._num_parts: dict[int, int] = {}  # tokens of these

    def add(self, chunk: Chunk) -> None:
        """Add the next chunk."""
        index, num_tokens = chunk.index, len(chunk.token_ids)
        parts = self._parts.setdefault(index, [])
        parts.append(chunk)
        self._num_parts[index] = self._num_parts.get(index, 0) + num_tokens
        if chunk.ends_sample or self._num_parts[index] >= PIECE_TOKENS:
            self._whole.append(Chunk.merge(parts))
            del self._parts[index], self._num_parts[index]

    def so_far(self) -> list[Chunk]:
        """The output so far: one chunk for each sample that has any."""
        found: dict[int, list[Chunk]] = {}
        for chunk in (*self._whole, *(one for parts in self._parts.values() for one in parts)):
            found.setdefault(chunk.index, []).append(chunk)
        return [Chunk.merge(own) for _, own in sorted(found.items())]

    def is_complete(self, num_samples: int) -> bool:
        """Return whether this many samples have ended by a stop or by their length."""
        return sum(chunk.finish_reason in _COMPLETE for chunk in self._whole) == num_samples

    def encoded(self) -> bytes:
        """The content of an `Answer`, once this is complete."""
        return _encoder.encode([_piece(chunk) for chunk in self._whole])


def _piece(chunk: Chunk) -> Piece:
    return Piece(
        chunk.index,
        chunk.text,
        list(chunk.token_ids),
        None if chunk.logprobs is None else list(chunk.logprobs),
        chunk.cumulative_logprob,
        chunk.prompt_logprobs,
        chunk.finish_reason,
    )


class AnswerStore:
    """The answers, by key.

    Args:
        max_bytes: memory of all answers. ttl_s: how long each is kept, in seconds.
    """

    def __init__(self, max_bytes: int, ttl_s: float) -> None:
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._answers: OrderedDict[bytes, Answer] = OrderedDict()  # most recently used last
        self._by_age: deque[tuple[int, bytes]] = deque()  # numbers and keys
        self._next_number = 0
        self.num_bytes = 0

    def __len__(self) -> int:
        """Number of answers."""
        return len(self._answers)

    def get(self, key: bytes, now: float, *, needs_scores: bool) -> Answer | None:
        """Find an answer and mark it as used.

        Args:
            needs_scores: whether it must have log-probabilities.
        """
        answer = self._answers.get(key)
        if answer is None or answer.expires_at <= now or (needs_scores and not answer.has_scores):
            return None
        self._answers.move_to_end(key)
        return answer

    def put(
        self, key: bytes, content: bytes, now: float, *, has_scores: bool, num_more_bytes: int = 0
    ) -> list[bytes] | None:
        """Store an answer; it replaces the one with this key.

        Args:
            num_more_bytes: memory that it takes elsewhere.

        Returns:
            Keys of the evicted answers; None if this one exceeds `max_bytes` and is not stored.
        """
        num_bytes = len(content) + ENTRY_BYTES + num_more_bytes
        answer = Answer(content, num_bytes, has_scores, now + self._ttl_s, self._next_number)
        if answer.num_bytes > self._max_bytes:
            return None
        self._next_number += 1
        if (before := self._answers.pop(key, None)) is not None:
            self.num_bytes -= before.num_bytes
        self._answers[key] = answer
        self._by_age.append((answer.number, key))
        self.num_bytes += answer.num_bytes
        evicted = []
        while self.num_bytes > self._max_bytes:
            evicted.append(next(iter(self._answers)))
            self._evict(evicted[-1])
        if len(self._by_age) > 2 * len(self._answers) + 64:
            live = {answer.number for answer in self._answers.values()}
            self._by_age = deque(one for one in self._by_age if one[0] in live)
        return evicted

    def expire(self, now: float) -> list[bytes]:
        """Evict the expired answers; return their keys."""
        evicted = []
        while self._by_age:
            number, key = self._by_age[0]
            answer = self._answers.get(key)
            if answer is not None and answer.number == number:
                if answer.expires_at > now:
                    break
                self._evict(key)
                evicted.append(key)
            self._by_age.popleft()
        return evicted

    def _evict(self, key: bytes) -> None:
        self.num_bytes -= self._answers.pop(key).num_bytes
