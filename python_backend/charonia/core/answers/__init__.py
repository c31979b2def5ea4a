"""The answer cache, and requests that are computed once for several clients.

answer_cache          requests that may get such an answer, above the core that computes the others
shared_computation    one computation and its subscribers
subscribers           the live subscribers: timeouts, ends and counts
answer_key            which requests have the same answer
kept_answers          cached answers, and their prompts' vectors
answer_store          the answers, bounded by bytes and age
"""

from charonia.core.answers.answer_cache import AnswerCache, Computed
from charonia.core.answers.similar import PromptIndex, SimilarPrompts

__all__ = ["AnswerCache", "Computed", "PromptIndex", "SimilarPrompts"]
