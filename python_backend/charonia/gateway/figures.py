"""Figures of clients' answers, recent and since the start, for people rather than for plots.

Owns these figures and their windows. Must not know requests. Prometheus has the same and more, see
`observing`.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable

TOKENS_S = 10
"""Seconds over which the rate of tokens is taken."""
TTFT_S = 60.0
"""Seconds over which times to first tokens are taken."""
MAX_TTFTS = 4096


class Figures:
    """Figures of one gateway, in bounded memory. Belongs to one event loop.

    Attributes:
        num_answers: prompts that were answered: a call with several prompts gives several answers.
        num_tokens: of these answers, with all their samples. seconds: the sum of their latencies,
            each from the start of the client's call to the end of the answer.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started_at = clock()
        self.num_answers = 0
        self.num_tokens = 0
        self.seconds = 0.0
        self._tokens: deque[tuple[int, int]] = deque()  # second, tokens that came in it
        self._ttfts: deque[tuple[float, float]] = deque(maxlen=MAX_TTFTS)

    @property
    def uptime_s(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._started_at

    @property
    def latency_s(self) -> float | None:
        """Mean latency of one answer, in seconds; None before the first."""
        return self.seconds / self.num_answers if self.num_answers else None

    @property
    def throughput(self) -> float | None:
        """Tokens per second of one answer: all tokens over all latencies; None before the first."""
        return self.num_tokens / self.seconds if self.seconds else None

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second that came in the last `TOKENS_S` full seconds, or since the start."""
        now = int(self._clock())
        self._drop_before(now - TOKENS_S)
        seconds = min(TOKENS_S, max(1, now - int(self._started_at)))
        return sum(count for second, count in self._tokens if second < now) / seconds

    @property
    def ttft_s(self) -> tuple[float, float] | None:
        """Median and 99th percentile of the last minute's times to first tokens."""
        since = self._clock() - TTFT_S
        times = [seconds for at, seconds in self._ttfts if at >= since]
        if not times:
            return None
        if len(times) == 1:
            return times[0], times[0]
        quantiles = statistics.quantiles(times, n=100, method="inclusive")
        return quantiles[49], quantiles[98]

    def note_tokens(self, count: int) -> None:
        """Note tokens that came just now."""
        second = int(self._clock())
        if self._tokens and self._tokens[-1][0] == second:
            count += self._tokens.pop()[1]
        self._tokens.append((second, count))
        self._drop_before(second - TOKENS_S)

    def note_first_token(self, seconds: float) -> None:
        """Note the time to the first token of a stream."""
        self._ttfts.append((self._clock(), seconds))

    def note_answer(self, num_tokens: int, seconds: float) -> None:
        """Note that a prompt was answered. See the attributes."""
        self.num_answers += 1
        self.num_tokens += num_tokens
        self.seconds += seconds

    def _drop_before(self, second: int) -> None:
        while self._tokens and self._tokens[0][0] < second:
            self._tokens.popleft()
