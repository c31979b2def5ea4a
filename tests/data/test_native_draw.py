"""Drawing in C++ against drawing in torch: the same token, whatever the logits and parameters."""

import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from charonia.config import EngineArgs
from charonia.data.runner import Runner
from charonia.data.sampling.native_draw import NativeDraw
from charonia.data.sampling.sampler import Sampled, SampledRow, Sampler
from charonia.protocol import NewRow, RowSampling, RowStep, StepPlan
from support.chi_square import assert_drawn_from
from support.kernels import ISAS, kernels_for
from support.long import one_in

each_isa = pytest.mark.parametrize("isa", ISAS)


@cache
def native_draw(isa: str) -> NativeDraw:
    kernels_for(isa).set_threads(2, [])
    return NativeDraw(kernels_for(isa))


def native_sampler(vocab: int, isa: str = ISAS[0]) -> Sampler:
    return Sampler(vocab, "cpu", native_draw(isa))


def ids(sampled: list[Sampled]) -> list[int]:
    return [one.token_id for one in sampled]


VOCABS = [1, 2, 15, 16, 63, 64, 65, 100, 777, 4096, 9001]

KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x * 3,
    "flat": lambda x: x * 0.01,
    "equal": lambda x: torch.full_like(x, 2.5),
    "few values": lambda x: (x * 1.5).round(),
    "spiky": lambda x: x + 12 * (x > 2),
    "huge": lambda x: x * 1e37,
    "half banned": lambda x: x.masked_fill(x < 0, -torch.inf),
    "signed zeros": lambda x: torch.where(x > 1, x, x * 0),
    "nan": lambda x: x.masked_fill(x > 1, torch.nan),
    "inf": lambda x: x.masked_fill(x > 2, torch.inf),
    "nan and inf": lambda x: x.masked_fill(x > 1, torch.inf).masked_fill(x < -1, -torch.nan),
    "all nan": lambda x: x * torch.nan,
    "all -inf": lambda x: torch.full_like(x, -torch.inf),
}


def samplings(vocab: int) -> st.SearchStrategy[RowSampling]:
    """Any parameters; about half of each are off."""

    def maybe(off: object, on: st.SearchStrategy) -> st.SearchStrategy:
        return st.one_of(st.just(off), on)

    token = st.integers(0, vocab - 1)
    return st.builds(
        RowSampling,
        seed=st.integers(0, 2**64 - 1),
        temperature=st.one_of(st.floats(0.1, 3), st.sampled_from([0.0, 1e-6, 1e-5, 1.0, 1e6])),
        top_k=maybe(0, st.integers(1, vocab + 3) | st.integers(1, 12)),
        top_p=maybe(1.0, st.floats(1e-9, 1) | st.sampled_from([0.25, 0.5, 0.95, 1 - 1e-9])),
        min_p=maybe(0.0, st.floats(1e-9, 1) | st.just(1.0)),
        presence_penalty=maybe(0.0, st.floats(-2, 2)),
        frequency_penalty=maybe(0.0, st.floats(-2, 2)),
        repetition_penalty=maybe(1.0, st.floats(0.1, 10)),
        logit_bias=maybe({}, st.dictionaries(token, st.floats(-100, 100), max_size=5)),
        bad_words_ids=maybe([], st.lists(st.lists(token, min_size=1, max_size=3), max_size=6)),
        allowed_ids=maybe((), st.lists(token, max_size=9).map(tuple)),
        min_tokens=maybe(0, st.integers(0, 9)),
        stop_ids=maybe([], st.lists(token, max_size=3)),
        num_logprobs=maybe(-1, st.integers(0, 3)),
    )


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, list[SampledRow]]:
    """Logits and rows: most over an alphabet so small that tokens repeat and bad words match."""
    vocab = draw(st.sampled_from(VOCABS))
    kinds = draw(st.lists(st.sampled_from(list(KINDS)), min_size=1, max_size=5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    logits = torch.randn(len(kinds), vocab, generator=generator)
    logits = torch.stack([KINDS[kind](line) for kind, line in zip(kinds, logits, strict=True)])
    rows = []
    for _ in kinds:
        alphabet = min(vocab, draw(st.sampled_from([4, 10_000])))
        known = torch.randint(0, alphabet, (draw(st.integers(1, 40)),), generator=generator)
        num_prompt = draw(st.integers(1, len(known)))
        rows.append(SampledRow(draw(samplings(alphabet)), known, num_prompt))
    return logits, rows


@pytest.mark.parametrize("isa", one_in(len(ISAS), ((isa,) for isa in ISAS)))
@settings(max_examples=100)
@given(batch=batches())
def test_the_kernels_draw_what_torch_draws(
    isa: str, batch: tuple[Tensor, list[SampledRow]]
) -> None:
    logits, rows = batch
    vocab = logits.shape[1]
    before = logits.clone()
    assert native_sampler(vocab, isa).sample(logits, rows) == Sampler(vocab, "cpu").sample(
        logits, rows
    )
    assert torch.equal(logits.view(torch.int32), before.view(torch.int32))


@each_isa
@pytest.mark.parametrize("scale", [0.6, 2.5, 6])
def test_a_real_vocabulary_draws_what_torch_draws(isa: str, scale: float) -> None:
    vocab, generator = 49_152, torch.Generator().manual_seed(1)
    cuts = [
        {},
        {"temperature": 0.8, "top_p": 0.95},
        {"top_p": 0.1},
        {"top_k": 50},
        {"top_k": 2000, "top_p": 0.7},
        {"min_p": 0.02, "top_p": 0.9},
        {"temperature": 0.0},
    ]
    rows = [
        SampledRow(RowSampling(seed=i, **cut), torch.arange(9 + i), 9)
        for i in range(4)
        for cut in cuts
    ]
    logits = torch.randn(len(rows), vocab, generator=generator) * scale
    expected = ids(Sampler(vocab, "cpu").sample(logits, rows))
    assert ids(native_sampler(vocab, isa).sample(logits, rows)) == expected


@each_isa
def test_a_token_on_the_very_edge_of_top_p_is_in_or_out_as_in_torch(isa: str) -> None:
    # Of equal tokens, exactly top_p of the mass lies before the edge: sums in float32 cannot say.
    vocab = 640
    rows = [
        SampledRow(RowSampling(seed=i, top_p=k / vocab), torch.arange(5), 5)
        for i in range(20)
        for k in (1, 64, 65, 320, 639)
    ]
    logits = torch.full((len(rows), vocab), -7.25)
    drawn = ids(native_sampler(vocab, isa).sample(logits, rows))
    assert drawn == ids(Sampler(vocab, "cpu").sample(logits, rows))
    assert all(
        token < round(row.sampling.top_p * vocab) for token, row in zip(drawn, rows, strict=True)
    )


def test_a_row_draws_alone_what_it_draws_in_any_batch_and_on_any_threads() -> None:
    vocab, generator = 5000, torch.Generator().manual_seed(2)
    logits = torch.randn(40, vocab, generator=generator) * 2
    rows = [
        SampledRow(
            RowSampling(seed=i, top_p=0.9, repetition_penalty=1.0 + 0.1 * (i % 2)),
            torch.randint(0, vocab, (3 + i,), generator=generator),
            2,
        )
        for i in range(40)
    ]
    of = native_sampler(vocab)
    together = ids(of.sample(logits, rows))
    assert [ids(of.sample(logits[i : i + 1], [rows[i]]))[0] for i in range(40)] == together
    assert ids(of.sample(logits.flip(0), rows[::-1])) == together[::-1]
    try:
        kernels_for(ISAS[0]).set_threads(1, [])
        assert ids(of.sample(logits, rows)) == together
    finally:
        kernels_for(ISAS[0]).set_threads(2, [])


@pytest.mark.parametrize(
    "cut",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 2.5, "top_k": 7},
        {"top_p": 0.8},
        {"top_p": 0.3},
        {"min_p": 0.05},
        {"temperature": 1.5, "min_p": 0.01, "top_k": 40, "top_p": 0.9},
    ],
    ids=repr,
)
def test_tokens_are_distributed_as_the_softmax_says(cut: dict[str, float]) -> None:
    vocab, draws = 200, 8000
    line = torch.randn(vocab, generator=torch.Generator().manual_seed(6)) * 2
    known = torch.arange(4)
    rows = [SampledRow(RowSampling(seed=i, **cut), known, 4) for i in range(draws)]
    drawn = ids(native_sampler(vocab).sample(line.expand(draws, -1), rows))

    ranked, order = (line.double() / cut.get("temperature", 1.0)).sort(descending=True)
    share = ranked.softmax(0)
    count = int((share >= cut.get("min_p", 0) * share[0]).sum())
    count = min(count, int(cut.get("top_k", vocab)))
    share = share[:count] / share[:count].sum()
    share = share[: int((share.cumsum(0) < cut.get("top_p", 2)).sum()) + 1]
    counts = torch.tensor(drawn).bincount(minlength=vocab)[order]
    probabilities = torch.cat((share / share.sum(), share.new_zeros(vocab - len(share))))
    assert_drawn_from(counts.tolist(), probabilities.tolist())


def test_parameters_are_taken_over_anew_for_each_request() -> None:
    # Many short-lived requests: a freed struct's place in memory is soon another's.
    of, vocab = native_sampler(300), 300
    logits, known = torch.zeros(1, vocab), torch.arange(3)
    drawn = []
    for seed in range(6000):
        drawn += ids(of.sample(logits, [SampledRow(RowSampling(seed=seed), known, 3)]))
    rows = [SampledRow(RowSampling(seed=seed), known, 3) for seed in range(6000)]
    assert drawn == ids(Sampler(vocab, "cpu").sample(logits.expand(6000, -1), rows))


def test_parameters_live_as_long_as_the_row_that_has_them() -> None:
    of = native_draw(ISAS[0])
    rows = [RowSampling(seed=seed, logit_bias={1: 2.0}) for seed in range(5)]
    taken = [weakref.ref(of.parameters(row)) for row in rows]
    assert all(of.parameters(row) is ref() for row, ref in zip(rows, taken, strict=True))
    del rows[2:4]
    assert [ref() is None for ref in taken] == [False, False, True, True, False]


@pytest.mark.parametrize("ending", ["leaves", "reset"])
def test_an_engine_keeps_the_parameters_of_its_rows_alone(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    taken: list[weakref.ref[object]] = []
    take_over = NativeDraw._take_over

    def note(self: NativeDraw, sampling: RowSampling) -> object:
        parameters = take_over(self, sampling)
        taken.append(weakref.ref(parameters))
        return parameters

    monkeypatch.setattr(NativeDraw, "_take_over", note)
    args = EngineArgs(model=str(checkpoint()), cpu_kernels=ISAS[0], num_gpu_blocks_override=16)
    runner = Runner(args, log=lambda line: None)
    for step in range(6):
        is_reset = ending == "reset" or step == 0
        runner.execute(
            StepPlan(
                epoch=step + 1 if ending == "reset" else 1,
                step_id=0 if is_reset else step,
                reset=is_reset,
                leaves=[] if is_reset else [0],
                joins=[NewRow(0, [5, 6], 2, 0, [1], RowSampling(seed=step, top_k=9))],
                rows=[RowStep(0, 2)],
            )
        )
    assert [ref() is not None for ref in taken] == [False] * 5 + [True]


def test_logits_of_any_floating_type_and_layout_are_accepted() -> None:
    vocab = 130
    logits = torch.randn(vocab, 6, generator=torch.Generator().manual_seed(3)).bfloat16().T
    known = torch.arange(8, dtype=torch.int32)[::2]
    rows = [SampledRow(RowSampling(seed=i, presence_penalty=1.0), known, 1) for i in range(6)]
    expected = Sampler(vocab, "cpu").sample(logits, rows)
    assert native_sampler(vocab).sample(logits, rows) == expected
    assert native_sampler(vocab).sample(logits[:0], []) == []
