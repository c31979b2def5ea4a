"""The seam between the model and a device: five operations, and the shape of one step.

Owns the protocol that every implementation of the heavy operations follows and the types that
they exchange. Must not know weights' names, plans or sampling.

Tokens of a step are flat: row after row, each row's tokens in order of position::

    rows           0        1           2
    token          0 │ 1  2  3  4  5 │  6
    query_starts   0   1               6    7
                   ▲   └ prefill chunk      └ decode
                   └ decode
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Pages(NamedTuple):
    """K and V of one layer. Block 0 is the null block: it pads block tables.

    All that is in the pages is finite, so that what is masked out cannot spoil a sum.
    """

    keys: Tensor  # [num_blocks, block_size, kv_heads, head_dim]
    values: Tensor  # [num_blocks, block_size, kv_heads, head_dim]


@dataclass(frozen=True)
class StepBatch:
    """The tokens of one step and where their context lies.

    Attributes:
        token_ids, positions, slots: per token; a slot is block_id * block_size + offset.
        query_starts: first token of each row, and at the end the number of tokens.
        context_lens: tokens of each row whose K and V are in the pages once this step wrote its
            own; the row's last token of this step is at position context_len - 1.
        block_tables: the block ids of each row, padded with the null block.
    """

    token_ids: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64
    slots: Tensor  # [tokens] int64
    query_starts: list[int]  # [rows + 1]
    context_lens: list[int]  # [rows]
    block_tables: Tensor  # [rows, blocks] int64
    block_size: int


class Rotation(NamedTuple):
    """Cosine and sine of each token's rotary angles; the two halves of a head share them."""

    cos: Tensor  # [tokens, head_dim / 2]
    sin: Tensor  # [tokens, head_dim / 2]


class PagedAttention(Protocol):
    """Attention of one step's queries over the pages; the same for every layer of the step."""

    def __call__(self, query: Tensor, pages: Pages) -> Tensor:
        """Causal softmax(q Kᵀ / √head_dim) V, per row over its own context.

        K and V are read as stored in `pages`, also those of this step's own tokens, so that how
        a prompt is cut into steps cannot change what is attended to.

        Args:
            query: [tokens, heads, head_dim]; heads is a multiple of the pages' kv_heads, and
                consecutive heads share a KV head.

        Returns:
            [tokens, heads, head_dim].
        """
        ...


class Ops(Protocol):
    """What a device does for the model."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return x Wᵀ + b; `x` [tokens, in], `weight` [out, in], `bias` [out]."""
        ...

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Add `x` to `residual` (which may be overwritten) and normalize the sum.

        Root mean square over the last dimension (Zhang, Sennrich 2019, arXiv 1910.07467),
        computed in float32.

        Returns:
            The normalized sum times `weight`, and the sum itself; both of the shape of `x`.
        """
        ...

    def rope_and_write(
        self, qkv: Tensor, num_heads: int, rotation: Rotation, slots: Tensor, pages: Pages
    ) -> Tensor:
        """Rotate queries and keys, store keys and values in the pages.

        Rotary embedding (Su et al. 2021, arXiv 2104.09864) in the layout of Hugging Face: the
        first half of a head is rotated against the second. What is stored is made finite.

        Args:
            qkv: [tokens, num_heads + 2 * kv_heads, head_dim]: queries, keys, values.
            slots: [tokens], where each token's K and V go.

        Returns:
            The rotated queries, [tokens, num_heads, head_dim].
        """
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up; `gate_up` [tokens, 2 * size] holds gate, then up."""
        ...

    def paged_attention(self, batch: StepBatch, dtype: torch.dtype) -> PagedAttention:
        """Prepare a step's attention for queries of `dtype`: what all layers share, once."""
        ...
