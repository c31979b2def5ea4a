"""The sampler against a dense draw: noise for every token, a full sort, one row at a time."""

import math
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from charonia.data.sampling import draw, sampler
from charonia.data.sampling.constraints import edit_logits
from charonia.data.sampling.noise import gumbel, signed_seed
from charonia.data.sampling.sampler import Sampled, SampledRow, Sampler
from charonia.protocol import RowSampling

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def kept_by_sorting(relative: Tensor, s: RowSampling) -> tuple[Tensor, bool]:
    """[vocab] bool of what may be drawn, and whether that hangs on a rounding error."""
    order = relative.sort(descending=True, stable=True).indices
    weights = relative[order].exp()
    limit = int((weights >= s.min_p).sum())
    limit = min(limit, s.top_k) if s.top_k > 0 else limit
    shares = weights[:limit].cumsum(0) / weights[:limit].sum()
    count = limit if s.top_p >= 1 else int((shares < s.top_p).sum()) + 1
    close = bool(((shares - s.top_p).abs() < 3e-6).any()) and s.top_p < 1
    close |= bool(((weights - s.min_p).abs() < 3e-6 * s.min_p).any())
    return torch.zeros_like(relative, dtype=torch.bool).index_fill_(0, order[:count], True), close


def drawn_densely(logits: Tensor, row: SampledRow) -> tuple[int, bool]:
    """The token of one row, and whether it hangs on a rounding error of the truncation."""
    s = row.sampling
    edited = edit_logits(logits.float().unsqueeze(0), [row])[0].double()
    if s.allowed_ids:
        others = {*range(len(logits))} - {*s.allowed_ids}
        edited[sorted(others)] = -math.inf
    if s.temperature < 1e-5:
        return int(edited.argmax()), False
    relative = (edited - edited.max()) / s.temperature
    kept, close = kept_by_sorting(relative, s)
    seed, position = torch.tensor([signed_seed(s.seed)]), torch.tensor([len(row.token_ids)])
    noise = gumbel(seed, position, torch.arange(len(logits)).unsqueeze(0))[0].to(logits.device)
    return int((relative + noise).masked_fill(~kept, -math.inf).argmax()), close


def a_row(sampling: RowSampling, num_tokens: int = 4, vocab: int = 4) -> SampledRow:
    return SampledRow(sampling, torch.arange(num_tokens) % vocab, 1)


def logits_of(kind: str, lines: int, vocab: int, generator: torch.Generator) -> Tensor:
    normal = torch.randn(lines, vocab, generator=generator)
    match kind:
        case "flat":
            return normal * 0.01
        case "equal":
            return torch.full_like(normal, 3.0)
        case "spiky":
            return normal + 12 * (torch.rand(lines, vocab, generator=generator) < 0.01)
        case "coarse":
            return (normal * 3).bfloat16().float()
        case "wide":
            return normal * 30
    return normal * 3


KINDS = ["flat", "equal", "spiky", "coarse", "wide", "normal"]


def random_sampling(rng: random.Random, vocab: int) -> RowSampling:
    return RowSampling(
        seed=rng.randrange(2**64),
        temperature=rng.choice([0.0, 1.0, rng.uniform(0.05, 3)]),
        top_k=rng.choice([0, 0, 1, rng.randrange(1, vocab + 9), rng.randrange(1, 60)]),
        top_p=rng.choice([1.0, 1.0, rng.uniform(0.01, 1), 0.95]),
        min_p=rng.choice([0.0, 0.0, rng.uniform(0, 0.3)]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
        presence_penalty=rng.choice([0.0, 0.0, 0.7]),
        logit_bias=rng.choice([{}, {0: 3.0, vocab - 1: -2.0}]),
        allowed_ids=rng.choice([(), (), tuple(rng.sample(range(vocab), rng.randrange(1, vocab)))]),
        num_logprobs=rng.choice([-1, -1, 0, 5]),
    )


def token_ids(sampled: list[Sampled]) -> list[int]:
    return [one.token_id for one in sampled]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab", [5, 64, 100, 1000, 8192])
@pytest.mark.parametrize("kind", KINDS)
def test_a_mixed_batch_draws_what_dense_draws_give(kind: str, vocab: int, device: str) -> None:
    rng, generator = random.Random(vocab), torch.Generator().manual_seed(vocab)
    of = Sampler(vocab, device)
    num_close = 0
    for _ in range(4):
        logits = logits_of(kind, 24, vocab, generator).to(device)
        rows = [a_row(random_sampling(rng, vocab), rng.randrange(1, 50)) for _ in range(24)]
        rows = [SampledRow(row.sampling, row.token_ids.to(device), 1) for row in rows]
        for line, drawn in enumerate(token_ids(of.sample(logits, rows))):
            expected, close = drawn_densely(logits[line], rows[line])
            num_close += close
            assert drawn == expected or close
    assert num_close < 96 / 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("blocks", [(1, 2), (3, 40), draw._NUM_BLOCKS])
def test_pruning_never_changes_a_draw(
    kind: str, blocks: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(3)
    vocab, lines = 6400, 256
    logits = logits_of(kind, lines, vocab, generator)
    temperatures = torch.rand(lines, generator=generator) * 2 + 0.05
    samplings = [
        RowSampling(seed=i, temperature=t, min_p=0.02 * (i % 3 == 0))
        for i, t in enumerate(temperatures.tolist())
    ]
    rows = [a_row(s) for s in samplings]
    monkeypatch.setattr(draw, "_NUM_BLOCKS", (vocab, vocab))  # nothing is left out
    unpruned = token_ids(Sampler(vocab, "cpu").sample(logits, rows))
    monkeypatch.setattr(draw, "_NUM_BLOCKS", blocks)
    assert token_ids(Sampler(vocab, "cpu").sample(logits, rows)) == unpruned


def test_pruning_settles_nearly_all_draws_at_the_first_attempt() -> None:
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(64, 49152, generator=generator) * 2.5
    samplings = [RowSampling(seed=i) for i in range(64)]
    lines = draw.Lines.of(samplings, [9] * 64, 49152, logits.device)
    _, is_settled = draw.draw(logits, lines, draw.Method.of(samplings[0], 49152, 0))
    assert is_settled.sum() >= 58


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_draws_alone_what_it_draws_in_any_batch(device: str) -> None:
    rng, generator = random.Random(5), torch.Generator().manual_seed(5)
    vocab = 3000
    of = Sampler(vocab, device)
    logits = torch.cat([logits_of(kind, 20, vocab, generator) for kind in KINDS]).to(device)
    rows = [a_row(random_sampling(rng, vocab), rng.randrange(1, 50)) for _ in logits]
    rows = [SampledRow(row.sampling, row.token_ids.to(device), 1) for row in rows]
    together = of.sample(logits, rows)
    order = list(range(len(rows)))
    for _ in range(3):
        rng.shuffle(order)
        part = order[: rng.randrange(2, len(rows))]
        assert of.sample(logits[part], [rows[i] for i in part]) == [together[i] for i in part]
    for line in range(len(rows)):
        assert of.sample(logits[line : line + 1], rows[line : line + 1]) == [together[line]]


def chi_square_limit(degrees: int) -> float:
    """Upper 1e-4 point of chi-square (Wilson, Hilferty 1931)."""
    return degrees * (1 - 2 / (9 * degrees) + 3.719 * math.sqrt(2 / (9 * degrees))) ** 3


@pytest.mark.parametrize(
    "sampling",
    [
        RowSampling(seed=0),
        RowSampling(seed=0, temperature=0.6),
        RowSampling(seed=0, temperature=2.5, top_k=7),
        RowSampling(seed=0, top_p=0.8),
        RowSampling(seed=0, min_p=0.05),
        RowSampling(seed=0, temperature=1.5, min_p=0.01, top_k=40, top_p=0.9),
        RowSampling(seed=0, logit_bias={3: 2.0}, repetition_penalty=1.5, presence_penalty=0.5),
    ],
    ids=repr,
)
@pytest.mark.parametrize("varied", ["seed", "position"])
def test_tokens_are_distributed_as_the_softmax_says(sampling: RowSampling, varied: str) -> None:
    vocab, draws = 200, 8000
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(6)) * 2
    edited = edit_logits(logits, [a_row(sampling)])[0].double()
    relative = (edited - edited.max()) / sampling.temperature
    kept, _ = kept_by_sorting(relative, sampling)
    expected = relative.masked_fill(~kept, -math.inf).softmax(0) * draws

    lines = draw.Lines.of([sampling] * draws, [4] * draws, vocab, logits.device)
    getattr(lines, "seeds" if varied == "seed" else "positions").copy_(torch.arange(draws))
    # `draw` itself, so that the parameters need not pass through 8000 rows.
    edited_lines = edited.float().expand(draws, -1).contiguous()
    drawn, is_settled = draw.draw(edited_lines, lines, draw.Method.of(sampling, vocab, 1))
    assert is_settled.all()
    counts = drawn.bincount(minlength=vocab).double()
    assert (counts[~kept] == 0).all()
    common = expected >= 5
    rare = kept & ~common
    cells = [((counts - expected) ** 2 / expected)[common].sum()]
    if expected[rare].sum() >= 5:
        cells.append((counts[rare].sum() - expected[rare].sum()) ** 2 / expected[rare].sum())
    assert sum(cells) < chi_square_limit(int(common.sum()) + len(cells) - 2)


def test_positions_of_one_sequence_are_independent() -> None:
    # Pairs of tokens at neighbouring positions of the same seeds, against the product.
    vocab, draws = 8, 20_000
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(7))
    share = logits[0].double().softmax(0)
    tokens = []
    for position in (10, 11):
        lines = draw.Lines.of([RowSampling(seed=0)] * draws, [position] * draws, vocab, "cpu")
        lines.seeds.copy_(torch.arange(draws))
        method = draw.Method.of(RowSampling(seed=0), vocab, 0)
        tokens.append(draw.draw(logits.expand(draws, -1).contiguous(), lines, method)[0])
    counts = (tokens[0] * vocab + tokens[1]).bincount(minlength=vocab**2).double()
    expected = (share.unsqueeze(1) * share).flatten() * draws
    assert ((counts - expected) ** 2 / expected).sum() < chi_square_limit(vocab**2 - 1)


def test_seeds_reproduce_and_all_their_64_bits_count() -> None:
    vocab = 500
    logits = torch.zeros(1, vocab)
    of = Sampler(vocab, "cpu")

    def text(seed: int) -> list[int]:
        rows = [a_row(RowSampling(seed=seed), n) for n in range(1, 9)]
        return token_ids(of.sample(logits.expand(8, -1), rows))

    seeds = [0, 1, 2**32, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 1]
    texts = [text(seed) for seed in seeds]
    assert [text(seed) for seed in seeds] == texts
    assert len({tuple(t) for t in texts}) == len(seeds)
    assert all(len(set(t)) > 4 for t in texts)  # positions differ


def test_the_position_is_the_number_of_tokens_and_not_which_tokens() -> None:
    logits = torch.zeros(1, 500)
    of, s = Sampler(500, "cpu"), RowSampling(seed=3)
    one = of.sample(logits, [SampledRow(s, torch.tensor([1, 2, 3]), 1)])
    assert of.sample(logits, [SampledRow(s, torch.tensor([9, 8, 7]), 3)]) == one
    assert of.sample(logits, [SampledRow(s, torch.tensor([1, 2]), 1)]) != one


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [7, 64, 1000, 5001])
def test_greedy_rows_take_the_lowest_of_the_best_tokens(dtype: torch.dtype, vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randint(-3, 3, (50, vocab), generator=generator).to(dtype)
    expected = [line.index(max(line)) for line in logits.tolist()]
    of = Sampler(vocab, "cpu")
    for s in (RowSampling(seed=1, temperature=0.0), RowSampling(seed=1, top_k=1)):
        assert token_ids(of.sample(logits, [a_row(s)] * 50)) == expected


def test_the_last_draw_among_equals_at_the_border_of_top_k_goes_by_id() -> None:
    # 300 tokens tie for the best: top-k of 3, 100 and 290 keep the ones with the lowest ids.
    logits = torch.zeros(1, 6400)
    logits[0, 6000:6300] = 9.0
    for top_k in (3, 100, 290):
        rows = [a_row(RowSampling(seed=i, top_k=top_k)) for i in range(600)]
        drawn = token_ids(Sampler(6400, "cpu").sample(logits.expand(600, -1), rows))
        assert min(drawn) >= 6000
        assert max(drawn) < 6000 + top_k


def test_raw_log_probabilities_rank_and_best_tokens_are_reported() -> None:
    vocab = 700
    generator = torch.Generator().manual_seed(8)
    logits = (torch.randn(40, vocab, generator=generator) * 2).bfloat16()  # with ties
    samplings = [
        RowSampling(seed=i, temperature=2.0, logit_bias={5: 9.0}, num_logprobs=i % 4 - 1)
        for i in range(40)
    ]
    drawn = Sampler(vocab, "cpu").sample(logits, [a_row(s) for s in samplings])
    expected = logits.double().log_softmax(-1)
    order = logits.float().sort(dim=-1, descending=True, stable=True).indices
    for line, one in enumerate(drawn):
        k = samplings[line].num_logprobs
        if k < 0:
            assert one.logprobs is None
            continue
        assert one.logprobs is not None
        assert one.logprobs.token_ids == [one.token_id, *order[line, :k].tolist()]
        assert one.logprobs.rank == order[line].tolist().index(one.token_id) + 1
        assert one.logprobs.logprobs == pytest.approx(
            expected[line, one.logprobs.token_ids].tolist(), abs=1e-6
        )


def test_prompt_log_probabilities_are_those_of_the_given_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sampler, "_PROMPT_CHUNK", 16)
    vocab = 300
    generator = torch.Generator().manual_seed(9)
    logits = torch.randn(50, vocab, generator=generator) * 2
    targets = torch.randint(0, vocab, (50,), generator=generator, dtype=torch.int32)
    of = Sampler(vocab, "cpu")
    assert of.prompt_logprobs(logits[:0], targets[:0], 3) == []
    expected = logits.double().log_softmax(-1)
    order = logits.sort(dim=-1, descending=True).indices
    for k in (0, 1, 20):
        reported = of.prompt_logprobs(logits, targets, k)
        assert len(reported) == 50
        for line, one in enumerate(reported):
            target = int(targets[line])
            assert one.token_ids == [target, *order[line, :k].tolist()]
            assert one.rank == order[line].tolist().index(target) + 1
            assert one.logprobs == pytest.approx(expected[line, one.token_ids].tolist(), abs=1e-6)


SPOILERS: dict[str, Callable[[Tensor], object]] = {
    "one nan": lambda line: line[7].fill_(math.nan),
    "one negative nan": lambda line: line[7].fill_(-math.nan),
    "all nan": lambda line: line.fill_(math.nan),
    "one inf": lambda line: line[7].fill_(math.inf),
    "all -inf": lambda line: line.fill_(-math.inf),
    "nan and inf": lambda line: line[5:9].copy_(torch.tensor([math.nan, math.inf, 1, -math.inf])),
}


@pytest.mark.parametrize("spoiler", list(SPOILERS))
@pytest.mark.parametrize("top_k", [0, 40, 300])
def test_logits_that_are_not_finite_harm_only_their_own_row(spoiler: str, top_k: int) -> None:
    vocab = 1000
    rng, generator = random.Random(10), torch.Generator().manual_seed(10)
    logits = torch.randn(12, vocab, generator=generator) * 3
    samplings = [random_sampling(rng, vocab) for _ in range(9)]
    samplings[4:4] = [
        RowSampling(seed=1, top_k=top_k, num_logprobs=2),
        RowSampling(seed=1, temperature=0.0, num_logprobs=2),
        RowSampling(seed=1, top_k=top_k, top_p=0.9, repetition_penalty=1.2),
    ]
    rows = [a_row(s) for s in samplings]
    of = Sampler(vocab, "cpu")
    undisturbed = of.sample(logits, rows)
    for line in (4, 5, 6):
        SPOILERS[spoiler](logits[line])
    spoilt = of.sample(logits, rows)
    for line in range(12):
        if line not in (4, 5, 6):
            assert spoilt[line] == undisturbed[line]
        logprobs = spoilt[line].logprobs
        assert 0 <= spoilt[line].token_id < vocab
        assert logprobs is None or all(math.isfinite(value) for value in logprobs.logprobs)
        is_drawable = spoiler.startswith("all") or logits[line, spoilt[line].token_id] > -math.inf
        assert is_drawable
    assert of.sample(logits, rows) == spoilt
    if spoiler == "one inf":
        assert token_ids(spoilt[4:7]) == [7, 7, 7]


def test_a_row_where_everything_is_banned_draws_as_if_all_were_equal() -> None:
    everything = [[token] for token in range(70)]
    logits = torch.linspace(0, 50, 70).expand(40, -1)
    of = Sampler(70, "cpu")
    for top_k, top_p in ((0, 1.0), (65, 1.0), (300, 0.9)):
        samplings = [
            RowSampling(seed=i, bad_words_ids=everything, top_k=top_k, top_p=top_p)
            for i in range(40)
        ]
        assert len(set(token_ids(of.sample(logits, [a_row(s) for s in samplings])))) > 20
    greedy = RowSampling(seed=1, bad_words_ids=everything, temperature=0.0)
    assert token_ids(of.sample(logits[:1], [a_row(greedy)])) == [0]


def test_one_allowed_token_is_always_drawn() -> None:
    all_but_one = [[token] for token in range(1000) if token != 613]
    samplings = [
        RowSampling(seed=i, bad_words_ids=all_but_one, top_k=k, top_p=p, min_p=m, temperature=t)
        for i, (k, p, m, t) in enumerate(
            [(0, 1, 0, 1), (9, 1, 0, 1), (0, 0.9, 0, 1), (400, 0.5, 0.1, 5), (0, 1, 0.3, 1)]
        )
    ]
    drawn = Sampler(1000, "cpu").sample(torch.zeros(5, 1000), [a_row(s) for s in samplings])
    assert token_ids(drawn) == [613] * 5


CUTS = [(0, 1, 0, 1), (9, 1, 0, 1), (0, 0.9, 0, 1), (400, 0.5, 0.1, 5), (0, 1, 0.3, 1)]


def test_where_all_allowed_tokens_are_banned_they_are_equally_likely() -> None:
    allowed = (3, 613, 900)
    everywhere = torch.linspace(0, 50, 1000).expand(60 * len(CUTS), -1)
    for spoilt in (everywhere, everywhere * math.nan):
        samplings = [
            RowSampling(
                seed=i,
                allowed_ids=allowed,
                min_tokens=9,
                stop_ids=list(allowed),
                top_k=k,
                top_p=p,
                min_p=m,
                temperature=t,
            )
            for i, (k, p, m, t) in enumerate(CUTS * 60)
        ]
        drawn = token_ids(Sampler(1000, "cpu").sample(spoilt, [a_row(s) for s in samplings]))
        assert set(drawn) <= {*allowed}
        assert {*drawn[:: len(CUTS)]} == {*allowed}
    greedy = RowSampling(
        seed=1, allowed_ids=allowed, min_tokens=9, stop_ids=list(allowed), temperature=0.0
    )
    assert token_ids(Sampler(1000, "cpu").sample(everywhere[:1], [a_row(greedy)])) == [3]


def test_extreme_temperatures_stay_exact() -> None:
    vocab = 2000
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(11)) * 5
    of = Sampler(vocab, "cpu")
    temperatures = [1e-9, 1e-5, 1e-3, 100.0, 1e4, 1e6]
    rows = [a_row(RowSampling(seed=2, temperature=t)) for t in temperatures]
    drawn = token_ids(of.sample(logits, rows))
    assert drawn[:3] == logits[:3].argmax(-1).tolist()
    assert drawn == [drawn_densely(logits[i], rows[i])[0] for i in range(6)]


def test_no_rows_give_no_results_and_the_logits_are_left_alone() -> None:
    of = Sampler(10, "cpu")
    assert of.sample(torch.zeros(0, 10), []) == []
    logits = torch.tensor([[math.nan] * 10, [1.0] * 10])
    before = logits.clone()
    of.sample(logits, [a_row(RowSampling(seed=1, logit_bias={1: 2.0}))] * 2)
    torch.testing.assert_close(logits, before, equal_nan=True, rtol=0, atol=0)
