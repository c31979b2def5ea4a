"""Ranks and sums against a full stable sort: ties, ends of the vocabulary, odd sizes."""

import pytest
import torch
from torch import Tensor

from charonia.data.sampling.ranking import (
    best_token,
    block_max,
    mass,
    smallest_beginning,
    token_rank,
    top_tokens,
    weight_sum,
)

SIZES = [1, 2, 63, 64, 65, 1000, 4096, 5001]


def logits_of(kind: str, size: int) -> Tensor:
    """[12, size] float32 of one kind."""
    generator = torch.Generator().manual_seed(size)
    values = torch.randn(12, size, generator=generator) * 4
    match kind:
        case "few values":
            return values.round().clamp_(-2, 2)
        case "all equal":
            return torch.full_like(values, -1.5)
        case "half banned":
            return values.masked_fill(
                torch.rand(values.shape, generator=generator) < 0.5, -torch.inf
            )
        case "signed zeros":
            return torch.where(values > 0, 0.0, -0.0)
    return values


KINDS = ["normal", "few values", "all equal", "half banned", "signed zeros"]
each_kind = pytest.mark.parametrize("kind", KINDS)
each_size = pytest.mark.parametrize("size", SIZES)


def in_order(logits: Tensor) -> Tensor:
    """Ids by falling logit, among equals by rising id."""
    return logits.sort(dim=-1, descending=True, stable=True).indices


@each_kind
@each_size
def test_the_top_tokens_are_the_beginning_of_a_stable_sort(kind: str, size: int) -> None:
    logits = logits_of(kind, size)
    expected = in_order(logits)
    for count in sorted({1, 2, 20, 31, 32, 64, 256, size // 2, size}):
        if 1 <= count <= size:
            values, ids = top_tokens(logits, count)
            if kind == "half banned":  # among -inf no order is promised
                assert torch.equal(values, logits.gather(1, expected[:, :count]))
                finite = values.isfinite()
                assert torch.equal(ids[finite], expected[:, :count][finite])
                assert (ids < size).all()
            else:
                assert torch.equal(ids, expected[:, :count])
                assert torch.equal(values, logits.gather(1, ids))


@each_kind
@each_size
def test_the_best_token_and_every_rank_are_those_of_a_stable_sort(kind: str, size: int) -> None:
    logits = logits_of(kind, size)
    expected = in_order(logits)
    value, ids = best_token(logits)
    assert torch.equal(value, logits.amax(-1))
    has_any = value.isfinite()
    assert torch.equal(ids[has_any], expected[has_any, 0])
    for place in {0, size // 3, size - 1}:
        assert (token_rank(logits, expected[:, place]) == place + 1).all()


@each_size
def test_the_maxima_of_blocks_cover_the_end_of_the_vocabulary(size: int) -> None:
    logits = logits_of("normal", size)
    expected = [part.amax(-1) for part in logits.split(64, dim=1)]
    assert torch.equal(block_max(logits), torch.stack(expected, 1))


@each_kind
@each_size
def test_the_smallest_beginning_is_the_first_to_reach_its_target(kind: str, size: int) -> None:
    logits = logits_of(kind, size)
    logits[:, -1] = 0.0  # a line of nothing but -inf has no mass
    order = in_order(logits)
    weights = mass(logits, torch.full((12,), 3.0, dtype=torch.float64))
    for share in (1e-9, 0.3, 0.777, 0.95):
        target = weight_sum(weights) * share
        kept = smallest_beginning(logits, weights, target)
        sums = weights.gather(1, order).double().cumsum(-1)
        num_kept = kept.sum(-1)
        # Sums near the target may fall on either side of it, so the count is bracketed.
        assert (num_kept > (sums < (target * (1 - 1e-6)).unsqueeze(1)).sum(-1)).all()
        assert (num_kept <= (sums < (target * (1 + 1e-6)).unsqueeze(1)).sum(-1) + 1).all()
        places = torch.arange(size).expand(12, -1)
        assert torch.equal(kept.gather(1, order), places < num_kept.unsqueeze(1))


@each_size
def test_the_smallest_beginning_of_counts_is_exact(size: int) -> None:
    logits = logits_of("few values", size)
    ones = torch.ones_like(logits)
    for count in {1, 2, size // 2, size - 1, size} & set(range(1, size + 1)):
        kept = smallest_beginning(logits, ones, torch.full((12,), float(count)).double())
        expected = torch.zeros_like(kept).scatter_(1, in_order(logits)[:, :count], True)
        assert torch.equal(kept, expected)


@each_size
def test_a_target_out_of_reach_keeps_every_token(size: int) -> None:
    logits = logits_of("normal", size)
    ones = torch.ones_like(logits)
    assert smallest_beginning(logits, ones, torch.full((12,), size + 1.0).double()).all()


@each_size
def test_masses_add_up_to_what_float64_gives(size: int) -> None:
    logits = logits_of("normal", size)
    temperature = torch.linspace(0.2, 3, 12, dtype=torch.float64)
    scaled = (logits.double() - logits.double().amax(-1, keepdim=True)) / temperature.unsqueeze(1)
    torch.testing.assert_close(
        weight_sum(mass(logits, temperature)), scaled.exp().sum(-1), rtol=1e-6, atol=0
    )


def test_a_sum_does_not_depend_on_the_lines_beside_it() -> None:
    logits = logits_of("normal", 5001)
    one = torch.ones(12, dtype=torch.float64)
    together = weight_sum(mass(logits, one))
    for line in range(12):
        alone = weight_sum(mass(logits[line : line + 1].clone(), one[:1]))
        assert alone.item() == together[line].item()
