"""The reference operations: the plain formulas, in float32, token by token where that is clearest.

Owns correctness: every other implementation is tested against this one. Speed does not matter.
"""

import math

import torch
from torch import Tensor

from charonia.data.ops.base import Pages, Rotation, StepBatch
from charonia.data.ops.composed import PagedAttention
from charonia.data.ops.kv_format import format_of


class ReferenceOps:
    """Implements `ops.composed.Primitives`."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = x.float() @ weight.float().T
        if bias is not None:
            y = y + bias.float()
        return y.to(x.dtype)

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        total = x if residual is None else x + residual
        wide = total.float()
        scale = torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps)
        return (wide * scale * weight.float()).to(x.dtype), total

    def rope_and_write(
        self, qkv: Tensor, num_heads: int, rotation: Rotation, slots: Tensor, pages: Pages
    ) -> Tensor:
        num_kv_heads = pages.keys.shape[2]
        queries, keys, values = torch.split(qkv, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        queries, keys = _rotate(queries, rotation), _rotate(keys, rotation)
        block_size, kv_format = pages.keys.shape[1], format_of(pages.keys)
        for token, slot in enumerate(slots.tolist()):
            block, offset = divmod(slot, block_size)
            pages.keys[block, offset] = kv_format.encode(keys[token])
            pages.values[block, offset] = kv_format.encode(values[token])
        return queries

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)

    def paged_attention(self, batch: StepBatch, dtype: torch.dtype) -> PagedAttention:
        def attend(query: Tensor, pages: Pages) -> Tensor:
            out = torch.empty_like(query)
            for row, context_len in enumerate(batch.context_lens):
                start, end = batch.query_starts[row : row + 2]
                keys = _read(pages.keys, batch.block_tables[row], context_len)
                values = _read(pages.values, batch.block_tables[row], context_len)
                for token in range(start, end):
                    seen = context_len - (end - 1 - token)
                    out[token] = _attend_one(query[token], keys[:seen], values[:seen])
            return out

        return attend


def _rotate(x: Tensor, rotation: Rotation) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)  # [tokens, heads, dim / 2]
    cos, sin = rotation.cos.float()[:, None], rotation.sin.float()[:, None]
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)


def _read(pages: Tensor, block_ids: Tensor, context_len: int) -> Tensor:
    """Read a row's K or V in order of position, [context_len, kv_heads, head_dim] float32."""
    block_size = pages.shape[1]
    slots = [
        pages[int(block_ids[position // block_size]), position % block_size]
        for position in range(context_len)
    ]
    return format_of(pages).decode(torch.stack(slots), torch.float32)


def _attend_one(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """One token's attention: `query` [heads, dim]; `keys`, `values` [seen, kv_heads, dim]."""
    num_heads, head_dim = query.shape
    heads_per_kv = num_heads // keys.shape[1]
    out = torch.empty_like(query)
    for head in range(num_heads):
        head_keys = keys[:, head // heads_per_kv]  # [seen, dim]
        head_values = values[:, head // heads_per_kv]
        weights = torch.softmax(head_keys @ query[head].float() / math.sqrt(head_dim), dim=0)
        out[head] = (weights @ head_values).to(query.dtype)
    return out
