"""The noise: a fixed function of three numbers, independent standard Gumbel."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from charonia.data.sampling.noise import BLOCK_SIZE, gumbel, largest_gumbel, signed_seed
from support.chi_square import chi_square_limit

MASK = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15


def mix(state: int) -> int:
    """SplitMix64's finalizer in Python's unbounded integers."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & MASK
    return state ^ (state >> 31)


def exponential(hashed: int) -> float:
    return -math.log(((hashed >> 12) + 0.5) * 2.0**-52)


def reference_gumbel(seed: int, position: int, token_id: int) -> float:
    key = mix((mix((seed + GAMMA) & MASK) + (position + 1) * GAMMA) & MASK)
    block = mix((key - (token_id // 64 + 1) * GAMMA) & MASK)
    value = exponential(block) / 64
    if block % 64 != token_id % 64:
        value += exponential(mix((key + (token_id + 1) * GAMMA) & MASK))
    return -math.log(value)


def noise(seed: int, position: int, token_ids: Tensor) -> Tensor:
    one = torch.tensor([signed_seed(seed)]), torch.tensor([position])
    return gumbel(*one, token_ids.unsqueeze(0))[0]


def assert_standard_gumbel(values: Tensor, cells: int = 64) -> None:
    """Chi-square of the values' place in the Gumbel distribution, in equally likely cells."""
    uniform = torch.exp(-torch.exp(-values.double().flatten()))
    counts = (uniform * cells).long().clamp(max=cells - 1).bincount(minlength=cells).double()
    expected = uniform.numel() / cells
    assert ((counts - expected) ** 2 / expected).sum() < chi_square_limit(cells - 1)


SEEDS = [0, 1, 42, 2**31, 2**63 - 1, 2**63, 2**64 - 1]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_noise_is_what_unbounded_integers_give(seed: int) -> None:
    ids = torch.tensor([0, 1, 63, 64, 1000, 49151, 2**20])
    for position in (0, 1, 4095, 2**31):
        expected = [reference_gumbel(seed, position, i) for i in ids.tolist()]
        assert noise(seed, position, ids).tolist() == pytest.approx(expected, rel=1e-6, abs=1e-7)


def test_the_hash_is_splitmix64() -> None:
    # The first outputs of the published C code (Vigna 2015) for the seed 1234567.
    outputs = [mix((1234567 + n * GAMMA) & MASK) for n in (1, 2, 3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_a_seed_draws_the_same_noise_in_any_later_version() -> None:
    recorded = [-1.5766026, -0.4294484]
    assert noise(42, 7, torch.tensor([0, 49151])).tolist() == pytest.approx(recorded, abs=1e-6)


def test_all_64_bits_of_the_seed_count() -> None:
    ids = torch.arange(256)
    drawn = [tuple(noise(1 << bit, 0, ids).tolist()) for bit in range(64)]
    assert len(set(drawn)) == 64


def test_a_negative_seed_is_its_twos_complement() -> None:
    assert signed_seed(2**64 - 1) == signed_seed(-1) == -1
    assert signed_seed(2**63) == -(2**63)
    assert signed_seed(2**63 - 1) == 2**63 - 1


def test_noise_does_not_depend_on_the_lines_and_tokens_beside_it() -> None:
    seeds, positions = torch.arange(7) * 977, torch.arange(7) * 13
    ids = torch.randint(0, 50_000, (7, 300), generator=torch.Generator().manual_seed(1))
    together = gumbel(seeds, positions, ids)
    for line, column in itertools.product(range(7), range(0, 300, 37)):
        alone = noise(int(seeds[line]), int(positions[line]), ids[line, column : column + 1])
        assert torch.equal(alone, together[line, column : column + 1])


def test_the_noise_is_standard_gumbel_for_consecutive_tokens_positions_and_seeds() -> None:
    zero, line = torch.zeros(1, dtype=torch.int64), torch.arange(100_000)
    assert_standard_gumbel(gumbel(zero, zero, line.unsqueeze(0)))
    assert_standard_gumbel(gumbel(zero.expand(100_000), line, zero.expand(100_000, 1)))
    assert_standard_gumbel(gumbel(line, zero.expand(100_000), zero.expand(100_000, 1)))


def test_neighbours_are_independent_in_token_position_and_seed() -> None:
    # A 8 x 8 table of the noise's octile against that of a neighbour.
    size = 400
    grid = torch.arange(size)
    ids = torch.arange(256).expand(size, -1)
    zeros = torch.zeros_like(grid)
    octile = lambda values: (torch.exp(-torch.exp(-values.double())) * 8).long().clamp(max=7)  # noqa: E731
    by_position, by_seed = octile(gumbel(zeros, grid, ids)), octile(gumbel(grid, zeros, ids))
    pairs = [
        (by_position[:-1], by_position[1:]),
        (by_seed[:-1], by_seed[1:]),
        (by_position[:, :-1], by_position[:, 1:]),
        (by_position[:, :-64], by_position[:, 64:]),
        (by_position, by_seed),
    ]
    for first, second in pairs:
        table = (first * 8 + second).flatten().bincount(minlength=64).double()
        expected = table.sum() / 64
        assert ((table - expected) ** 2 / expected).sum() < chi_square_limit(63)


def test_tokens_of_one_block_are_independent_although_they_share_a_hash() -> None:
    # The block's smallest exponential is where the shared hash enters: which token has it must be
    # uniform, and the gap to the second must be Exp(1) / 63, as for independent values.
    lines = torch.arange(64_000)
    values = gumbel(lines, lines * 0, torch.arange(BLOCK_SIZE).expand(64_000, -1))
    counts = values.argmax(-1).bincount(minlength=64).double()
    assert ((counts - 1000) ** 2 / 1000).sum() < chi_square_limit(63)
    first, second = (-values.double()).exp().sort(-1).values[:, :2].unbind(-1)
    assert_standard_gumbel(-torch.log((second - first) * 63))
    assert_standard_gumbel(-torch.log(first * 64))


def test_the_largest_noise_of_a_block_is_the_maximum_over_its_tokens() -> None:
    seeds = torch.arange(50)
    ids = torch.arange(64 * 40).expand(50, -1)
    highest = gumbel(seeds, seeds * 3, ids).view(50, 40, 64).amax(-1)
    assert torch.equal(largest_gumbel(seeds, seeds * 3, torch.arange(40)), highest)


def test_the_noise_is_finite_over_millions_of_draws() -> None:
    seeds = torch.arange(64)
    values = gumbel(seeds, seeds, torch.arange(50_000).expand(64, -1))
    assert values.isfinite().all()
    assert values.dtype == torch.float32
    assert 10 < values.max() < 41
    assert -4 < values.min() < 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_draws_the_same_noise() -> None:
    seeds, ids = torch.arange(64) * 2**57, torch.arange(50_000).expand(64, -1)
    host = gumbel(seeds, seeds, ids)
    device = gumbel(seeds.cuda(), seeds.cuda(), ids.cuda()).cpu()
    different = host != device
    assert different.sum() <= 3
    torch.testing.assert_close(host, device, rtol=1.3e-7, atol=1e-7)
