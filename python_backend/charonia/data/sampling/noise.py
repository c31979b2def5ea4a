"""Stateless Gumbel noise: a pure function of (seed, position, token id).

Owns the hash and the noise computed from it. Must not know logits, requests or batches: the noise
depends on the three numbers alone, so a token gets the same noise in any batch, in any order, on
any device.

The noise of one position, with tokens in blocks of 64::

    block of token t:   b = t // 64
    hash of the block   ──► A ~ Exp(1) / 64, the smallest of 64 exponentials, and its token
    hash of the token   ──► R ~ Exp(1)
    E(t) = A            if t is that token
           A + R        otherwise
    noise(t) = -log E(t)

By the memorylessness of the exponential distribution the 64 values E(t) are independent and Exp(1)
(Rényi 1953, "On the theory of order statistics"), so the noise is independent standard Gumbel. The
advantage is -log A, the largest noise in a block, which takes only *one* hash. With it the sampler
can skip whole blocks of tokens that cannot win, and stays exact (draw.py). A bound for any noise
(36.7 for 52 random bits) would skip almost nothing.

The hash is SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators",
figure 17, with the multipliers of Stafford's "Mix13"), in int64 with wrap-around. Its bits are the
same on every device. The two logarithms are taken in float64 and the noise is rounded to float32
once. Libraries differ in the last bit of a float64 logarithm, which changes the rounded value about
once in 1e8, by one unit in the last place.
"""

from torch import Tensor

BLOCK_SIZE = 64


def _signed(value: int) -> int:
    """Two's complement int64 of the low 64 bits of `value`."""
    return (value + 2**63) % 2**64 - 2**63


_GAMMA = _signed(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = _signed(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = _signed(0x94D049BB133111EB)


def signed_seed(seed: int) -> int:
    """The int64 with the bits of a 64-bit seed, which may be 0 .. 2**64 - 1 or signed."""
    return _signed(seed)


def gumbel(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise of tokens.

    Args:
        seeds: [n] int64, see `signed_seed`.
        positions: [n] int64, of the drawn token.
        token_ids: [n, c] int64, >= 0.

    Returns:
        [n, c] float32, finite.
    """
    keys = _keys(seeds, positions)
    hashes = _block_hashes(keys, token_ids // BLOCK_SIZE)
    rest = _exponential(_mix(keys + (token_ids + 1) * _GAMMA))
    rest.masked_fill_((hashes ^ token_ids) % BLOCK_SIZE == 0, 0.0)
    return rest.add_(_smallest(hashes)).log_().neg_().float()


def largest_gumbel(seeds: Tensor, positions: Tensor, blocks: Tensor) -> Tensor:
    """The largest noise in blocks of BLOCK_SIZE tokens, even if the vocabulary ends within one.

    Args:
        seeds, positions: [n] int64 as for `gumbel`.
        blocks: [n, b] or [b] int64, token id // BLOCK_SIZE.

    Returns:
        [n, b] float32.
    """
    return _smallest(_block_hashes(_keys(seeds, positions), blocks)).log_().neg_().float()


def _keys(seeds: Tensor, positions: Tensor) -> Tensor:  # [n], [n] -> [n, 1]
    """State of the generator for each (seed, position)."""
    return _mix(_mix(seeds + _GAMMA) + (positions + 1) * _GAMMA).unsqueeze(-1)


def _block_hashes(keys: Tensor, blocks: Tensor) -> Tensor:
    """Hash blocks. They count down from the state and tokens count up, so the two never meet."""
    return _mix(keys - (blocks + 1) * _GAMMA)


def _smallest(hashes: Tensor) -> Tensor:
    """The smallest exponential of a block, without the low 6 bits, which select its token."""
    return _exponential(hashes).div_(BLOCK_SIZE)


def _exponential(hashes: Tensor) -> Tensor:
    """Exp(1) in float64 from the top 52 bits: u is a multiple of 2**-53, strictly inside (0, 1)."""
    return (_shift_right(hashes, 12).double() + 0.5).mul_(2.0**-52).log_().neg_()


def _mix(state: Tensor) -> Tensor:
    state = (state ^ _shift_right(state, 30)) * _MULTIPLIER_1
    state = (state ^ _shift_right(state, 27)) * _MULTIPLIER_2
    return state ^ _shift_right(state, 31)


def _shift_right(value: Tensor, bits: int) -> Tensor:
    """Logical shift; the shift of int64 would copy the sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)
