"""Drawing one token per line of logits: the highest sum of logit / temperature and noise.

Owns three ways to find that maximum without examining the whole vocabulary. Must not know rows or
requests: lines are independent, each with its own seed, position and parameters. So several
positions of one sequence can be lines of one call (speculation).

Every draw is exact (Gumbel-max; Maddison, Tarlow, Minka 2014, "A* sampling", section 2), or reports
that it is not settled. Such a line is drawn again at the next level, which examines more of the
vocabulary; the last level examines all of it. The result of a line depends on nothing else.

It does not depend on rounding either: the cut of top-p is defined by integer masses
(constraints.count_kept), and a token that a sum in float32 leaves in doubt is not settled. So
ops/native/sampling.cpp draws the same tokens by another method.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor

from charonia.data.sampling.constraints import DOUBT, Truncation, count_kept
from charonia.data.sampling.noise import BLOCK_SIZE, gumbel, largest_gumbel, signed_seed
from charonia.data.sampling.ranking import (
    best_token,
    block_max,
    gather_blocks,
    mass,
    smallest_beginning,
    tokens_before,
    top_tokens,
    weight_sum,
)
from charonia.protocol import RowSampling

NUM_LEVELS = 3
_NUM_BLOCKS = (64, 512)  # of free lines, at all levels but the last; twice as many tokens
_LISTS = (64, 256)  # tokens in a ranked list
_MIN_TEMPERATURE = 1e-5  # vLLM's: below, a row is greedy
_SLACK = 1e-3  # far above the rounding error of a bound


@dataclass(frozen=True, slots=True)
class Lines:
    """The parameters of lines, on the logits' device.

    Attributes:
        seeds, positions: [n] int64, inputs of the noise.
        cut: temperature and truncation.
    """

    seeds: Tensor
    positions: Tensor
    cut: Truncation

    @classmethod
    def of(
        cls,
        samplings: Sequence[RowSampling],
        positions: Sequence[int],
        vocab_size: int,
        device: torch.device,
    ) -> Self:
        """Gather the parameters of n lines."""
        whole = torch.tensor(
            [
                (signed_seed(s.seed), position, min(s.top_k, vocab_size) or vocab_size)
                for s, position in zip(samplings, positions, strict=True)
            ],
            device=device,
        )
        real = torch.tensor(
            [(s.temperature, s.min_p, s.top_p) for s in samplings],
            dtype=torch.float64,
            device=device,
        )
        seeds, positions_, top_k = whole.unbind(1)
        temperature, min_p, top_p = real.unbind(1)
        return cls(seeds, positions_, Truncation(temperature, min_p, top_k, top_p))


@dataclass(frozen=True, slots=True)
class Method:
    """The method for drawing a line. Lines of one method are drawn together.

    Attributes:
        kind: "greedy"; "free" (no truncation, or only min-p); "listed" (the tokens that may be
            drawn are expected in a short ranked list); "cut" (they are too many for a list).
        size: number of blocks to examine (free, cut), or of tokens in the list.
        has_top_k, has_top_p: whether they truncate (listed, cut).
        has_min_p: whether it truncates, too (cut; the other kinds always check).
    """

    kind: Literal["greedy", "free", "listed", "cut"]
    size: int = 0
    has_top_k: bool = False
    has_top_p: bool = False
    has_min_p: bool = False

    @classmethod
    def of(cls, sampling: RowSampling, vocab_size: int, level: int) -> Self:
        """The method for a row at a level, 0 .. NUM_LEVELS - 1."""
        has_top_k = 0 < sampling.top_k < vocab_size
        has_top_p = sampling.top_p < 1
        num_blocks = (*_NUM_BLOCKS, vocab_size)[level]
        if sampling.temperature < _MIN_TEMPERATURE or (has_top_k and sampling.top_k == 1):
            return cls("greedy")
        if not (has_top_k or has_top_p):
            return cls("free", num_blocks)
        if level == NUM_LEVELS - 1:
            return cls("listed", vocab_size, has_top_k, has_top_p)
        needed = sampling.top_k if has_top_k else 1
        lists = [width for width in _LISTS if needed <= width]
        if level > 0 or not lists:
            return cls("cut", num_blocks, has_top_k, has_top_p, sampling.min_p > 0)
        return cls("listed", min(lists[0], vocab_size), has_top_k, has_top_p)


def draw(logits: Tensor, lines: Lines | None, method: Method) -> tuple[Tensor, Tensor]:
    """Draw a token for each line.

    Args:
        logits: [n, vocab] float32, edited (constraints.edit_logits).
        lines: their parameters; may be None for the greedy method.

    Returns:
        Token ids, [n] int64, always within the vocabulary, and whether they are settled, [n] bool.
        A line with NaN or +inf, or with only -inf, is never settled.
    """
    if method.kind == "greedy" or lines is None:
        value, ids = best_token(logits)
        return ids.clamp_(max=logits.shape[1] - 1), value.isfinite()
    if method.kind == "free":
        return _draw_free(logits, lines, method.size)
    if method.kind == "listed":
        return _draw_listed(logits, lines, method)
    return _draw_cut(logits, lines, method)


def _draw_free(logits: Tensor, lines: Lines, num_blocks: int) -> tuple[Tensor, Tensor]:
    """Draw by examining the blocks, and then the tokens, with the highest bounds.

    The bound of a block is the sum of its best logit and its largest noise. That of a token is the
    sum of its own logit and its block's largest noise. A line is settled if the best token found
    beats the bounds of the first block and the first token left out: no other can win.
    """
    min_p, temperature = lines.cut.min_p.unsqueeze(1), lines.cut.temperature.unsqueeze(1)
    highest = block_max(logits)  # [n, blocks]
    top = highest.amax(-1, keepdim=True)
    scale = temperature.reciprocal().float()
    blocks = torch.arange(highest.shape[1], device=logits.device)
    noise = largest_gumbel(lines.seeds, lines.positions, blocks)
    (kept,), next_block = _highest((highest - top) * scale + noise, num_blocks)
    values, ids = gather_blocks(logits, kept)
    bounds = (values - top) * scale + noise.gather(1, kept).repeat_interleave(BLOCK_SIZE, dim=1)
    (kept, values, ids), next_token = _highest(bounds, num_blocks * 2, values, ids)
    relative = (values.double() - top) / temperature
    scores = relative + gumbel(lines.seeds, lines.positions, ids)
    scores.masked_fill_(relative < min_p.log(), -torch.inf)
    token_ids, best = _argmax(scores, ids, logits.shape[1])
    is_settled = top.isfinite().squeeze(1) & (torch.maximum(next_block, next_token) < best)
    return token_ids, is_settled


def _highest(bounds: Tensor, count: int, *others: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """Indices of the `count` highest bounds, `others` at these indices, and the next bound.

    The next bound, [n], has slack for rounding; it is -inf if none was left out.
    """
    if count >= bounds.shape[1]:
        places = torch.arange(bounds.shape[1], device=bounds.device).expand_as(bounds)
        return (places, *others), bounds.new_full((len(bounds),), -torch.inf)
    first = bounds.topk(count + 1)
    places = first.indices[:, :count]
    return (places, *(o.gather(1, places) for o in others)), first.values[:, count] + _SLACK


def _draw_listed(logits: Tensor, lines: Lines, method: Method) -> tuple[Tensor, Tensor]:
    """Draw from a ranked list.

    A line is settled if the list includes the last token that may be drawn, and the token drawn
    certainly may be.
    """
    temperature = lines.cut.temperature
    values, ids = top_tokens(logits, method.size)
    relative = (values.double() - values[:, :1]) / temperature.unsqueeze(1)
    total = None if method.has_top_k else weight_sum(mass(logits, temperature))
    certain, possible, is_settled = count_kept(relative, lines.cut, logits.shape[1], total)
    scores = relative + gumbel(lines.seeds, lines.positions, ids)
    places = torch.arange(method.size, device=logits.device)
    scores.masked_fill_(places >= possible.unsqueeze(1), -torch.inf)
    token_ids, _ = _argmax(scores, ids, logits.shape[1])
    if total is not None:
        place = (ids == token_ids.unsqueeze(1)).byte().argmax(-1)
        is_settled = is_settled & (place < certain)
    return token_ids, is_settled & _is_sound(logits)


def _draw_cut(logits: Tensor, lines: Lines, method: Method) -> tuple[Tensor, Tensor]:
    """Mask the tokens that top-k and top-p exclude, however many remain, and draw freely.

    The mask of top-p is wide enough for any rounding of the masses. A line is settled if the token
    drawn would pass a narrow mask, too.
    """
    temperature = lines.cut.temperature
    kept = torch.ones_like(logits, dtype=torch.bool)
    if method.has_min_p:
        top = block_max(logits).amax(-1, keepdim=True)
        relative = (logits.double() - top) / temperature.unsqueeze(1)
        kept = relative >= lines.cut.min_p.log().unsqueeze(1)
    if method.has_top_k:
        target = torch.minimum(lines.cut.top_k, kept.sum(-1)).double()
        kept = smallest_beginning(logits, kept.float(), target)
    masses = mass(logits, temperature).mul_(kept) if method.has_top_p else None
    if masses is not None:
        target = weight_sum(masses) * lines.cut.top_p
        kept &= smallest_beginning(logits, masses, target * (1 + DOUBT))
    token_ids, is_settled = _draw_free(logits.masked_fill(~kept, -torch.inf), lines, method.size)
    is_settled = is_settled & _is_sound(logits)
    if masses is not None:
        before = weight_sum(masses.mul_(tokens_before(logits, token_ids)))
        is_settled &= (before < target * (1 - DOUBT)) | (before == 0)
    return token_ids, is_settled


def _is_sound(logits: Tensor) -> Tensor:
    """Return whether lines have neither NaN nor +inf, and not only -inf: [n] bool."""
    return block_max(logits).amax(-1).isfinite()


def _argmax(scores: Tensor, ids: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """The lowest id with the highest score, [n], and that score, [n]; NaN gives some valid id."""
    best = scores.amax(-1, keepdim=True)
    return ids.masked_fill(scores != best, vocab_size - 1).amin(-1), best.squeeze(1)
