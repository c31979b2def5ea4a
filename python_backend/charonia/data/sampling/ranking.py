"""Reading logits in order, without sorting the vocabulary.

Owns the total order of tokens (higher logit first, among equals the lower id), the walk by blocks
of 64 tokens that makes it cheap, and sums of probability. Must not know sampling parameters.

No answer depends on the other lines of the batch: the order is total, and sums are taken over
blocks of fixed extent, whose order of addition does not change with the number of lines.
"""

import torch
from torch import Tensor

from charonia.data.sampling.noise import BLOCK_SIZE


def block_max(logits: Tensor) -> Tensor:
    """The highest logit of each block: [n, vocab] float32 -> [n, blocks]. NaN spreads."""
    whole, rest = _split(logits)
    highest = whole.amax(-1)
    return highest if rest is None else torch.cat((highest, rest.amax(-1, keepdim=True)), -1)


def gather_blocks(logits: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens of some blocks.

    Args:
        logits: [n, vocab] float32.
        blocks: [n, b] int64.

    Returns:
        logits and token ids, [n, b * BLOCK_SIZE] each; past the vocabulary's end the logit is -inf.
    """
    vocab = logits.shape[1]
    offsets = torch.arange(BLOCK_SIZE, device=logits.device)
    ids = (blocks.unsqueeze(-1) * BLOCK_SIZE + offsets).flatten(1)
    values = logits.gather(1, ids.clamp(max=vocab - 1))
    if vocab % BLOCK_SIZE:
        values.masked_fill_(ids >= vocab, -torch.inf)
    return values, ids


def best_token(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The first token in order.

    By blocks this reads the logits once with a vectorised maximum: 0.23 ms against 1.01 ms for
    torch.argmax over 32 x 49152 float32 on one core.

    Returns:
        its logit [n] and id [n].
    """
    block = block_max(logits).argmax(-1, keepdim=True)  # the first of equals
    values, ids = gather_blocks(logits, block)
    best = values.argmax(-1, keepdim=True)
    return values.gather(1, best).squeeze(1), ids.gather(1, best).squeeze(1)


def top_tokens(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The first `count` tokens in order, exactly, ties included.

    They all lie in the first `count` blocks, ordered by (highest logit, lowest index): a token of
    any other block has the best tokens of those `count` blocks before it.

    Args:
        logits: [n, vocab] float32.
        count: 1 .. vocab.

    Returns:
        logits and token ids, [n, count] each, best first.
    """
    num_blocks = -(-logits.shape[1] // BLOCK_SIZE)
    if count * 2 <= num_blocks:
        highest = _order_keys(block_max(logits), torch.arange(num_blocks, device=logits.device))
        candidates = _order_keys(*gather_blocks(logits, _keys_to_ids(highest.topk(count).values)))
    else:
        candidates = _order_keys(logits, torch.arange(logits.shape[1], device=logits.device))
    if count * 4 < candidates.shape[1]:
        keys = candidates.topk(count).values
    else:
        keys = candidates.sort(dim=-1, descending=True).values[:, :count]
    ids = _keys_to_ids(keys)
    # An id past the vocabulary's end has logit -inf and comes after all others.
    ids.clamp_(max=logits.shape[1] - 1)
    return logits.gather(1, ids), ids


def token_rank(logits: Tensor, token_ids: Tensor) -> Tensor:
    """1-based place of a token in the order: [n, vocab], [n] int64 -> [n] int64."""
    value = logits.gather(1, token_ids.unsqueeze(1))
    ids = torch.arange(logits.shape[1], device=logits.device)
    before = (logits == value).logical_and_(ids < token_ids.unsqueeze(1))
    return before.logical_or_(logits > value).sum(-1) + 1


def total_mass(logits: Tensor, temperature: Tensor) -> Tensor:
    """Sum over the vocabulary of exp((logit - highest logit) / temperature).

    Exponentials and sums within a block are float32, sums over blocks float64: relative error
    about 1e-7, against 18 ms instead of 1.5 ms for float64 throughout (32 x 49152, one core).

    Args:
        logits: [n, vocab] float32.
        temperature: [n] float64, > 0.

    Returns:
        [n] float64, >= 1 where the logits are finite.
    """
    highest = block_max(logits).amax(-1, keepdim=True)
    weights = (logits - highest).mul_(temperature.reciprocal().float().unsqueeze(1)).exp_()
    whole, rest = _split(weights)
    mass = whole.sum(-1).double().sum(-1)
    return mass if rest is None else mass + rest.sum(-1).double()


def _split(lines: Tensor) -> tuple[Tensor, Tensor | None]:
    """Views: whole blocks [n, blocks, BLOCK_SIZE], and what is left over [n, < BLOCK_SIZE]."""
    num_blocks = lines.shape[1] // BLOCK_SIZE
    end = num_blocks * BLOCK_SIZE
    whole = lines[:, :end].view(len(lines), num_blocks, BLOCK_SIZE)
    return whole, lines[:, end:] if end < lines.shape[1] else None


def _order_keys(values: Tensor, ids: Tensor) -> Tensor:
    """int64 keys that compare as (value, then -id): float bits above, complement of the id below.

    The bits of a float compare as its value does, once those of a negative one are flipped.
    """
    bits = (values + 0.0).view(torch.int32)  # + 0.0 makes -0.0 equal to 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.long() << 32) | (0xFFFFFFFF - ids)


def _keys_to_ids(keys: Tensor) -> Tensor:
    return 0xFFFFFFFF - (keys & 0xFFFFFFFF)
