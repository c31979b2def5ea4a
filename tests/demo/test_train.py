"""The training loop learns, writes what transformers loads, and reports what it did."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from charonia.demo.batches import held_out_windows
from charonia.demo.corpus import Corpus
from charonia.demo.edits import HEADER
from charonia.demo.lessons import (
    LIBRARY_RECIPES,
    Data,
    EditsRun,
    distil_lesson,
    edits_lesson,
    library_lesson,
    make_edit_prompts,
)
from charonia.demo.loop import (
    Phase,
    Recipe,
    evaluate,
    learning_rate_factor,
    next_token_loss,
    run_schedule,
)
from charonia.demo.shapes import SHAPES, Shape, build_model, load_model, save_model
from charonia.demo.train import Workshop, train_edits, train_library
from charonia.demo.vocabulary import encode_documents, train_tokenizer

TINY = Shape("tiny", hidden_size=32, intermediate_size=64, num_layers=1)


@pytest.fixture(scope="module")
def data() -> Data:
    texts = [
        f"def add_{index}(first, second):\n    return first + second\n" * 40 for index in range(8)
    ]
    tokenizer = train_tokenizer(texts)
    tokens = encode_documents(tokenizer, texts)
    return Data(tokenizer, Corpus(texts, texts[:5]), tokens, tokens[:5])


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


def test_the_loss_falls_and_the_reported_one_is_the_models(data: Data) -> None:
    torch.manual_seed(0)
    model = build_model(TINY)
    recipe = Recipe(steps=8, learning_rate=0.3, phases=(Phase(1024, until=1.0),))
    windows = held_out_windows(data.held_out, 1024)[::8]
    before = evaluate(model, windows)
    history = run_schedule(model, recipe, library_lesson(data, seed=0))
    assert before == pytest.approx(math.log(4096), abs=0.3)
    assert history[-1]["step"] == 8
    assert history[-1]["held_out"] < before - 1
    assert history[-1]["held_out"] == pytest.approx(evaluate(model, windows), abs=1e-4)


def test_a_marked_token_is_read_but_not_learned() -> None:
    torch.manual_seed(0)
    model = build_model(TINY)
    batch = torch.randint(1, 4096, (2, 9))
    marked = batch.clone()
    marked[:, :5] = ~marked[:, :5]
    with torch.no_grad():
        logits = model(batch[:, :-1]).logits[:, 4:]  # predict batch[:, 5:]
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 5:].flatten())
        assert float(next_token_loss(model, marked)) == pytest.approx(float(expected), abs=0.02)


def test_the_learning_rate_rises_and_then_falls_to_nothing() -> None:
    factors = [learning_rate_factor(step, 1000) for step in range(1001)]
    peak = factors.index(max(factors))
    assert max(factors) == 1.0
    assert factors[: peak + 1] == sorted(factors[: peak + 1])
    assert factors[peak:] == sorted(factors[peak:], reverse=True)
    assert factors[1000] == pytest.approx(0.0)


@pytest.mark.parametrize("kind", SHAPES)
def test_transformers_gives_the_logits_of_the_model_that_was_saved(
    tmp_path: Path, kind: str
) -> None:
    torch.manual_seed(1)
    model, reference = build_model(SHAPES[kind]), build_model(SHAPES[kind])
    weights = model.state_dict()
    reference.load_state_dict({name: weights[name].bfloat16().float() for name in weights})
    save_model(model, tmp_path)
    ids = torch.randint(4096, (2, 40))
    with torch.no_grad():
        torch.testing.assert_close(
            load_model(tmp_path)(ids).logits, reference(ids).logits, atol=1e-5, rtol=0
        )


def test_the_phases_follow_one_another_with_batches_of_the_same_size(data: Data) -> None:
    shapes = []
    lesson = library_lesson(data, seed=0)

    def loss_of(model: Any, batch: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(batch.shape))
        return next_token_loss(model, batch)

    phases = (Phase(512, until=0.5), Phase(1024, until=1.0))
    recipe = Recipe(steps=4, learning_rate=1e-3, phases=phases)
    run_schedule(build_model(TINY), recipe, replace(lesson, loss_of=loss_of))
    assert shapes == [(8, 513), (8, 513), (4, 1025), (4, 1025)]


def test_half_of_what_teaches_editing_is_files_and_half_begins_with_an_edit(data: Data) -> None:
    batch = next(edits_lesson(data, edit_share=0.5, seed=0).batches(8, 512))
    header = [~token for token in data.tokenizer.encode(HEADER).ids]
    begins = [row[: len(header)] == header for row in batch.tolist()]
    assert begins == [False] * 4 + [True] * 4


def test_half_of_what_teaches_the_draft_is_the_targets_and_the_rest_as_for_editing(
    data: Data,
) -> None:
    samples = [[7] * 2000]
    batch = next(distil_lesson(data, samples, build_model(TINY), seed=0).batches(8, 512))
    assert [bool((row == 7).all()) for row in batch] == [False] * 4 + [True] * 4


def test_prompts_for_edits_fit_the_context(data: Data) -> None:
    prompts = make_edit_prompts(data, 20, seed=0)
    assert 10 <= len(prompts) <= 20
    assert max(map(len, prompts)) < 1024


def test_a_stage_adds_its_figures_to_those_before_it(
    data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe(steps=2, learning_rate=1e-3, phases=(Phase(512, until=1.0),))
    run = EditsRun(recipe, edit_share=0.5, rehearses=True)
    monkeypatch.setitem(SHAPES, "target", TINY)
    monkeypatch.setitem(LIBRARY_RECIPES, "target", recipe)
    measured = {"pieces": 1, "shortest": 2, "longest": 3, "tokens": 4, "predicted_tokens": 3}
    measured |= {"exact": 0, "without_mistake_in_200": 1, "right_tokens": 2}
    monkeypatch.setattr("charonia.demo.train.measure_edits", lambda *_: measured)
    workshop = Workshop(data, tmp_path, seed=0)
    train_library(workshop, "target")
    train_edits(workshop, run, build_model(TINY))
    figures = json.loads((tmp_path / "tiny" / "training.json").read_text())
    assert [stage["stage"] for stage in figures["stages"]] == ["library", "edits"]
    assert figures["edits"] == measured
    assert [len(stage["history"]) for stage in figures["stages"]] == [1, 1]
    card = (tmp_path / "tiny" / "README.md").read_text()
    assert "--stage library --model target --seed 0" in card
    assert "--stage edits --seed 0" in card
    assert not (tmp_path / "tiny" / "unfinished.pt").exists()
