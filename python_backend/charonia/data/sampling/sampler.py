"""Sampling of tokens from logits, called once per step by the target model.

Owns the order of work (edit, draw, log-probabilities, one transfer to the host), and batches of
rows with different parameters. Must not know the model, the KV cache or the scheduler.

A row's token is a function of its logits, its parameters and its tokens so far. It does not depend
on the other rows, and noise enters only as (seed, position, token id), see noise.py.

Logits that are not finite: tokens with NaN and -inf are never drawn, and +inf counts as the largest
float32. If a row has no other tokens (or all are banned), all its tokens are equally likely, or all
that it allows. Other rows are not affected.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from charonia.data.sampling.constraints import SampledRow, edit_logits, keep_allowed
from charonia.data.sampling.draw import NUM_LEVELS, Lines, Method, draw
from charonia.data.sampling.native_draw import NativeDraw
from charonia.data.sampling.ranking import block_max, mass, token_rank, top_tokens, weight_sum
from charonia.protocol import TokenLogprobs

__all__ = ["Sampled", "SampledRow", "Sampler"]

_PROMPT_CHUNK = 128  # lines of prompt log-probabilities at a time, to limit temporary memory


@dataclass(frozen=True, slots=True)
class Sampled:
    """A drawn token, and its log-probabilities if the row wants them."""

    token_id: int
    logprobs: TokenLogprobs | None


class Sampler:
    """Draws the next token of each row.

    Args:
        vocab_size: columns of the logits.
        device: of the logits.
        native: draws the same tokens in place of torch; only on a CPU.
    """

    def __init__(
        self, vocab_size: int, device: torch.device | str, native: NativeDraw | None = None
    ) -> None:
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._native = native

    def sample(self, logits: Tensor, rows: Sequence[SampledRow]) -> list[Sampled]:
        """Draw one token per row; synchronizes with the device once, rarely twice or three times.

        Args:
            logits: [n, vocab] of any floating type, one line per row; not modified.
            rows: n rows; the position of the new token is the number of tokens so far.

        Returns:
            n results in the rows' order. Log-probabilities are raw: of the logits as given.
        """
        assert logits.shape == (len(rows), self._vocab_size), f"logits of shape {logits.shape}"
        if self._native is not None:
            return self._sample_natively(self._native, logits.float(), rows)
        results: list[Sampled | None] = [None] * len(rows)
        open_lines = list(range(len(rows)))
        for level in range(NUM_LEVELS):
            if not open_lines:
                break
            chosen = logits if level == 0 else logits[open_lines]
            is_last = level == NUM_LEVELS - 1
            drawn, settled = self._attempt(chosen, [rows[i] for i in open_lines], level)
            for line, result, is_settled in zip(open_lines, drawn, settled, strict=True):
                results[line] = result if is_settled or is_last else None
            open_lines = [line for line in open_lines if results[line] is None]
        return [result for result in results if result is not None]

    def draw(self, logits: Tensor, rows: Sequence[SampledRow]) -> list[int]:
        """The token ids of `sample`, for drafts, without log-probabilities."""
        if self._native is not None:
            return self._native.draw(logits.float(), rows)
        return [one.token_id for one in self.sample(logits, [row.without_logprobs for row in rows])]

    def prompt_logprobs(self, logits: Tensor, targets: Tensor, k: int) -> list[TokenLogprobs]:
        """Raw log-probabilities of known tokens.

        Args:
            logits: [n, vocab] of any floating type.
            targets: [n] integer, on any device, the token after each position.
            k: also report the k most likely tokens, >= 0.
        """
        parts = []
        for start in range(0, len(targets), _PROMPT_CHUNK):
            raw = _repair(logits[start : start + _PROMPT_CHUNK].float())
            known = targets[start : start + _PROMPT_CHUNK].to(raw.device, torch.int64)
            parts.append(_logprobs(raw, known, k))
        packed = torch.cat(parts).tolist() if parts else []
        return [_unpack(line, k) for line in packed]

    def _sample_natively(
        self, native: NativeDraw, raw: Tensor, rows: Sequence[SampledRow]
    ) -> list[Sampled]:
        token_ids = native.draw(raw, rows)
        results = [Sampled(token_id, None) for token_id in token_ids]
        asked, k = _asked(rows)
        if asked:
            drawn = torch.tensor([token_ids[i] for i in asked])
            packed = _logprobs(_repair(raw[asked]), drawn, k).tolist()
            for i, line in zip(asked, packed, strict=True):
                results[i] = Sampled(token_ids[i], _unpack(line, rows[i].sampling.num_logprobs))
        return results

    def _attempt(
        self, logits: Tensor, rows: list[SampledRow], level: int
    ) -> tuple[list[Sampled], list[bool]]:
        """Attempt to draw some rows; return results, and whether each is final."""
        raw = logits.float()
        # Values that are not finite are only repaired in rows that failed the first attempt.
        raw = _repair(raw) if level else raw
        edited = edit_logits(raw, rows)
        edited = keep_allowed(_repair(edited) if level else edited, rows)
        token_ids, is_settled = self._draw(edited, rows, level)
        packed = [torch.stack((token_ids, is_settled)).double().flatten()]
        asked, k = _asked(rows)
        if asked:
            index = torch.tensor(asked, device=raw.device)
            packed.append(_logprobs(_repair(raw[index]), token_ids[index], k).flatten())
        values = torch.cat(packed).tolist()  # the one transfer to the host
        n, width = len(rows), 2 * (min(k, self._vocab_size) + 1) + 1
        logprobs = {
            i: _unpack(values[start : start + width], rows[i].sampling.num_logprobs)
            for i, start in zip(asked, range(2 * n, len(values), width), strict=True)
        }
        results = [Sampled(int(values[i]), logprobs.get(i)) for i in range(n)]
        return results, [value != 0 for value in values[n : 2 * n]]

    def _draw(self, logits: Tensor, rows: list[SampledRow], level: int) -> tuple[Tensor, Tensor]:
        """Draw the rows of each method together."""
        groups: defaultdict[Method, list[int]] = defaultdict(list)
        for i, row in enumerate(rows):
            groups[Method.of(row.sampling, self._vocab_size, level)].append(i)
        token_ids = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
        is_settled = torch.empty(len(rows), dtype=torch.bool, device=logits.device)
        for method, members in groups.items():
            lines = None
            if method.kind != "greedy":
                lines = Lines.of(
                    [rows[i].sampling for i in members],
                    [len(rows[i].token_ids) for i in members],
                    self._vocab_size,
                    logits.device,
                )
            if len(groups) == 1:
                return draw(logits, lines, method)
            index = torch.tensor(members, device=logits.device)
            token_ids[index], is_settled[index] = draw(logits[index], lines, method)
        return token_ids, is_settled


def _asked(rows: Sequence[SampledRow]) -> tuple[list[int], int]:
    """The rows that want log-probabilities, and the largest number of most likely tokens."""
    asked = [i for i, row in enumerate(rows) if row.sampling.num_logprobs >= 0]
    return asked, max((rows[i].sampling.num_logprobs for i in asked), default=0)


def _repair(logits: Tensor) -> Tensor:
    """Finite logits: NaN and -inf become the smallest float32, +inf the largest."""
    limits = torch.finfo(torch.float32)
    return logits.nan_to_num(nan=limits.min, posinf=limits.max, neginf=limits.min)


def _logprobs(raw: Tensor, token_ids: Tensor, k: int) -> Tensor:
    """Log-probabilities of given tokens and of the k most likely ones.

    Args:
        raw: [n, vocab] float32.
        token_ids: [n] int64.

    Returns:
        [n, 2 * (k + 1) + 1] float64 for `_unpack`: rank, ids (the given one first), logprobs. k is
        at most the number of tokens.
    """
    ids = token_ids.unsqueeze(1)
    if k:
        ids = torch.cat((ids, top_tokens(raw, min(k, raw.shape[1]))[1]), 1)
    one = torch.ones(len(raw), dtype=torch.float64, device=raw.device)
    norm = block_max(raw).amax(-1).double() + weight_sum(mass(raw, one)).log()
    logprobs = raw.gather(1, ids).double() - norm.unsqueeze(1)
    return torch.cat((token_rank(raw, token_ids).unsqueeze(1).double(), ids.double(), logprobs), 1)


def _unpack(packed: list[float], k: int) -> TokenLogprobs:
    """Unpack one line of `_logprobs`, with the first k of the most likely tokens."""
    width = (len(packed) - 1) // 2
    k = min(k, width - 1)
    ids = [int(token_id) for token_id in packed[1 : 2 + k]]
    return TokenLogprobs(ids, packed[1 + width : 2 + width + k], int(packed[0]))
