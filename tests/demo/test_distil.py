"""What the draft learns from: the target's texts, and its distributions."""

import pytest
import torch

from charonia.demo.distil import (
    PREFIX_TOKENS,
    distillation_loss,
    make_prefixes,
    rehearsal_loss,
    sample_texts,
)
from charonia.demo.loop import cross_entropy, model_logits
from charonia.demo.shapes import DRAFT, Shape, build_model
from charonia.demo.train import CHECKPOINTS

TINY = Shape("tiny", hidden_size=32, intermediate_size=64, num_layers=1)
BATCH = torch.arange(18).view(2, 9)


def test_prefixes_are_stretches_of_the_documents() -> None:
    documents = [list(range(start, start + 600)) for start in (0, 1000)]
    prefixes = make_prefixes(documents, 30, seed=0)
    shortest, longest = PREFIX_TOKENS
    for prefix in prefixes:
        assert shortest <= len(prefix) <= longest
        assert prefix == list(range(prefix[0], prefix[0] + len(prefix)))
    assert {prefix[0] >= 1000 for prefix in prefixes} == {True, False}
    assert prefixes == make_prefixes(documents, 30, seed=0)


def test_a_short_document_is_a_prefix_as_a_whole() -> None:
    assert make_prefixes([[1, 2, 3]], 1, seed=0) == [[1, 2, 3]]


def test_a_sampled_text_is_its_prefix_and_what_the_model_adds() -> None:
    prefixes = [list(range(start, start + 8)) for start in (10, 30, 50, 70)]
    texts = sample_texts(CHECKPOINTS / DRAFT.name, prefixes, max_tokens=4, seed=0)
    assert [text[:8] for text in texts] == prefixes
    assert all(9 <= len(text) <= 12 for text in texts)
    assert texts == sample_texts(CHECKPOINTS / DRAFT.name, prefixes, max_tokens=4, seed=0)


def test_the_loss_is_nothing_for_the_teacher_itself_and_something_for_another() -> None:
    torch.manual_seed(0)
    teacher, other = build_model(TINY), build_model(TINY)
    loss_of = distillation_loss(teacher)
    assert abs(float(loss_of(teacher, BATCH).detach())) < 1e-4
    assert float(loss_of(other, BATCH).detach()) > 1e-3


def test_what_the_teacher_expects_in_place_of_a_marked_token_is_not_learned() -> None:
    torch.manual_seed(0)
    teacher, other = build_model(TINY), build_model(TINY)
    loss_of = distillation_loss(teacher)
    marked = torch.cat([BATCH[:, :5], ~BATCH[:, 5:]], 1)
    with torch.no_grad():
        assert float(loss_of(other, marked)) == pytest.approx(
            float(loss_of(other, BATCH[:, :5])), abs=1e-3
        )


def test_what_is_rehearsed_is_only_the_files() -> None:
    torch.manual_seed(0)
    teacher, model = build_model(TINY), build_model(TINY)
    read = cross_entropy(model_logits(model, BATCH[:1, :-1]), BATCH[:1])
    edit = cross_entropy(model_logits(model, BATCH[1:, :-1]), BATCH[1:])
    own, foreign = rehearsal_loss(model, 0.5), rehearsal_loss(teacher, 0.5)
    with torch.no_grad():
        assert float(own(model, BATCH)) == pytest.approx(
            float((read / 2 + edit).detach()), abs=1e-3
        )
        assert float(foreign(model, BATCH)) > float(own(model, BATCH))


def test_only_the_student_learns() -> None:
    torch.manual_seed(0)
    teacher, student = build_model(TINY), build_model(TINY)
    torch.autograd.backward(distillation_loss(teacher)(student, BATCH))
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert all(parameter.grad is not None for parameter in student.parameters())
