"""Random first halves of a decoder layer with all that they are given, and what must come out.

Owns the strategies that draw them. Must not know which operations are tested.
"""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from charonia.config import Quantization
from charonia.data.model.rotary import rotation_table
from charonia.data.model.spec import RopeSpec
from charonia.data.ops.base import AttentionWeights, Pages, Rotation, StepBatch
from support.batches import random_batch, random_pages
from support.weights import HIDDEN, attention_as_read, random_attention, reference_ops

HEADS = [(4, 4), (4, 2), (9, 3), (4, 1), (14, 2), (32, 1)]
"""Numbers of heads, of queries and of keys."""
HEAD_DIMS = [8, 16, 40, 64, 128]

# Around the borders of a block and of the 256 keys of a partial softmax, and anything between.
_lengths = st.one_of(
    st.sampled_from([1, 15, 16, 17, 255, 256, 257, 511, 512, 513, 640]), st.integers(1, 700)
)
rows_of_a_step = st.lists(
    st.one_of(
        st.tuples(_lengths.map(lambda length: length - 1), st.just(1)),  # decode
        st.tuples(st.just(0), st.integers(2, 50)),  # the whole context
        st.tuples(_lengths, st.integers(2, 30)),  # a later chunk
    ),
    min_size=1,
    max_size=5,
)
"""Rows of (tokens before this step, tokens of this step)."""


def random_step(
    generator: torch.Generator, block_size: int, rows: list[tuple[int, int]]
) -> tuple[StepBatch, int]:
    """A step of these rows, and a number of blocks that holds them and a few more."""
    num_blocks = sum(-(-(before + new) // block_size) for before, new in rows) + 4
    return random_batch(generator, block_size, rows, num_blocks), num_blocks


def rotation_of(head_dim: int, dtype: torch.dtype) -> Rotation:
    """Make the rotation of all positions that `rows_of_a_step` can have."""
    return rotation_table(RopeSpec(theta=1e4), head_dim, 800, dtype, torch.device("cpu"))


@dataclass
class AttentionInputs:
    """Weights and inputs of the first half of a layer; pages are laid out by `ComposedOps`."""

    weights: AttentionWeights
    batch: StepBatch
    rotation: Rotation
    x: Tensor | None  # [tokens, hidden]
    residual: Tensor  # [tokens, hidden]
    pages: Pages

    def expected(self, quantization: Quantization | None = None) -> Tensor:
        """Compute the reference's result; `residual` and `pages` are changed in place."""
        ops = reference_ops(quantization)
        weights = attention_as_read(self.weights, quantization)
        step = ops.begin(self.batch, self.rotation)
        return ops.attention(weights)(self.x, self.residual, step, self.pages)


@dataclass(frozen=True)
class AttentionCase:
    """Drawn parameters, before there are tensors."""

    seed: int
    rows: list[tuple[int, int]]
    block_size: int = 16
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 16
    has_bias: bool = True
    has_head_norms: bool = True
    has_x: bool = True

    def inputs(self, dtype: torch.dtype) -> AttentionInputs:
        """The tensors; the same for the same case."""
        generator = torch.Generator().manual_seed(self.seed)
        weights = random_attention(
            generator,
            self.heads,
            self.head_dim,
            dtype,
            has_bias=self.has_bias,
            has_head_norms=self.has_head_norms,
        )
        batch, num_blocks = random_step(generator, self.block_size, self.rows)
        pages = random_pages(
            generator, num_blocks, self.block_size, self.heads[1], self.head_dim, dtype
        )
        x, residual = torch.randn(2, len(batch.positions), HIDDEN, generator=generator).to(dtype)
        rotation = rotation_of(self.head_dim, dtype)
        return AttentionInputs(weights, batch, rotation, x if self.has_x else None, residual, pages)


attention_cases = st.builds(
    AttentionCase,
    seed=st.integers(0, 2**31),
    rows=rows_of_a_step,
    block_size=st.sampled_from([16, 32]),
    heads=st.sampled_from(HEADS),
    head_dim=st.sampled_from(HEAD_DIMS),
    has_bias=st.booleans(),
    has_head_norms=st.booleans(),
    has_x=st.booleans(),
)
