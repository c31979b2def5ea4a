"""What Python gives the kernels is checked before it is read: an error names what is wrong."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from charonia.data.ops.base import GuessOfRow, Pages, Rotation, StepBatch
from charonia.data.ops.native.ops import NativeOps
from support.attention import AttentionCase
from support.kernels import ISAS, kernels_for, native_ops, packed
from support.weights import HIDDEN

CASE = AttentionCase(seed=0, rows=[(20, 1), (0, 5)])
INPUTS = CASE.inputs(torch.float32)
PAGES = packed(INPUTS.pages)
TOKENS, BLOCKS = 6, len(PAGES.keys)
LARGEST = torch.iinfo(torch.int64).max
Wrong = dict[str, Callable[[], Any]]
"""What must be said, and what must say it."""


@cache
def kernels() -> ModuleType:
    return kernels_for(ISAS[0])


@cache
def ops() -> NativeOps:
    return native_ops(ISAS[0])


def assert_refused(wrong: Wrong) -> None:
    for words, call in wrong.items():
        with pytest.raises(ValueError, match=words):
            call()


def strided(x: Tensor) -> Tensor:
    """The same numbers, not in a row."""
    return torch.stack((x, x), -1)[..., 0]


def norm(size: int = HIDDEN, dtype: torch.dtype = torch.float32) -> Any:
    return kernels().Norm(torch.ones(size, dtype=dtype), 1e-5)


def layers() -> Any:
    weights = torch.zeros(2 * 8, HIDDEN), None, torch.zeros(HIDDEN, 8), None
    half = kernels().Mlp(norm(), *weights)
    return kernels().Layers([(ops().attention(INPUTS.weights), half)], None)


def head(hidden: int = HIDDEN) -> Any:
    return kernels().Head(norm(hidden), torch.zeros(30, hidden), None)


def begin(**changes: Any) -> Any:
    rotation = changes.pop("rotation", INPUTS.rotation)
    return ops().begin(replace(INPUTS.batch, **changes), rotation)


def test_weights_that_do_not_fit_are_refused() -> None:
    square = torch.zeros(4, 4)
    half = square.bfloat16()
    assert_refused(
        {
            r"weight must be a contiguous Float tensor \[any, any\] on the CPU, not Float \[4, 2\]"
            r" with strides \[1, 4\] on cpu": lambda: kernels().Matrix(square.T[:, :2], None),
            r"weight must be .* \[any, any\]": lambda: kernels().Matrix(square[None], None),
            "weight must not be empty": lambda: kernels().Matrix(square[:0], None),
            "weight must be .* on meta": lambda: kernels().Matrix(square.to("meta"), None),
            "odd number of inputs, 3": lambda: kernels().Matrix(square[:, :3].contiguous(), None),
            "gate and up have 3 outputs": lambda: kernels().Matrix(square[:3], None, True),
            r"bias must be .* Float tensor \[4\]": lambda: kernels().Matrix(square, square[0, :3]),
            "bias must be .* not BFloat16": lambda: kernels().Matrix(square, half[0]),
            r"norm must be .* \[4\]": lambda: kernels().Head(norm(5), square, None),
            "norm must be .* not BFloat16": lambda: kernels().Head(
                norm(4, torch.bfloat16), square, None
            ),
            "do not fit down of": lambda: kernels().Mlp(norm(4), square, None, square, None),
            "do not fit down of .* BFloat16": lambda: kernels().Mlp(
                norm(4), square, None, half[:, :2].contiguous(), None
            ),
        }
    )


def test_heads_that_do_not_fit_are_refused() -> None:
    def attention(qkv: int, output: int, head_dim: int, *norms: Any) -> Any:
        query_norm, key_norm = norms or (None, None)
        return kernels().Attention(
            norm(),
            torch.zeros(qkv, HIDDEN),
            None,
            torch.zeros(HIDDEN, output),
            None,
            query_norm,
            key_norm,
            head_dim,
        )

    assert_refused(
        {
            "head_dim must be positive, not 0": lambda: attention(32, 16, 0),
            "4 heads of 4 numbers cannot share 3": lambda: attention(40, 16, 4),
            "cannot share 0 of keys": lambda: attention(16, 16, 4),
            "heads of 3 numbers": lambda: attention(18, 6, 3),
            "does not fit output": lambda: attention(34, 16, 4),
            "query_norm must be": lambda: attention(32, 16, 4, norm(5), norm(4)),
            "key_norm must be": lambda: attention(32, 16, 4, norm(4), norm(5)),
        }
    )


def test_a_step_that_would_read_or_write_elsewhere_is_refused() -> None:
    batch = INPUTS.batch
    positions, tables = batch.positions, batch.block_tables

    def with_one(x: Tensor, value: int) -> Tensor:
        changed = x.clone()
        changed.view(-1)[-1] = value
        return changed

    half = begin(rotation=Rotation(*(part.bfloat16() for part in INPUTS.rotation)))
    attend = ops().attention(INPUTS.weights)

    def run(step: Any, pages: Pages = PAGES) -> Any:
        return attend(None, torch.zeros(TOKENS, HIDDEN), step, pages)

    end = BLOCKS * 16
    assert_refused(
        {
            r"positions must be .* Long tensor \[any\]": lambda: begin(positions=positions.int()),
            "positions must be .* strides": lambda: begin(positions=strided(positions)),
            r"slots must be .* \[6\]": lambda: begin(slots=batch.slots[:5]),
            r"block_tables must be .* \[2, any\]": lambda: begin(block_tables=tables[:1]),
            "block_tables must be .* strides": lambda: begin(block_tables=strided(tables)),
            "positions has 800; accepted are 0 to 799": lambda: begin(
                positions=with_one(positions, 800)
            ),
            "positions has -1": lambda: begin(positions=with_one(positions, -1)),
            "must not have -2": lambda: begin(slots=with_one(batch.slots, -2)),
            "must not have -3": lambda: begin(block_tables=with_one(tables, -3)),
            "query_starts must go from 0 to 6": lambda: begin(query_starts=[0, 1, 5]),
            "from 0 to 6, and have": lambda: begin(query_starts=[1, 6]),
            "a number more than the 2": lambda: begin(query_starts=[]),
            "row 1 of context_lens has 4, and by query_starts 5": lambda: begin(
                context_lens=[21, 4]
            ),
            "row 0 of context_lens has 21, and by query_starts -1": lambda: begin(
                query_starts=[0, -1, 6]
            ),
            r"sin must be .* \[800, 8\]": lambda: begin(
                rotation=Rotation(INPUTS.rotation.cos, INPUTS.rotation.sin[:799])
            ),
            f"slots has {end}; there are {BLOCKS} blocks of 16": lambda: run(
                begin(slots=with_one(batch.slots, end))
            ),
            f"block_tables has {BLOCKS}; there are": lambda: run(
                begin(block_tables=with_one(tables, BLOCKS))
            ),
            f"slots has {LARGEST}": lambda: run(begin(slots=with_one(batch.slots, LARGEST))),
            f"block_tables has {LARGEST}": lambda: run(
                begin(block_tables=with_one(tables, LARGEST))
            ),
            "context_lens has 33; block_tables has 2 blocks of 16": lambda: run(
                begin(context_lens=[33, 5])
            ),
            r"cos must be a contiguous Float tensor \[any, 8\]": lambda: run(half),
        }
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pages_of_another_shape_are_refused(dtype: torch.dtype) -> None:
    inputs = CASE.inputs(dtype)
    keys, values = packed(inputs.pages)
    pages = {
        "keys must be .* not Half": (keys.half(), values),
        "keys must be .* strides": (strided(keys), values),
        "keys must be .* Int": (keys.view(torch.int32), values),
        "values must be": (keys, values[:-1]),
        r"values must be .* on meta": (keys, values.to("meta")),
        r"values must be .*, not .*\[\d+, 1,": (keys, values[:, :1].contiguous()),
        r"keys must be .*\[any, 2,": (keys[:, :1].contiguous(), values[:, :1].contiguous()),
        "multiple of 16 tokens, not of 8": (keys[..., :8, :].contiguous(), values),
    }
    attend = ops().attention(inputs.weights)
    step = ops().begin(inputs.batch, inputs.rotation)
    for words, wrong in pages.items():
        with pytest.raises(ValueError, match=words):
            attend(None, inputs.residual, step, wrong)
        if "any, 2," in words:
            continue  # with pages alone there is nothing that their heads must fit
        with pytest.raises(ValueError, match=words):
            kernels().paged_attention(torch.zeros(TOKENS, 4, 16, dtype=dtype), step, wrong)


def test_heads_that_groups_of_scales_do_not_divide_are_refused() -> None:
    pages = Pages(*torch.zeros(2, BLOCKS, 2, 16, 9, dtype=torch.uint8))
    query = torch.zeros(TOKENS, 4, 16)
    words = "heads of 16 numbers have no scale for every 32"
    assert_refused({words: lambda: kernels().paged_attention(query, begin(), pages)})


def test_numbers_of_another_shape_or_type_are_refused() -> None:
    step, x = begin(), torch.zeros(TOKENS, HIDDEN)
    attend, whole = ops().attention(INPUTS.weights), layers()
    assert_refused(
        {
            r"residual must be .* \[any, 48\]": lambda: attend(None, x[:, :40], step, PAGES),
            "residual must be .* not BFloat16": lambda: attend(None, x.bfloat16(), step, PAGES),
            r"x must be .* \[6, 48\]": lambda: attend(x[:3], x, step, PAGES),
            "residual has 3 tokens, and the step 6": lambda: attend(None, x[:3], step, PAGES),
            "residual must be .* strides": lambda: whole(strided(x), step, [PAGES]),
            "residual has 5 tokens": lambda: whole(x[:5], step, [PAGES]),
            "2 layers' pages for 1 layers": lambda: whole(x, step, [PAGES] * 2),
            r"x must be .* \[6, 48\] on the CPU, not Float \[6, 47\]": lambda: head()(x[:, :47], x),
            r"residual must be .* Float .* not BFloat16": lambda: head()(x, x.bfloat16()),
            r"x must be .* \[any, 48\]": lambda: kernels().Matrix(x, None)(x[:, :40], False),
            "residual must be": lambda: kernels().rms_norm(None, x[0], x[0], 1e-5),
            r"weight must be .* \[48\]": lambda: kernels().rms_norm(None, x, x[0, :40], 1e-5),
            r"query must be \[tokens, heads, head_dim\]": lambda: kernels().paged_attention(
                x, step, PAGES
            ),
            "3 heads of 16 numbers cannot share 2": lambda: kernels().paged_attention(
                torch.zeros(TOKENS, 3, 16), step, PAGES
            ),
            "query must be": lambda: kernels().paged_attention(torch.zeros(5, 4, 16), step, PAGES),
        }
    )


def test_a_step_without_tokens_computes_nothing() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    batch = StepBatch(none, none, none, [0], [], none.view(0, 1), 16)
    out = layers()(torch.zeros(0, HIDDEN), ops().begin(batch, INPUTS.rotation), [PAGES])
    assert out.shape == (0, HIDDEN)


def test_halves_that_are_missing_or_of_two_models_are_refused() -> None:
    attention, mlp = ops().attention(INPUTS.weights), None
    narrow = kernels().Mlp(norm(4), torch.zeros(4, 4), None, torch.zeros(4, 2), None)
    embedding = torch.zeros(30, HIDDEN)
    assert_refused(
        {
            "a model has layers": lambda: kernels().Layers([], None),
            "both of its halves": lambda: kernels().Layers([(attention, mlp)], None),
            "halves of layers of 4 Float and of 48": lambda: kernels().Layers(
                [(attention, narrow)], None
            ),
            "layers and a head": lambda: kernels().Guesser(
                embedding, None, head(), *INPUTS.rotation
            ),
            "a head of 4": lambda: kernels().Guesser(
                embedding, layers(), head(4), *INPUTS.rotation
            ),
            "embedding must be": lambda: kernels().Guesser(
                embedding[:, :4], layers(), head(), *INPUTS.rotation
            ),
        }
    )


def test_guesses_outside_of_the_rows_are_refused() -> None:
    guesser = kernels().Guesser(torch.zeros(30, HIDDEN), layers(), head(), *INPUTS.rotation)
    sampling = kernels().Sampling(0, 1.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, {}, [], [], 0, [])
    tokens = torch.zeros(2, 40, dtype=torch.int64)
    blocks = torch.ones(2, 2, dtype=torch.int64)  # room for 32 tokens
    good = GuessOfRow(1, 4, 1, 5, 2, 3, sampling)

    def guess(block_size: int = 16, tokens: Tensor = tokens, **changes: Any) -> None:
        guesser([good._replace(**changes)], tokens, blocks, block_size, [PAGES])

    guess()
    assert_refused(
        {
            "no row 2 among 2": lambda: guess(row=2),
            "no row -1 among 2": lambda: guess(row=-1),
            "cannot compute 1 tokens from -1": lambda: guess(start=-1),
            "cannot compute 0 tokens": lambda: guess(num_tokens=0),
            "cannot compute 29 tokens from 4 on; it has room for 32": lambda: guess(num_tokens=29),
            "cannot guess 28 tokens behind 5": lambda: guess(num_guesses=28),
            "cannot guess -1 tokens": lambda: guess(num_guesses=-1),
            "of which 6 are its prompt": lambda: guess(num_prompt=6),
            "row 1 has no sampling": lambda: guess(sampling=None),
            "block_size must be positive": lambda: guess(block_size=0),
            "tokens must be .* Long": lambda: guess(tokens=tokens.int()),
            "tokens has 30; accepted are 0 to 29": lambda: guess(tokens=tokens + 30),
        }
    )


def test_draws_outside_of_the_vocabulary_are_refused() -> None:
    logits, history = torch.zeros(2, 30), torch.arange(4)

    def sampling(**changes: Any) -> Any:
        values = {"seed": 0, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        values |= {"repetition": 1.0, "frequency": 0.0, "presence": 0.0, "bias": {}}
        values |= {"bad_words": [], "allowed_ids": [], "min_tokens": 0, "stop_ids": []}
        return kernels().Sampling(*(values | changes).values())

    good = sampling()

    def draw(
        samplings: Sequence[Any] = (good, good),
        logits: Tensor = logits,
        histories: Sequence[Tensor] = (history, history),
        num_prompts: Sequence[int] = (1, 4),
    ) -> Any:
        return kernels().draw(logits, list(samplings), list(histories), list(num_prompts))

    assert len(draw()) == 2
    nan, inf = float("nan"), float("inf")
    assert_refused(
        {
            r"logits must be .* \[2, any\]": lambda: draw(logits=logits[:1]),
            "logits must be .* not Half": lambda: draw(logits=logits.half()),
            "logits must be .* strides": lambda: draw(logits=strided(logits)),
            "there are 0 tokens": lambda: draw(logits=logits[:, :0].contiguous()),
            "1 histories": lambda: draw(histories=[history]),
            "1 lengths": lambda: draw(num_prompts=[1]),
            "line 1 has no sampling": lambda: draw([good, None]),
            "token ids must be .* Long": lambda: draw(histories=[history, history.int()]),
            "5 tokens of a prompt among 4": lambda: draw(num_prompts=[1, 5]),
            "-1 tokens of a prompt": lambda: draw(num_prompts=[-1, 1]),
            "token 30; there are 30": lambda: draw([good, sampling(bias={30: 1.0})]),
            "token 31": lambda: draw([good, sampling(min_tokens=1, stop_ids=[31])]),
            "token 32": lambda: draw([good, sampling(bad_words=[[32]])]),
            "token 33; there are 30": lambda: draw([good, sampling(allowed_ids=[33, 2])]),
            f"token {LARGEST}; there are 30": lambda: draw([good, sampling(bias={LARGEST: 1.0})]),
            "no token -3": lambda: sampling(allowed_ids=[2, -3]),
            "no token -1": lambda: sampling(stop_ids=[-1]),
            "no token -2": lambda: sampling(bias={-2: 1.0}),
            "bad_words is empty": lambda: sampling(bad_words=[[]]),
            "logit_bias of 3 is nan": lambda: sampling(bias={3: nan}),
            "temperature is nan": lambda: sampling(temperature=nan),
            "temperature is inf": lambda: sampling(temperature=inf),
            "temperature is -1": lambda: sampling(temperature=-1.0),
            "top_p is 0": lambda: sampling(top_p=0.0),
            "min_p is 2": lambda: sampling(min_p=2.0),
            "top_k is -1": lambda: sampling(top_k=-1),
            "penalties are 0": lambda: sampling(repetition=0.0),
            "penalties are 1, inf": lambda: sampling(frequency=inf),
            "penalties are 1, 0, nan": lambda: sampling(presence=nan),
        }
    )


def test_a_pool_has_at_least_the_thread_that_asks() -> None:
    assert_refused({"num_threads must be positive, not 0": lambda: kernels().set_threads(0, [])})
