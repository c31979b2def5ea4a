"""The training loop learns, writes what transformers loads, and reports what it did."""

import math
from pathlib import Path

import pytest
import torch

from charonia.demo.batches import held_out_windows
from charonia.demo.corpus import Corpus
from charonia.demo.shapes import SHAPES, Shape, build_model, load_model, save_model
from charonia.demo.train import (
    Data,
    Recipe,
    evaluate,
    learning_rate_factor,
    next_token_loss,
    run_schedule,
)
from charonia.demo.vocabulary import encode_documents, train_tokenizer

TINY = Shape("tiny", hidden_size=32, intermediate_size=64, num_layers=1)


@pytest.fixture(scope="module")
def data() -> Data:
    texts = [
        f"def add_{index}(first, second):\n    return first + second\n" * 40 for index in range(8)
    ]
    tokenizer = train_tokenizer(texts)
    tokens = encode_documents(tokenizer, texts)
    return Data(tokenizer, Corpus(texts, texts[:4]), tokens, tokens[:4])


def test_the_loss_falls_and_the_reported_one_is_the_models(data: Data) -> None:
    torch.manual_seed(0)
    model = build_model(TINY)
    recipe = Recipe(steps=8, learning_rate=0.3)
    windows = held_out_windows(data.held_out, 1024)[::8]
    before = evaluate(model, windows)
    history = run_schedule(model, recipe, data, next_token_loss, seed=0)
    assert before == pytest.approx(math.log(4096), abs=0.3)
    assert history[-1]["step"] == 8
    assert history[-1]["held_out"] < before - 1
    assert history[-1]["held_out"] == pytest.approx(evaluate(model, windows), abs=1e-4)


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
