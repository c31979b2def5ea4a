"""Answers that are kept: bounded by bytes and time, the least recently used one goes first.

Owns the answers and their compact form. Must not know requests, nor the time of day: it is an
argument.

An answer lies here as MessagePack, so that its bytes are those that it takes, but for
`ENTRY_BYTES`.
"""

from collections import OrderedDict, deque
from typing import Literal, NamedTuple

import msgspec

from charonia.core.output.outputs import Chunk
from charonia.protocol import FinishReason, TokenLogprobs

PIECE_TOKENS = 32
"""Of one sample, that a stream gets in one piece."""
ENTRY_BYTES = 800
"""That an answer takes beside its content: its key, and its place in what is ordered here."""

Eviction = Literal["bytes", "age"]


class Piece(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Some of one sample's output; see `Chunk`."""

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
        content: its pieces, encoded. num_bytes: that it takes, with all that belongs to it.
        has_scores: whether log-probabilities were counted.
        expires_at: seconds. number: how many came before it.
    """

    content: bytes
    num_bytes: int
    has_scores: bool
    expires_at: float
    number: int

    def pieces(self) -> list[Piece]:
        """What it consists of, in order."""
        return _decoder.decode(self.content)


_COMPLETE = ("stop", "length")
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Piece])


class Pieces:
    """The chunks of one request as they come, joined.

    Those of one sample are joined up to `PIECE_TOKENS` tokens, and take the place of the last; so
    they need little more memory than their texts and tokens.
    """

    def __init__(self) -> None:
        self._whole: list[Chunk] = []
        self._parts: dict[int, list[Chunk]] = {}  # of each sample's next piece
        self._num_parts: dict[int, int] = {}  # tokens of these

    def add(self, chunk: Chunk) -> None:
        """Take the next chunk."""
        index, num_tokens = chunk.index, len(chunk.token_ids)
        parts = self._parts.setdefault(index, [])
        parts.append(chunk)
        self._num_parts[index] = self._num_parts.get(index, 0) + num_tokens
        if chunk.ends_sample or self._num_parts[index] >= PIECE_TOKENS:
            self._whole.append(Chunk.merge(parts))
            del self._parts[index], self._num_parts[index]

    def so_far(self) -> list[Chunk]:
        """What came so far, one chunk for each sample of which there is something."""
        found: dict[int, list[Chunk]] = {}
        for chunk in (*self._whole, *(one for parts in self._parts.values() for one in parts)):
            found.setdefault(chunk.index, []).append(chunk)
        return [Chunk.merge(own) for _, own in sorted(found.items())]

    def is_complete(self, num_samples: int) -> bool:
        """Whether so many samples have ended by themselves."""
        return sum(chunk.finish_reason in _COMPLETE for chunk in self._whole) == num_samples

    def encoded(self) -> bytes:
        """An answer that is complete."""
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
        max_bytes: that all may take. ttl_s: for how long each is kept.
    """

    def __init__(self, max_bytes: int, ttl_s: float) -> None:
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._answers: OrderedDict[bytes, Answer] = OrderedDict()  # the last used one is last
        self._by_age: deque[tuple[int, bytes]] = deque()  # numbers and keys; some have gone
        self._next_number = 0
        self.num_bytes = 0

    def __len__(self) -> int:
        """How many there are."""
        return len(self._answers)

    def get(self, key: bytes, now: float, *, needs_scores: bool) -> Answer | None:
        """An answer, which is then the last used one.

        Args:
            needs_scores: whether log-probabilities must have been counted.
        """
        answer = self._answers.get(key)
        if answer is None or answer.expires_at <= now or (needs_scores and not answer.has_scores):
            return None
        self._answers.move_to_end(key)
        return answer

    def put(
        self, key: bytes, content: bytes, now: float, *, has_scores: bool, num_more_bytes: int = 0
    ) -> list[bytes] | None:
        """Keep an answer instead of what there is with this key.

        Args:
            num_more_bytes: that it takes elsewhere.

        Returns:
            The keys of those that gave way to it; None where it is larger than all may be, and not
            kept.
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
        """Give up what has been kept for long enough; its keys."""
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
