"""The figures of the model cards are what they say."""

import pytest
from tokenizers import Tokenizer

from charonia.demo import measure
from charonia.demo.measure import (
    PROMPT_TOKENS,
    agreement,
    common_prefix,
    held_out_edits,
    measure_edits,
    spaced_prompts,
)
from charonia.demo.shapes import DRAFT, TARGET
from charonia.demo.train import CHECKPOINTS
from support.long import long

FOLDERS = [CHECKPOINTS / shape.name for shape in (TARGET, DRAFT)]
TOKENIZER = Tokenizer.from_file(str(FOLDERS[0] / "tokenizer.json"))
FUNCTIONS = "".join(f"def name_{i}(value):\n    return value * {i}\n\n\n" for i in range(99))
TEXTS = [
    f"import common, names, {module}\n{FUNCTIONS}"
    for module in ("os", "sys", "time", "json", "random")
]


def test_the_common_prefix_ends_at_the_first_difference_or_with_the_shorter_one() -> None:
    assert common_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert common_prefix([1, 2], [1, 2, 4]) == 2
    assert common_prefix([], [1]) == 0


def test_prompts_are_spread_over_the_documents_without_overlap() -> None:
    documents = [list(range(30_000)), list(range(30_000, 31_000)), [1, 2, 3]]
    prompts = spaced_prompts(documents)
    starts = [prompt[0] for prompt in prompts]
    assert all(len(prompt) == PROMPT_TOKENS for prompt in prompts)
    assert starts == sorted(set(starts))
    assert starts[0] == 0
    assert starts[-1] > 29_000


def test_held_out_pieces_are_undisguised_and_as_long_as_the_card_says() -> None:
    for edit in held_out_edits(TOKENIZER, TEXTS, seed=0):
        assert any(edit.source in text for text in TEXTS)
        assert 150 <= len(TOKENIZER.encode(edit.source).ids) <= 450


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_model_agrees_with_itself_and_less_with_another(temperature: float) -> None:
    prompts = [TOKENIZER.encode(text).ids for text in ("import os\n", "def main():\n")]
    settings = {"max_tokens": 24, "temperature": temperature}
    assert agreement(FOLDERS[1], FOLDERS[1], prompts, **settings) > 0.9  # bfloat16 and float32
    assert agreement(FOLDERS[0], FOLDERS[1], prompts, **settings) < 1


@long  # as many edits as the card is made of
def test_an_edit_counts_up_to_its_first_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    edits = held_out_edits(TOKENIZER, TEXTS, seed=0)
    right = [[*TOKENIZER.encode(measure.edited(edit)).ids, 0] for edit in edits]
    written = [right[0], [*right[1][:100], 1, *right[1][101:]], *([] for _ in right[2:])]
    monkeypatch.setattr(measure, "generate", lambda *args, **kwargs: written)
    figures = measure_edits(FOLDERS[0], TOKENIZER, TEXTS)
    assert figures["exact"] == figures["without_mistake_in_200"] == 1
    assert figures["right_tokens"] == len(right[0]) + 100
    assert figures["tokens"] == sum(map(len, right))
