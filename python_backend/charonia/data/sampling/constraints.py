"""The effects of a request's parameters on the target's logits, before a token is drawn.

Owns the edits of single logits (bias, bans, penalties) and the truncation of a ranked list (min-p,
top-k, top-p). Must not know the noise, or any state besides the arguments.

The order is vLLM's: logit bias, minimum tokens and bad words, then repetition, frequency and
presence penalty. All of these also apply to greedy rows, and so do allowed tokens, which come last:
no edit brings back a token that they exclude. Then temperature, min-p, top-k and top-p, each
applied to the result of the previous one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from charonia.protocol import RowSampling

DOUBT = 2e-5
"""Relative error; that of a mass summed in float32 is less."""
_MASS_UNIT = 2.0**40


@dataclass(frozen=True, slots=True)
class SampledRow:
    """The parameters and history for one line of logits.

    Attributes:
        sampling: the request's parameters.
        token_ids: [tokens] integer, all tokens before the one to draw (prompt and generated), on
            any device; its length is the position of the new token.
        num_prompt: number of prompt tokens among them.
    """

    sampling: RowSampling
    token_ids: Tensor
    num_prompt: int

    @property
    def without_logprobs(self) -> "SampledRow":
        """The same without log-probabilities."""
        if self.sampling.num_logprobs < 0:
            return self
        sampling = msgspec.structs.replace(self.sampling, num_logprobs=-1)
        return SampledRow(sampling, self.token_ids, self.num_prompt)


@dataclass(frozen=True, slots=True)
class Truncation:
    """Parameters for truncating ranked tokens, one entry per line.

    Attributes:
        temperature: [n] float64, > 0.
        min_p: [n] float64; 0 is off.
        top_k: [n] int64, >= 1; vocab_size is off.
        top_p: [n] float64; 1 is off.
    """

    temperature: Tensor
    min_p: Tensor
    top_k: Tensor
    top_p: Tensor


def edit_logits(logits: Tensor, rows: Sequence[SampledRow]) -> Tensor:
    """Apply bias, bans and penalties.

    Args:
        logits: [n, vocab] float32, not modified.
        rows: one per line; every token id in them is within the vocabulary.

    Returns:
        `logits` itself if no row needs an edit, else an edited copy; banned tokens have -inf.
    """
    lines, ids, added = _additions(rows)
    worded = [line for line, row in enumerate(rows) if _has_long_bad_word(row.sampling)]
    penalized = [line for line, row in enumerate(rows) if _has_penalty(row.sampling)]
    if not (lines or worded or penalized):
        return logits
    edited = logits.clone()
    if lines:
        _add(edited, lines, ids, logits.new_tensor(added))
    if worded:
        _ban_words(edited, rows, worded)
    if penalized:
        _penalize(edited, rows, penalized)
    return edited


def keep_allowed(logits: Tensor, rows: Sequence[SampledRow]) -> Tensor:
    """Exclude all tokens that a row does not allow.

    Args:
        logits: [n, vocab] float32, edited, not modified.
        rows: one per line.

    Returns:
        `logits` itself if every row allows all tokens, else a copy where excluded ones have -inf.
    """
    places = [line for line, row in enumerate(rows) for _ in row.sampling.allowed_ids]
    if not places:
        return logits
    ids = [token_id for row in rows for token_id in row.sampling.allowed_ids]
    has_list = [bool(row.sampling.allowed_ids) for row in rows]
    is_excluded = torch.tensor(has_list, device=logits.device).unsqueeze(1)
    is_excluded = is_excluded.repeat(1, logits.shape[1])  # [n, vocab]
    index = torch.tensor([places, ids], device=logits.device)
    is_excluded[index[0], index[1]] = False
    return logits.masked_fill(is_excluded, -torch.inf)


def _additions(rows: Sequence[SampledRow]) -> tuple[list[int], list[int], list[float]]:
    """Bias, and -inf for bans that do not depend on history: lines, token ids, values."""
    lines: list[int] = []
    ids: list[int] = []
    added: list[float] = []
    for line, row in enumerate(rows):
        sampling = row.sampling
        if sampling.logit_bias:
            ids.extend(sampling.logit_bias.keys())
            added.extend(sampling.logit_bias.values())
        if len(row.token_ids) - row.num_prompt < sampling.min_tokens:
            ids.extend(sampling.stop_ids)
        if sampling.bad_words_ids:
            ids.extend(word[-1] for word in sampling.bad_words_ids if len(word) == 1)
        added.extend([-torch.inf] * (len(ids) - len(added)))
        lines.extend([line] * (len(ids) - len(lines)))
    return lines, ids, added


def _add(logits: Tensor, lines: list[int], ids: list[int], values: Tensor) -> None:
    """Add in place. -inf may occur several times for a token, which has no further effect."""
    index = torch.tensor([lines, ids], device=logits.device)
    logits.index_put_((index[0], index[1]), values, accumulate=True)


def _has_long_bad_word(sampling: RowSampling) -> bool:
    return any(len(word) > 1 for word in sampling.bad_words_ids)


def _ban_words(logits: Tensor, rows: Sequence[SampledRow], lines: list[int]) -> None:
    """Ban the last token of every sequence whose other tokens are the end of the output.

    As in vLLM only generated tokens count: a sequence that began in the prompt is not banned.
    """
    words = [
        (place, word)
        for place, line in enumerate(lines)
        for word in rows[line].sampling.bad_words_ids
        if len(word) > 1
    ]
    longest = max(len(word) for _, word in words) - 1
    # Right-aligned and padded with -1, which equals no token in `tails` and matches any in `heads`.
    tails = torch.full((len(lines), longest), -1, device=logits.device)  # [lines, longest]
    for place, line in enumerate(lines):
        tail = rows[line].token_ids[rows[line].num_prompt :][-longest:]
        tails[place, longest - len(tail) :] = tail
    heads = torch.tensor(
        [[-1] * (longest - len(word) + 1) + word[:-1] for _, word in words], device=logits.device
    )  # [words, longest]
    places = torch.tensor([place for place, _ in words], device=logits.device)
    is_finished = ((heads == tails[places]) | (heads == -1)).all(-1)
    values = torch.zeros(len(words), device=logits.device).masked_fill_(is_finished, -torch.inf)
    _add(logits, [lines[place] for place, _ in words], [word[-1] for _, word in words], values)


def _has_penalty(sampling: RowSampling) -> bool:
    return (
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
    )


def _penalize(logits: Tensor, rows: Sequence[SampledRow], lines: list[int]) -> None:
    """Apply penalties to the tokens seen so far, in time proportional to the rows' lengths.

    Repetition (Keskar et al. 2019, arXiv 1909.05858, section 4.1, with the usual rule for negative
    logits) counts prompt and output. Frequency and presence count only the output.
    """
    vocab, device = logits.shape[1], logits.device
    chosen = [rows[line] for line in lines]
    lengths = [len(row.token_ids) for row in chosen]
    # [seen], all rows concatenated
    seen = torch.cat([row.token_ids for row in chosen]).to(device, torch.int64)
    values = [
        (s.repetition_penalty, s.frequency_penalty, s.presence_penalty)
        for s in (row.sampling for row in chosen)
    ]
    starts = [sum(lengths[:i]) + row.num_prompt for i, row in enumerate(chosen)]
    layout = torch.tensor([lines, lengths, starts], device=device)
    place = torch.arange(len(lines), device=device)
    place = place.repeat_interleave(layout[1], output_size=len(seen))  # [seen] row of each token
    repetition, frequency, presence = logits.new_tensor(values)[place].unbind(-1)
    is_output = torch.arange(len(seen), device=device) >= layout[2][place]
    counts = torch.zeros(len(lines) * vocab, dtype=torch.int32, device=device)
    times = counts.index_add_(0, place * vocab + seen, is_output.int())[place * vocab + seen]
    index = (layout[0][place], seen)
    old = logits[index]
    new = torch.where(old > 0, old / repetition, old * repetition)
    new -= frequency * times
    new -= presence * (times > 0)
    logits[index] = new  # a token seen twice is written twice, with the same value


def count_kept(
    relative: Tensor, cut: Truncation, vocab_size: int, total: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Count the most likely tokens that may be drawn.

    Min-p, top-k and top-p each keep a prefix of the ranked list, so one count is enough. Top-p
    keeps the shortest prefix with at least `top_p` of the mass that min-p and top-k left. Masses
    are summed as integers, in units of 2**-40 of the best token's mass. So a sum does not depend on
    the order of addition, the list's length or a token's place in a batch.

    Args:
        relative: [n, width] float64, (logit - highest logit) / temperature of the most likely
            `width` tokens, best first.
        cut: the parameters of the n lines.
        total: [n] float64 mass of the whole vocabulary in units of the best token's, accurate to
            DOUBT; None if top-k ends every line within the list.

    Returns:
        The number of tokens that certainly may be drawn, and that possibly may, [n] int64 each, 1
        .. width. They differ only if top-p depends on the error of `total`. Third, whether the
        counts are final, [n] bool; if not, the answer lies beyond the list.
    """
    width = relative.shape[1]
    eligible = (relative >= cut.min_p.log().unsqueeze(1)).sum(-1)
    count = torch.minimum(eligible, cut.top_k).clamp_(1, width)
    is_known = (eligible < width) | (cut.top_k <= width)
    masses = (relative.exp() * _MASS_UNIT).round_().long().cumsum(-1)
    whole = masses.gather(1, count.unsqueeze(1) - 1).squeeze(1).double()
    least = most = whole * cut.top_p
    if total is not None:
        least = torch.where(is_known, least, total * _MASS_UNIT * cut.top_p * (1 - DOUBT))
        most = torch.where(is_known, most, total * _MASS_UNIT * cut.top_p * (1 + DOUBT))
    nucleus = (masses < most.unsqueeze(1)).sum(-1) + 1
    has_top_p = cut.top_p < 1
    possible = torch.where(has_top_p, torch.minimum(count, nucleus), count)
    certain = possible
    if total is not None:
        certain = torch.minimum(possible, (masses < least.unsqueeze(1)).sum(-1) + 1)
        certain = torch.where(has_top_p, certain, possible)
    is_top_p_alone = has_top_p & (cut.min_p == 0) & (cut.top_k >= vocab_size)
    return certain, possible, is_known | (is_top_p_alone & (nucleus <= width))
