"""Data of each stage of the training, its length, and its evaluation.

Owns the mixtures of rows and the recipes. Must not know the command, files or figures.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from charonia.demo.batches import held_out_windows, packed_batches, training_batches
from charonia.demo.corpus import Corpus, load_corpus, standard_library
from charonia.demo.distil import distillation_loss, rehearsal_loss
from charonia.demo.edits import Edit, edit_prompt, edited, make_edits
from charonia.demo.loop import Lesson, Phase, Recipe, evaluate, next_token_loss
from charonia.demo.shapes import CONTEXT
from charonia.demo.vocabulary import encode_documents, train_tokenizer

# Characters of a piece to edit, per token of the row that must hold it twice.
EDIT_CHARS_PER_TOKEN = 1.5
MIN_EDIT_CHARS = 60
MAX_DISGUISES = 6


@dataclass(frozen=True)
class EditsRun:
    """A run in which the target learns to edit.

    Attributes:
        edit_share: share of edits among the rows; the others are files.
        rehearses: the files are also learned from the model of stage library.
        averages: the result is the mean of the weights before and after the run, which forgets
            less than either (Wortsman et al. 2022, arXiv 2203.05482).
        seed_offset: added to the command's seed, for other rows than those of the run before.
    """

    recipe: Recipe
    edit_share: float
    rehearses: bool = False
    averages: bool = False
    seed_offset: int = 0


LIBRARY_PHASES = (Phase(length=256, until=0.75), Phase(length=CONTEXT, until=1.0))
LIBRARY_RECIPES = {
    "target": Recipe(steps=2600, learning_rate=4e-3, phases=LIBRARY_PHASES),
    "draft": Recipe(steps=1500, learning_rate=6e-3, phases=LIBRARY_PHASES),
}
# Editing is learned in four runs. Two of them were broken off: the first copied too little, the
# second forgot too much. The other two rehearse what was forgotten.
EDITS_RUNS = (
    EditsRun(
        Recipe(
            steps=1000,
            learning_rate=2e-3,
            phases=(Phase(256, until=0.35), Phase(512, until=0.65), Phase(CONTEXT, until=0.8)),
        ),
        edit_share=0.5,
    ),
    EditsRun(
        Recipe(
            steps=900,
            learning_rate=3e-3,
            phases=(Phase(256, until=0.4), Phase(512, until=4 / 9)),
        ),
        edit_share=0.75,
    ),
    EditsRun(
        Recipe(
            steps=600, learning_rate=1.5e-3, phases=(Phase(512, until=0.5), Phase(CONTEXT, until=1))
        ),
        edit_share=0.5,
        rehearses=True,
    ),
    EditsRun(
        Recipe(
            steps=450, learning_rate=1.5e-3, phases=(Phase(512, until=0.4), Phase(CONTEXT, until=1))
        ),
        edit_share=0.5,
        rehearses=True,
        averages=True,
        seed_offset=1,
    ),
)
# In windows of 1024 tokens torch 2.13 compiles NaN gradients for this loss.
DISTIL_RECIPE = Recipe(steps=1800, learning_rate=4e-3, phases=(Phase(512, until=1.0),))


@dataclass(frozen=True)
class Data:
    """The corpus as tokens."""

    tokenizer: Tokenizer
    corpus: Corpus
    train: list[list[int]]
    held_out: list[list[int]]


def load_data() -> Data:
    """Read the corpus, train the tokenizer and encode both parts."""
    corpus = load_corpus(standard_library())
    tokenizer = train_tokenizer(corpus.train)
    return Data(
        tokenizer=tokenizer,
        corpus=corpus,
        train=encode_documents(tokenizer, corpus.train),
        held_out=encode_documents(tokenizer, corpus.held_out),
    )


def library_lesson(data: Data, *, seed: int) -> Lesson:
    """Whole files, each token once per epoch."""

    def judge(model: LlamaForCausalLM, length: int) -> dict[str, float]:
        # An eighth of the held-out windows is enough to follow the training.
        return {"held_out": evaluate(model, held_out_windows(data.held_out, length)[::8])}

    return Lesson(
        batches=lambda rows, length: training_batches(
            data.train, batch_size=rows, length=length, seed=seed + length
        ),
        loss_of=next_token_loss,
        evaluate=judge,
    )


def edits_lesson(
    data: Data, *, edit_share: float, seed: int, teacher: LlamaForCausalLM | None = None
) -> Lesson:
    """A share of the rows are edits; the others are library text, so that it is not forgotten.

    Args:
        teacher: the model whose knowledge of the library is to be kept.
    """
    library = library_lesson(data, seed=seed)

    def batches(rows: int, length: int) -> Iterator[torch.Tensor]:
        count = round(rows * edit_share)
        edits = edit_rows(data, data.corpus.train, rows=count, length=length, seed=seed)
        yield from beside(library.batches(rows - count, length), edits)

    def judge(model: LlamaForCausalLM, length: int) -> dict[str, float]:
        edits = edit_rows(data, data.corpus.held_out, rows=8, length=length, seed=seed)
        return library.evaluate(model, length) | {"held_out_edits": evaluate(model, next(edits))}

    loss_of = rehearsal_loss(teacher, edit_share) if teacher else next_token_loss
    return Lesson(batches, loss_of, judge)


def distil_lesson(
    data: Data, samples: list[list[int]], teacher: LlamaForCausalLM, *, seed: int
) -> Lesson:
    """Half of the rows are texts that the teacher wrote. Half of the others are edits."""
    edits = edits_lesson(data, edit_share=0.5, seed=seed)
    loss_of = distillation_loss(teacher)

    def batches(rows: int, length: int) -> Iterator[torch.Tensor]:
        own = training_batches(
            samples, batch_size=rows - rows // 2, length=length, seed=seed + length
        )
        yield from beside(edits.batches(rows // 2, length), own)

    def judge(model: LlamaForCausalLM, length: int) -> dict[str, float]:
        rows = edit_rows(data, data.corpus.held_out, rows=8, length=length, seed=seed)
        windows = held_out_windows(data.held_out, length)[::8]
        return {
            "held_out": evaluate(model, windows, loss_of),
            "held_out_edits": evaluate(model, next(rows), loss_of),
        }

    return Lesson(batches, loss_of, judge)


def beside(first: Iterator[torch.Tensor], second: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield batches with the rows of both, until one ends."""
    for pair in zip(first, second, strict=False):
        yield torch.cat(pair)


def edit_rows(
    data: Data, texts: list[str], *, rows: int, length: int, seed: int
) -> Iterator[torch.Tensor]:
    """Yield endless batches of edits with their answers, int64 [rows, length + 1].

    The prompts are marked as not to be learned, so that only the answers have gradients.
    """
    documents = (
        [~token for token in data.tokenizer.encode(edit_prompt(edit)).ids]
        + encode_documents(data.tokenizer, [edited(edit)])[0]
        for edit in edits_for(texts, length=length, seed=seed)
    )
    return packed_batches(documents, batch_size=rows, length=length)


def edits_for(texts: list[str], *, length: int, seed: int) -> Iterator[Edit]:
    """Yield endless edits, most of which fit with their answers into `length` tokens."""
    return make_edits(
        texts,
        min_chars=MIN_EDIT_CHARS,
        max_chars=round(EDIT_CHARS_PER_TOKEN * length),
        max_disguises=MAX_DISGUISES,
        seed=seed + length,
    )


def make_edit_prompts(data: Data, count: int, *, seed: int) -> list[list[int]]:
    """The tokens of prompts that ask for edits of the training files."""
    edits = itertools.islice(edits_for(data.corpus.train, length=CONTEXT, seed=seed), count)
    encodings = data.tokenizer.encode_batch([edit_prompt(edit) for edit in edits])
    return [encoding.ids for encoding in encodings if len(encoding.ids) < CONTEXT]
