"""What the CPU kernels compute for a token depends on nothing but its context, bit for bit.

Neither on what else is in the batch, nor on how a prompt is cut, where its blocks lie, or how many
threads there are. Compared is all that a model gives: logits, and the K and V in its pages.
"""

import itertools
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from charonia.config import Quantization
from charonia.data.comm import Place
from charonia.data.kv_store import KVStore, kv_layout
from charonia.data.model.decoder import Decoder
from charonia.data.model.parameters import Parameters
from charonia.data.model.spec import ModelSpec, RopeSpec
from charonia.data.ops.base import StepBatch
from charonia.data.ops.native.ops import NativeOps
from support.kernels import ISAS, native_ops, unpacked
from support.long import one_in
from support.weights import QUANTIZATIONS

CPU = torch.device("cpu")
MAX_LEN = 2200
VOCAB_SIZE = 97

Step = list[tuple[int, int]]
"""What a step computes: sequences and how many tokens of each."""

DTYPES = (torch.float32, torch.bfloat16)
KV_CACHE_DTYPES = ("auto", "int8", "fp8", "int4")


def name_of(value: object) -> str:
    """Of a parameter, in the name of a test."""
    match value:
        case ModelSpec():
            return f"{value.num_heads} {value.head_dim}"
        case None:
            return "unrounded"
        case _:
            return str(value)


def spec_of(num_heads: int, num_kv_heads: int, head_dim: int, *, qk_norm: bool) -> ModelSpec:
    return ModelSpec(
        architecture="Qwen3ForCausalLM",
        vocab_size=VOCAB_SIZE,
        hidden_size=56,
        intermediate_size=74,
        num_layers=2,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=MAX_LEN,
        sliding_window=None,
        rms_norm_eps=1e-5,
        rope=RopeSpec(theta=10_000.0),
        qkv_bias=not qk_norm,
        output_bias=False,
        mlp_bias=not qk_norm,
        qk_norm=qk_norm,
        is_tied=True,
        dtype="float32",
        eos_token_ids=(),
    )


SPECS = [
    spec_of(4, 2, 16, qk_norm=True),
    spec_of(9, 3, 40, qk_norm=False),
    spec_of(4, 1, 64, qk_norm=False),
    spec_of(4, 4, 128, qk_norm=True),
    spec_of(14, 2, 8, qk_norm=False),
]


def specs_for(kv_cache_dtype: str) -> list[ModelSpec]:
    """Those whose heads can be kept so."""
    return [spec for spec in SPECS if kv_cache_dtype != "int4" or spec.head_dim % 32 == 0]


@dataclass
class Model:
    """A random model over pages of its own.

    The same arguments make the same weights; `seed` shuffles the blocks alone.
    """

    spec: ModelSpec
    dtype: torch.dtype
    ops: NativeOps
    block_size: int
    lengths: list[int]
    seed: int = 0
    kv_cache_dtype: str = "auto"
    cursors: list[int] = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        parameters = Parameters(self.spec, self.dtype, CPU)
        for tensor in (
            piece.memory for wanted in parameters.checkpoint_tensors() for piece in wanted.pieces
        ):
            scale = 2.0 / tensor.shape[-1] ** 0.5 if tensor.dim() == 2 else 1.0
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * scale)
        self.tokens = [
            torch.randint(VOCAB_SIZE, (length,), generator=generator) for length in self.lengths
        ]
        self.decoder = Decoder(self.spec, parameters, self.ops, num_positions=MAX_LEN)
        layout = kv_layout(
            self.spec, self.ops, self.block_size, self.dtype, Place(), self.kv_cache_dtype
        )
        blocks = [-(-length // self.block_size) for length in self.lengths]
        shapes = self.ops.page_shapes(layout)
        self.pages = KVStore(layout, shapes, sum(blocks) + 5, CPU).pages
        generator.manual_seed(self.seed)
        free = iter((torch.randperm(sum(blocks) + 4, generator=generator) + 1).tolist())
        self.tables = torch.zeros(len(blocks), max(blocks), dtype=torch.int64)
        for row, count in enumerate(blocks):
            self.tables[row, :count] = torch.tensor([next(free) for _ in range(count)])
        self.cursors = [0] * len(self.lengths)

    def run(self, steps: list[Step]) -> tuple[list[Tensor], list[Tensor]]:
        """Compute all sequences by these steps.

        Returns:
            Of each sequence the logits of all tokens, and its K and V in order of position.
        """
        logits: list[list[Tensor]] = [[] for _ in self.lengths]
        for step in steps:
            batch = self._batch(step)
            out = self.decoder.logits(self.decoder.hidden_states(batch, self.pages))
            for (sequence, _), part in zip(
                step, out.tensor_split(batch.query_starts[1:-1]), strict=True
            ):
                logits[sequence].append(part)
        assert self.cursors == self.lengths
        return [torch.cat(parts) for parts in logits], [
            self._stored(sequence) for sequence in range(len(self.lengths))
        ]

    def _batch(self, step: Step) -> StepBatch:
        positions, token_ids, slots, starts, lens = [], [], [], [0], []
        for sequence, count in step:
            first = self.cursors[sequence]
            self.cursors[sequence] += count
            where = torch.arange(first, first + count)
            positions.append(where)
            token_ids.append(self.tokens[sequence][where])
            blocks = self.tables[sequence][where // self.block_size]
            slots.append(blocks * self.block_size + where % self.block_size)
            starts.append(starts[-1] + count)
            lens.append(first + count)
        width = -(-max(lens) // self.block_size)
        return StepBatch(
            token_ids=torch.cat(token_ids),
            positions=torch.cat(positions),
            slots=torch.cat(slots),
            query_starts=starts,
            context_lens=lens,
            block_tables=self.tables[[sequence for sequence, _ in step], :width].contiguous(),
            block_size=self.block_size,
        )

    def _stored(self, sequence: int) -> Tensor:
        length = self.lengths[sequence]
        blocks = self.tables[sequence, : -(-length // self.block_size)]
        return torch.stack(
            [
                part.contiguous().view(torch.uint8)[blocks].flatten(0, 1)[:length]
                for pages in self.pages
                for part in unpacked(pages, self.spec.head_dim)
            ]
        )


@st.composite
def schedules(draw: st.DrawFn) -> tuple[list[int], list[Step]]:
    """Lengths of some sequences, and steps that compute them together, cut anywhere."""
    length = st.integers(1, 80) | st.sampled_from([255, 257, 513, 520, 600])
    lengths = draw(st.lists(length, min_size=1, max_size=4))
    left = list(lengths)
    steps: list[Step] = []
    size = st.sampled_from([1, 2, 3, 7, 16, 31, 48, 100, 257, 600])
    while any(left):
        pending = [sequence for sequence, count in enumerate(left) if count]
        chosen = draw(st.lists(st.sampled_from(pending), min_size=1, unique=True))
        # Towards the end of many steps whatever is left, so that they do not become hundreds.
        step = [
            (sequence, left[sequence] if len(steps) > 25 else min(left[sequence], draw(size)))
            for sequence in chosen
        ]
        for sequence, count in step:
            left[sequence] -= count
        steps.append(step)
    return lengths, steps


def assert_equal(
    actual: tuple[list[Tensor], list[Tensor]], expected: tuple[list[Tensor], list[Tensor]]
) -> None:
    for logits, other in zip(actual[0], expected[0], strict=True):
        assert torch.equal(logits, other)
    for stored, other in zip(actual[1], expected[1], strict=True):
        assert torch.equal(stored, other)


@pytest.mark.parametrize(
    ("isa", "dtype", "quantization", "kv_cache_dtype"),
    one_in(11, itertools.product(ISAS, DTYPES, QUANTIZATIONS, KV_CACHE_DTYPES)),
    ids=name_of,
)
@settings(max_examples=25)
@given(
    schedule=schedules(),
    data=st.data(),
    block_size=st.sampled_from([16, 32, 48]),
    seed=st.integers(0, 100),
    num_threads=st.sampled_from([1, 2, 3]),
)
def test_a_token_does_not_depend_on_its_batch_its_chunk_its_blocks_or_the_threads(
    isa: str,
    dtype: torch.dtype,
    quantization: Quantization | None,
    kv_cache_dtype: str,
    schedule: tuple[list[int], list[Step]],
    data: st.DataObject,
    block_size: int,
    seed: int,
    num_threads: int,
) -> None:
    lengths, steps = schedule
    spec = data.draw(st.sampled_from(specs_for(kv_cache_dtype)))
    ops = native_ops(isa, 1, quantization=quantization)
    alone = Model(spec, dtype, ops, block_size, lengths, kv_cache_dtype=kv_cache_dtype)
    expected = alone.run([[(sequence, length)] for sequence, length in enumerate(lengths)])
    assert all(part.isfinite().all() for part in expected[0])
    ops = native_ops(isa, num_threads, quantization=quantization)
    together = Model(spec, dtype, ops, block_size, lengths, seed, kv_cache_dtype)
    assert_equal(together.run(steps), expected)


@pytest.mark.parametrize(
    ("isa", "dtype", "quantization", "kv_cache_dtype", "spec"),
    one_in(
        17,
        (
            case
            for case in itertools.product(ISAS, DTYPES, QUANTIZATIONS, KV_CACHE_DTYPES, SPECS)
            if case[-1] in specs_for(case[-2])
        ),
    ),
    ids=name_of,
)
def test_token_by_token_with_two_threads_equals_all_at_once_with_one(
    isa: str,
    dtype: torch.dtype,
    quantization: Quantization | None,
    kv_cache_dtype: str,
    spec: ModelSpec,
) -> None:
    """Decoding past 512 tokens: with two threads few rows have their contexts split."""
    lengths = [530, 3, 270]
    ops = native_ops(isa, 1, quantization=quantization)
    whole = Model(spec, dtype, ops, 16, lengths, kv_cache_dtype=kv_cache_dtype)
    expected = whole.run([[(0, 530), (1, 3), (2, 270)]])
    steps: list[Step] = [[(0, 505)], [(2, 250)], [(0, 5), (2, 1)]]
    steps += [[(2, 1), (0, 1)] for _ in range(19)]
    steps += [[(0, 1)], [(1, 2)], [(1, 1)]]
    ops = native_ops(isa, 2, quantization=quantization)
    by_token = Model(spec, dtype, ops, 16, lengths, 1, kv_cache_dtype)
    assert_equal(by_token.run(steps), expected)


@pytest.mark.parametrize(
    ("isa", "dtype", "kv_cache_dtype", "spec"),
    one_in(
        13,
        (
            case
            for case in itertools.product(ISAS, DTYPES, KV_CACHE_DTYPES, SPECS)
            if case[-1] in specs_for(case[-2])
        ),
    ),
    ids=name_of,
)
def test_a_long_prompt_does_not_depend_on_its_chunks(
    isa: str, dtype: torch.dtype, kv_cache_dtype: str, spec: ModelSpec
) -> None:
    """Chunks of fewer queries than are multiplied at once, and of more than an item has."""
    length = 2150
    whole = Model(spec, dtype, native_ops(isa, 2), 16, [length], kv_cache_dtype=kv_cache_dtype)
    expected = whole.run([[(0, length)]])
    for chunks in ([2048, 1, 1], [512, 300, 1000, 256], [1000, 77, 33, 17, 16, 15, 5, 3, 2, 700]):
        chunks.append(length - sum(chunks))
        ops = native_ops(isa, 1 + len(chunks) % 2)
        cut = Model(spec, dtype, ops, 32, [length], 1, kv_cache_dtype)
        assert_equal(cut.run([[(0, chunk)] for chunk in chunks]), expected)


@pytest.mark.parametrize("isa", ISAS)
def test_many_rows_equal_each_alone(isa: str) -> None:
    """More rows than a tile of any height or a part of a product holds."""
    lengths = [1 + row % 5 for row in range(230)]
    spec, dtype = SPECS[0], torch.bfloat16
    alone = Model(spec, dtype, native_ops(isa, 1), 16, lengths)
    expected = alone.run([[(row, length)] for row, length in enumerate(lengths)])
    for num_rows in (1, 2, 3, 11, 12, 13, 25, 97, 191, 193, 230):
        together = Model(spec, dtype, native_ops(isa, 2), 16, lengths[:num_rows])
        together.tokens = alone.tokens
        actual = together.run([[(row, length) for row, length in enumerate(lengths[:num_rows])]])
        assert_equal(actual, (expected[0][:num_rows], expected[1][:num_rows]))
