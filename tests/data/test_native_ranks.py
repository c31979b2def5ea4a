"""Layers whose heads and inner values are shared out among ranks, which add up what they compute.

Every rank has the same to the bit, whatever the batch, and it is what one process computes with all
of the weights but for the order of its sums.
"""

import itertools
import random
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from charonia.config import Quantization
from charonia.data.comm import Place
from charonia.data.kv_store import KVStore
from charonia.data.model.parameters import Parameters
from charonia.data.model.rotary import rotation_table
from charonia.data.model.spec import ModelSpec, RopeSpec
from charonia.data.ops.base import StepBatch
from charonia.data.ops.kv_format import format_name
from charonia.data.ops.native.ops import NativeOps
from charonia.errors import RankLostError
from charonia.parallel.comm import SharedMemoryComm
from charonia.protocol import KVLayout
from support.kernels import ISAS, kernels_for, native_ops
from support.long import long, one_in
from support.memory import limited_memory
from support.ranks import LONG, Ranks, shared_memory

CPU = torch.device("cpu")
BLOCK_SIZE = 16
MAX_LEN = 800

Step = list[tuple[int, int]]
"""What a step computes: sequences and how many tokens of each."""


class Weights(NamedTuple):
    """What layers, K and V are kept in, and how far ranks may be from one process."""

    dtype: torch.dtype
    quantization: Quantization | None
    tolerance: float
    kv_cache_dtype: str = "auto"

    def __str__(self) -> str:
        weights = str(self.dtype).removeprefix("torch.")
        if self.quantization is not None:
            weights = f"{self.quantization} in {weights}"
        is_quantized = self.kv_cache_dtype != "auto"
        return weights + f" with K and V in {self.kv_cache_dtype}" * is_quantized


WEIGHTS = (
    Weights(torch.float32, None, 1e-5),
    Weights(torch.bfloat16, None, 2e-2),
    # Each rank's part of a row of weights has a scale of its own.
    Weights(torch.float32, "int8", 4e-2),
    Weights(torch.bfloat16, "int8", 4e-2),
    Weights(torch.bfloat16, "w8a8", 8e-2),
    # What the order of sums changes decides between two codes, at times.
    Weights(torch.float32, None, 1e-2, "int8"),
    Weights(torch.bfloat16, None, 4e-2, "fp8"),
    Weights(torch.bfloat16, None, 6e-2, "int4"),
)


def spec_of(num_heads: int, num_kv_heads: int, head_dim: int, *, qk_norm: bool) -> ModelSpec:
    return ModelSpec(
        architecture="Qwen3ForCausalLM",
        vocab_size=10,
        hidden_size=56,
        intermediate_size=74,  # not even numbers in each of two parts
        num_layers=2,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=MAX_LEN,
        sliding_window=None,
        rms_norm_eps=1e-5,
        rope=RopeSpec(theta=10_000.0),
        qkv_bias=not qk_norm,
        output_bias=not qk_norm,
        mlp_bias=not qk_norm,
        qk_norm=qk_norm,
        is_tied=True,
        dtype="float32",
        eos_token_ids=(),
    )


SPECS = [
    spec_of(4, 2, 16, qk_norm=True),
    spec_of(12, 4, 40, qk_norm=False),
    spec_of(8, 1, 64, qk_norm=False),
]


def random_tensor(name: str, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator) / (shape[-1] ** 0.5 if len(shape) == 2 else 1)


class Part:
    """A rank's part of all layers, over pages of its own."""

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        ops: NativeOps,
        exchange: Any = None,
        kv_cache_dtype: str = "auto",
    ) -> None:
        self.spec, self.dtype, self.ops = spec, dtype, ops
        self.kept_in = format_name(kv_cache_dtype, dtype, spec.head_dim)
        place = Place(exchange.rank, exchange.size) if exchange else Place()
        parameters = Parameters(spec, dtype, CPU, place)
        for tensor in parameters.checkpoint_tensors():
            whole = random_tensor(tensor.name, tensor.shape)
            for piece in tensor.pieces:
                piece.memory.copy_(whole[piece.index])
        self.num_kv_heads = parameters.layers[0][0].weights.num_kv_heads
        layers = [[part.prepare(ops) for part in layer] for layer in parameters.layers]
        self.layers = ops.layers(layers, SharedMemoryComm(exchange) if exchange else None)
        self.rotation = rotation_table(spec.rope, spec.head_dim, MAX_LEN, dtype, CPU)

    def run(self, lengths: list[int], steps: list[Step]) -> list[Tensor]:
        """Compute sequences by these steps.

        Returns:
            Of each sequence the stream behind the last layer, [tokens, hidden]; and the pages.
        """
        width = -(-max(lengths) // BLOCK_SIZE)
        layout = KVLayout(
            num_layers=self.spec.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.spec.head_dim,
            block_size=BLOCK_SIZE,
            dtype=self.kept_in,
            bytes_per_block=0,
        )
        shapes = self.ops.page_shapes(layout)
        pages = KVStore(layout, shapes, 1 + width * len(lengths), CPU).pages
        shape = self.spec.hidden_size
        given = [random_tensor(f"{i}", (length, shape)) for i, length in enumerate(lengths)]
        cursors = [0] * len(lengths)
        streams: list[list[Tensor]] = [[] for _ in lengths]
        for step in steps:
            batch = batch_of(step, cursors, width)
            parts = []
            for sequence, count in step:
                parts.append(given[sequence][cursors[sequence] :][:count])
                cursors[sequence] += count
            residual = torch.cat(parts).to(self.dtype)
            out = self.layers(residual, self.ops.begin(batch, self.rotation), pages)
            for (sequence, _), (begin, end) in zip(step, pairwise(batch.query_starts), strict=True):
                streams[sequence].append(residual[begin:end].float() + out[begin:end].float())
        assert cursors == lengths
        stored = [part.view(torch.uint8) for pair in pages for part in pair]
        return [torch.cat(some) for some in streams] + stored


def batch_of(step: Step, cursors: list[int], width: int) -> StepBatch:
    """Each sequence has `width` blocks in a row."""
    where = [torch.arange(cursors[sequence], cursors[sequence] + count) for sequence, count in step]
    first = [1 + sequence * width for sequence, _ in step]
    starts = [0]
    for _, count in step:
        starts.append(starts[-1] + count)
    slots = [block * BLOCK_SIZE + at for block, at in zip(first, where, strict=True)]
    return StepBatch(
        token_ids=torch.zeros(starts[-1], dtype=torch.int64),
        positions=torch.cat(where),
        slots=torch.cat(slots),
        query_starts=starts,
        context_lens=[cursors[sequence] + count for sequence, count in step],
        block_tables=torch.tensor(first)[:, None] + torch.arange(width),
        block_size=BLOCK_SIZE,
    )


def random_steps(lengths: list[int], seed: int) -> list[Step]:
    """All tokens of all sequences, cut and put together anyhow."""
    choose = random.Random(seed)
    left = list(lengths)
    steps: list[Step] = []
    while any(left):
        step = []
        for sequence, count in enumerate(left):
            if count and (choose.random() < 0.6 or not any(left[sequence + 1 :])):
                size = min(count, choose.choice([1, 2, 7, 40, 130, 500]))
                step.append((sequence, size))
                left[sequence] -= size
        steps += [step] if step else []
    return steps


def compute(exchange: Any, isa: str, spec: ModelSpec, weights: Weights) -> list[Any]:
    """Compute the same by many schedules and numbers of threads; return the streams."""
    lengths = [700, 520, 33, 1]  # as many numbers as go in several pieces
    alone = [[(sequence, length)] for sequence, length in enumerate(lengths)]
    together = [list(enumerate(lengths))]
    ops = native_ops(isa, 1, quantization=weights.quantization)
    part = Part(spec, weights.dtype, ops, exchange, weights.kv_cache_dtype)
    expected = part.run(lengths, alone)
    before = ops.kernels.phase_seconds()["exchange"]
    for num_threads, steps in [
        (1, together),
        (2, together),
        (1, random_steps(lengths, 1)),
        (2, random_steps(lengths, 2)),
    ]:
        native_ops(isa, num_threads)
        for actual, wanted in zip(part.run(lengths, steps), expected, strict=True):
            assert torch.equal(actual, wanted)
    assert (ops.kernels.phase_seconds()["exchange"] > before) == (exchange is not None)
    return [stream.numpy() for stream in expected[: len(lengths)]]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.close()


def name_of(value: object) -> str:
    is_spec = isinstance(value, ModelSpec)
    return f"{value.num_heads} {value.num_kv_heads}" if is_spec else str(value)


@pytest.mark.parametrize(
    ("isa", "weights", "size", "spec"),
    one_in(
        11,
        (
            case
            for case in itertools.product(ISAS, WEIGHTS, (2, 4), SPECS)
            if case[1].kv_cache_dtype != "int4" or case[3].head_dim % 32 == 0
        ),
    ),
    ids=name_of,
)
def test_ranks_have_the_same_whatever_the_batch_and_what_one_process_has(
    ranks: Ranks, isa: str, weights: Weights, size: int, spec: ModelSpec
) -> None:
    first, *others = ranks.run(size, isa, compute, isa, spec, weights)
    for streams in others:
        for stream, same in zip(streams, first, strict=True):
            assert (stream == same).all()
    for stream, expected in zip(first, compute(None, isa, spec, weights), strict=True):
        expected = torch.from_numpy(expected)
        error = (torch.from_numpy(stream) - expected).norm() / expected.norm()
        assert error < weights.tolerance


def broadcast_and_compute(exchange: Any, isa: str, spec: ModelSpec) -> list[Any]:
    """The others are late; what rank 0 gives must stay until they have read it."""
    part = Part(spec, torch.float32, native_ops(isa, 1), exchange)
    if exchange.rank:
        time.sleep(0.2)
    given = []
    for value in (1.0, 2.0):
        given.append(torch.full((2000,), value * (exchange.rank == 0)))
        exchange.broadcast(given[-1], 0)
    part.run([30], [[(0, 30)]])
    return [x.unique().tolist() for x in given]


def test_what_is_broadcast_before_layers_run_is_not_written_over(ranks: Ranks) -> None:
    results = ranks.run(2, ISAS[0], broadcast_and_compute, ISAS[0], SPECS[0])
    assert results == [[[1.0], [2.0]]] * 2


def test_layers_without_their_ranks_end_with_an_error_and_leave_the_kernels_free() -> None:
    ops = native_ops(ISAS[0])
    alone = Part(SPECS[0], torch.float32, ops)
    steps: list[Step] = [[(0, 5)]]
    expected = alone.run([5], steps)[0]
    with shared_memory(2) as fd:
        exchange = kernels_for(ISAS[0]).Exchange(fd, 1, 2, 0.1)
        with pytest.raises(
            RankLostError, match=r"rank 0 of the group did not answer within 0\.1 s"
        ):
            Part(SPECS[0], torch.float32, ops, exchange).run([5], steps)
    assert torch.equal(alone.run([5], steps)[0], expected)


def run_out_of_memory(exchange: Any, isa: str) -> str:
    """Compute, where rank 1 has no memory in the middle; say how it ends."""
    part = Part(SPECS[0], torch.float32, native_ops(isa, 1), exchange)
    part.run([40], [[(0, 40)]])
    layers = part.layers

    def without_memory(*args: Any) -> Tensor:
        with limited_memory(0):
            return layers(*args)

    if exchange.rank == 1:
        part.layers = without_memory
    with pytest.raises((RankLostError, RuntimeError, MemoryError)) as caught:
        part.run([700] * 100, [[(i, 700) for i in range(100)]])
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_rank_that_fails_in_the_middle_of_layers_ends_the_others_waiting() -> None:
    ranks = Ranks(2)
    first, second = ranks.run(2, ISAS[0], run_out_of_memory, ISAS[0])
    ranks.close()
    assert first == "RankLostError: rank 1 of the group has failed in a step"
    assert "memory" in second or "bad_alloc" in second


@long
def test_layers_that_wait_for_ranks_let_other_threads_run() -> None:
    """Else no thread could tell them that the wait is in vain."""
    with shared_memory(2) as fd, ThreadPoolExecutor(1) as threads:
        exchange = kernels_for(ISAS[0]).Exchange(fd, 0, 2, LONG)
        part = Part(SPECS[0], torch.float32, native_ops(ISAS[0]), exchange)
        running = threads.submit(part.run, [5], [[(0, 5)]])
        assert not running.done()
        exchange.abort()
        with pytest.raises(RankLostError, match="was aborted"):
            running.result()
