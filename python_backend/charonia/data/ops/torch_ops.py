"""The operations in plain torch, fused where torch supports it; the same code for CPU and CUDA.

Owns splitting a step's attention into calls of `scaled_dot_product_attention`. Must not know names
of weights, or plans.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from charonia.data.ops.base import Pages, Rotation, StepBatch
from charonia.data.ops.composed import PagedAttention
from charonia.data.ops.kv_format import Quantized, format_of

_NUMBERS_AT_ONCE = 1 << 22
"""Numbers that are read from quantized pages at a time. They take some 50 MB beside the result, and
are enough to keep a GPU busy."""


class TorchOps:
    """Implements `ops.composed.Primitives`."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        total = x if residual is None else residual.add_(x)
        return F.rms_norm(total, weight.shape, weight, eps), total

    def rope_and_write(
        self, qkv: Tensor, num_heads: int, rotation: Rotation, slots: Tensor, pages: Pages
    ) -> Tensor:
        num_kv_heads, head_dim = pages.keys.shape[2], qkv.shape[-1]
        rotated_heads = num_heads + num_kv_heads
        tokens = qkv.shape[0]
        # A head as its two halves, [tokens, heads, 2, dim / 2], and the matching angles.
        halves = qkv[:, :rotated_heads].view(tokens, rotated_heads, 2, head_dim // 2)
        cos, sin = rotation.cos[:, None], rotation.sin[:, None]  # [tokens, 1, dim / 2]
        rotated = halves * cos[:, None]
        rotated[:, :, 0].addcmul_(halves[:, :, 1], sin, value=-1)
        rotated[:, :, 1].addcmul_(halves[:, :, 0], sin)
        rotated = rotated.view(tokens, rotated_heads, head_dim)
        _store(pages.keys, slots, rotated[:, num_heads:])
        _store(pages.values, slots, qkv[:, rotated_heads:])
        return rotated[:, :num_heads]

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def paged_attention(self, batch: StepBatch, dtype: torch.dtype) -> PagedAttention:
        return _TorchAttention(batch, dtype)


def _store(pages: Tensor, slots: Tensor, x: Tensor) -> None:
    """Write `x` [tokens, kv_heads, head_dim] to its slots [tokens], made finite."""
    encoded = format_of(pages).encode(x)
    if pages.dtype.itemsize == 1:  # as bytes: torch cannot copy float8 by index
        pages, encoded = pages.view(torch.uint8), encoded.view(torch.uint8)
    pages.view(-1, *pages.shape[2:]).index_copy_(0, slots, encoded)


@dataclass(frozen=True)
class _DecodeGroup:
    """Rows that compute one token each and have contexts of similar length."""

    tokens: Tensor  # [rows]
    block_ids: Tensor  # [rows * blocks]
    # Added to the scores: 0 within a row's context, -inf after it.
    bias: Tensor  # [rows, 1, 1, blocks * block_size]


@dataclass(frozen=True)
class _Chunk:
    """One row that computes several tokens."""

    tokens: slice
    context_len: int
    block_ids: Tensor  # [blocks]
    # Added to the scores; None if the chunk is the whole context so far, which
    # `scaled_dot_product_attention` masks itself.
    bias: Tensor | None  # [tokens, context_len]


class _TorchAttention:
    """Attention of one step: decode rows in groups, prefill chunks row by row.

    A group gathers the blocks of its rows into one padded tensor. The shortest row of a group is at
    least half as long as the longest, so less than half of the tensor is padding, and there are at
    most log2(blocks of the longest row) + 1 groups.
    """

    def __init__(self, batch: StepBatch, dtype: torch.dtype) -> None:
        self._chunks: list[_Chunk] = []
        decode_rows: list[int] = []
        starts = batch.query_starts
        for row in range(len(batch.context_lens)):
            if starts[row + 1] - starts[row] == 1:
                decode_rows.append(row)
            else:
                self._chunks.append(_chunk(batch, row, dtype))
        groups = _similar_lengths(batch, decode_rows)
        self._groups = [_decode_group(batch, rows, dtype) for rows in groups]
        self._is_one_group = len(self._groups) == 1 and not self._chunks

    def __call__(self, query: Tensor, pages: Pages) -> Tensor:
        if self._is_one_group:
            return _attend_group(self._groups[0], query, pages)
        out = torch.empty_like(query)
        for group in self._groups:
            out[group.tokens] = _attend_group(group, query[group.tokens], pages)
        for chunk in self._chunks:
            out[chunk.tokens] = _attend_chunk(chunk, query[chunk.tokens], pages)
        return out


def _blocks_of(batch: StepBatch, row: int) -> int:
    return -(-batch.context_lens[row] // batch.block_size)


def _similar_lengths(batch: StepBatch, rows: list[int]) -> list[list[int]]:
    """Split rows into groups; the shortest of each has at least half the blocks of the longest.

    Within a group rows stay in order, so a single group of all rows is the unchanged batch.
    """
    groups: list[list[int]] = []
    shortest = 0
    for row in sorted(rows, key=lambda row: -batch.context_lens[row]):
        blocks = _blocks_of(batch, row)
        if not groups or blocks < shortest:
            groups.append([])
            shortest = (blocks + 1) // 2
        groups[-1].append(row)
    return [sorted(group) for group in groups]


def _decode_group(batch: StepBatch, rows: list[int], dtype: torch.dtype) -> _DecodeGroup:
    device = batch.block_tables.device
    num_blocks = max(_blocks_of(batch, row) for row in rows)
    row_ids, tokens, context_lens = torch.tensor(
        [rows, [batch.query_starts[row] for row in rows], [batch.context_lens[row] for row in rows]]
    ).to(device)
    positions = torch.arange(num_blocks * batch.block_size, device=device)
    bias = torch.zeros(len(rows), positions.shape[0], dtype=dtype, device=device)
    bias.masked_fill_(positions >= context_lens[:, None], float("-inf"))
    return _DecodeGroup(
        tokens=tokens,
        block_ids=batch.block_tables[:, :num_blocks].index_select(0, row_ids).flatten(),
        bias=bias[:, None, None],
    )


def _chunk(batch: StepBatch, row: int, dtype: torch.dtype) -> _Chunk:
    start, end = batch.query_starts[row : row + 2]
    context_len = batch.context_lens[row]
    bias = None
    if end - start != context_len:
        bias = torch.full(
            (end - start, context_len),
            float("-inf"),
            dtype=dtype,
            device=batch.block_tables.device,
        ).triu_(diagonal=context_len - (end - start) + 1)
    return _Chunk(
        tokens=slice(start, end),
        context_len=context_len,
        block_ids=batch.block_tables[row, : _blocks_of(batch, row)],
        bias=bias,
    )


def _gather(pages: Tensor, block_ids: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Read whole blocks, [blocks * block_size, kv_heads, head_dim].

    Quantized blocks are read a few at a time, because each number takes two float32 on the way.
    """
    kv_format, (_, block_size, kv_heads, _) = format_of(pages), pages.shape

    def read(ids: Tensor) -> Tensor:
        blocks = pages.view(pages.shape[0], -1).index_select(0, ids)
        return kv_format.decode(blocks.view(-1, *pages.shape[2:]), dtype)

    at_once = max(1, _NUMBERS_AT_ONCE // (block_size * kv_heads * head_dim))  # blocks
    if not isinstance(kv_format, Quantized) or len(block_ids) <= at_once:
        return read(block_ids)
    shape = (block_size, kv_heads, head_dim)
    numbers = torch.empty(len(block_ids), *shape, dtype=dtype, device=pages.device)
    for first in range(0, len(block_ids), at_once):
        some = slice(first, first + at_once)
        numbers[some] = read(block_ids[some]).view(-1, *shape)
    return numbers.flatten(0, 1)


def _attend_group(group: _DecodeGroup, query: Tensor, pages: Pages) -> Tensor:
    rows, num_heads, head_dim = query.shape
    num_kv_heads = pages.keys.shape[2]
    # Heads that share a KV head are passed as queries of that head, so K and V are read once for
    # all.
    grouped = query.reshape(rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    keys, values = (
        _gather(part, group.block_ids, head_dim, query.dtype).view(rows, -1, num_kv_heads, head_dim)
        for part in pages
    )
    out = F.scaled_dot_product_attention(
        grouped, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=group.bias
    )
    return out.reshape(rows, num_heads, head_dim)


def _attend_chunk(chunk: _Chunk, query: Tensor, pages: Pages) -> Tensor:
    keys, values = (
        _gather(part, chunk.block_ids, query.shape[-1], query.dtype)[: chunk.context_len]
        for part in pages
    )
    out = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],  # [1, heads, tokens, dim]
        keys.transpose(0, 1)[None],  # [1, kv_heads, context, dim]
        values.transpose(0, 1)[None],
        attn_mask=chunk.bias,
        is_causal=chunk.bias is None,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)
