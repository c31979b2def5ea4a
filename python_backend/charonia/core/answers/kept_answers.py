"""The cached answers, and their prompts' vectors, by which similar prompts are found.

Keeps both together: what is stored in one and evicted from it is so in the other. Owns the metrics
of that. Must not know who gets an answer.
"""

from collections.abc import Callable, Iterable

from charonia.config import SchedulerArgs
from charonia.core.answers.answer_key import scope_of_key
from charonia.core.answers.answer_store import Answer, AnswerStore, Eviction
from charonia.core.answers.shared_computation import SharedComputation
from charonia.core.answers.similar import Match, SimilarPrompts
from charonia.core.generation_request import GenerationRequest
from charonia.metrics.metrics import Metrics


class KeptAnswers:
    """The answers, by key, and the vectors of their prompts, where there are any.

    Args:
        similar: finds prompts of similar meaning; None if only equal prompts count.
    """

    def __init__(
        self, args: SchedulerArgs, metrics: Metrics, similar: SimilarPrompts | None
    ) -> None:
        self._store = AnswerStore(args.answer_cache_bytes or 0, args.answer_cache_ttl_s)
        self._metrics = metrics
        self._similar = similar

    def get(self, key: bytes, request: GenerationRequest, now: float) -> Answer | None:
        """The answer with a key, if it has the log-probabilities that a request needs."""
        return self._store.get(key, now, needs_scores=request.counts_logprobs)

    def ask_for_similar(
        self, shared: SharedComputation, done: Callable[[Match | None], None]
    ) -> bool:
        """Begin to look for a prompt that is similar to a computation's.

        Args:
            done: called with the nearest one, in the core's thread; with None if the search failed.

        Returns:
            Whether a search has begun.
        """
        request, scope = shared.request, scope_of_key(shared.answer_key)
        if self._similar is None or request.params.prompt_logprobs is not None:
            return False  # another prompt's log-probabilities differ
        return self._similar.ask(scope, request.prompt_ids, done)

    def keep(self, shared: SharedComputation, now: float) -> None:
        """Store the complete answer of a computation that has ended."""
        key, similar, has_scores = shared.answer_key, self._similar, shared.request.counts_logprobs
        if not has_scores and self._store.get(key, now, needs_scores=True) is not None:
            return  # the stored one has log-probabilities, this one has none
        has_vector = similar is not None and shared.vector is not None
        evicted = self._store.put(
            key,
            shared.pieces.encoded(),
            now,
            has_scores=has_scores,
            num_more_bytes=similar.bytes_per_prompt if similar and has_vector else 0,
        )
        if evicted is None:
            return  # it is too large
        self._note_evicted(evicted, "bytes")
        if similar is not None:
            if has_vector:
                similar.keep(scope_of_key(key), key, shared.vector)
            else:  # there may be a vector of the answer that this one replaces
                similar.forget(key)

    def expire(self, now: float) -> None:
        """Evict the expired answers."""
        self._note_evicted(self._store.expire(now), "age")

    def show_metrics(self) -> None:
        """Update the gauges of the cache."""
        gauges = self._metrics.gauges
        gauges["charonia_answer_cache_answers", ""] = len(self._store)
        gauges["charonia_answer_cache_bytes", ""] = self._store.num_bytes

    def _note_evicted(self, keys: Iterable[bytes], why: Eviction) -> None:
        for key in keys:
            self._metrics.count("charonia_answer_cache_evicted_total", label=why)
            if self._similar is not None:
                self._similar.forget(key)
