"""Prompts for the models to continue, new each time.

Owns how prompts are drawn. Must not know sides or cases.
"""

import random
from collections.abc import Callable
from pathlib import Path

from charonia.demo.corpus import load_corpus, standard_library
from charonia.demo.edits import edit_prompt, make_edits
from charonia.text.tokenizer import Tokenizer

Workload = Callable[[int], list[list[int]]]
"""A function that makes so many new prompts, as token ids."""
RANDOM_VOCAB = 4096
# A piece to edit: its tokens, and about the same in characters.
PIECE_TOKENS = range(240, 321)
PIECE_CHARS = (700, 1100)


def random_prompts(num_tokens: int, seed: int) -> Workload:
    """Random token ids, for models with random weights."""
    shuffler = random.Random(seed)

    def draw(count: int) -> list[list[int]]:
        return [
            [shuffler.randrange(1, RANDOM_VOCAB) for _ in range(num_tokens)] for _ in range(count)
        ]

    return draw


class HeldOutFiles:
    """The standard library's files that the demo models were not trained on.

    Args:
        model: directory of the checkpoint that has the tokenizer.
    """

    def __init__(self, model: Path) -> None:
        self._texts = load_corpus(standard_library()).held_out
        self._tokenizer = Tokenizer.from_dir(model)

    def stretches(self, num_tokens: int, seed: int) -> Workload:
        """Tokens from anywhere in a file, to be gone on with; a longer file is taken more often."""
        documents = [self._tokenizer.encode(text) for text in self._texts]
        starts = [max(0, len(document) - num_tokens) for document in documents]
        shuffler = random.Random(seed)

        def draw(count: int) -> list[list[int]]:
            prompts = []
            for document in shuffler.choices(documents, starts, k=count):
                start = shuffler.randrange(len(document) - num_tokens)
                prompts.append(document[start : start + num_tokens])
            return prompts

        return draw

    def edits(self, seed: int) -> Workload:
        """Requests to write a piece of a file again with one identifier renamed.

        The right answer has at least PIECE_TOKENS.start tokens or a few less.
        """
        edits = make_edits(
            self._texts,
            min_chars=PIECE_CHARS[0],
            max_chars=PIECE_CHARS[1],
            max_disguises=0,
            seed=seed,
        )
        prompts = (
            self._tokenizer.encode(edit_prompt(edit))
            for edit in edits
            if len(self._tokenizer.encode(edit.source)) in PIECE_TOKENS
        )

        def draw(count: int) -> list[list[int]]:
            return [next(prompts) for _ in range(count)]

        return draw
