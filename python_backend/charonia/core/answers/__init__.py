"""Answers that were given before, and requests that are computed once for several clients.

answer_cache          the requests that may be answered so, above the core that computes the others
shared_computation    one computation, and all who get what comes of it
subscribers           who gets what is computed so: each one's time, end and counts
answer_key            which requests have the same answer
kept_answers          answers that are kept, and their prompts, by which similar ones are found
answer_store          the answers, within bytes and time
"""

from charonia.core.answers.answer_cache import AnswerCache
from charonia.core.answers.similar import PromptIndex, SimilarPrompts

__all__ = ["AnswerCache", "PromptIndex", "SimilarPrompts"]
