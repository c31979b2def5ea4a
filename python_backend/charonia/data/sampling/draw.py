"""Drawing one token per line of logits: the highest sum of logit / temperature and noise.

Owns the three ways of finding that maximum without looking at the whole vocabulary. Must not know
rows or requests: lines are independent, each with a seed, a position and parameters of its own, so
that several positions of one sequence may be lines of one call (speculation).

Every draw is exact (Gumbel-max; Maddison, Tarlow, Minka 2014, "A* sampling", section 2) or says
that it is not: a line that is not settled at one level is drawn again at the next, where it sees
more of the vocabulary. The last level sees all of it. What a line draws depends on nothing else.

Nor does it depend on rounding: where top-p cuts is defined by masses in whole numbers
(constraints.count_kept), and a token that a sum in float32 leaves in doubt is not settled. So what
ops/native/sampling.cpp draws, by another way, is the same.
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
_NUM_BLOCKS = (64, 512)  # of free lines, at the levels before the last; and twice as many tokens
_LISTS = (64, 256)  # tokens in a ranked list
_MIN_TEMPERATURE = 1e-5  # vLLM's: below, a row is greedy
_SLACK = 1e-3  # far above any rounding error of a bound


@dataclass(frozen=True, slots=True)
class Lines:
    """The parameters of some lines, on the logits' device.

    Attributes:
        seeds, positions: [n] int64, what the noise is made of.
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
    """How a line is drawn; lines of one method are drawn together.

    Attributes:
        kind: "greedy"; "free" (nothing or only min-p truncates); "listed" (the tokens that may be
            drawn are expected in a short ranked list); "cut" (they are too many for that).
        size: blocks to look at (free, cut), or tokens in the list.
        has_top_k, has_top_p: what truncates (listed, cut).
        has_min_p: truncates too (cut; the others always look).
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
        lines: their parameters; None will do for the greedy method.

    Returns:
        token ids [n] int64, always within the vocabulary, and whether they are settled [n] bool.
        A line with NaN or +inf, or with nothing but -inf, is never settled.
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
    """Look at the blocks, and then at the tokens, with the highest bounds.

    The bound of a block is its best logit and its largest noise, that of a token its own logit and
    its block's largest noise. Settled once the best token found beats the bounds of the first
    block and of the first token that were left out: none of the rest can win.
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
    """Places of the `count` highest bounds, `others` at these places, and the next bound.

    The next bound [n] has slack for rounding; it is -inf where nothing was left out.
    """
    if count >= bounds.shape[1]:
        places = torch.arange(bounds.shape[1], device=bounds.device).expand_as(bounds)
        return (places, *others), bounds.new_full((len(bounds),), -torch.inf)
    first = bounds.topk(count + 1)
    places = first.indices[:, :count]
    return (places, *(o.gather(1, places) for o in others)), first.values[:, count] + _SLACK


def _draw_listed(logits: Tensor, lines: Lines, method: Method) -> tuple[Tensor, Tensor]:
    """Draw from a ranked list.

    Settled once the last token that may be drawn is in it, and it draws one that certainly may.
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
    """Mask what top-k and top-p leave out, wherever that begins, and draw freely.

    The mask of top-p is wide enough for any rounding of the masses; settled once the token drawn
    would be within a narrow one too.
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
    """[n] bool: neither NaN nor +inf, and not all -inf."""
    return block_max(logits).amax(-1).isfinite()


def _argmax(scores: Tensor, ids: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """The lowest id with the highest score [n], and that score [n]; NaN gives some valid id."""
    best = scores.amax(-1, keepdim=True)
    return ids.masked_fill(scores != best, vocab_size - 1).amin(-1), best.squeeze(1)
