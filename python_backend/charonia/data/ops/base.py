"""The interface between model and device: a decoder layer's sublayers, and the shape of a step.

Owns the protocol of all implementations, and the types that they exchange. Must not know names of
weights, plans or sampling.

A layer is a list of sublayers. Each ends where tensor parallelism adds up its partial sums (Shoeybi
et al. 2019, arXiv 1909.08053, section 3)::

    residual ──┬───────────────────────► + ──┬───────────────────► + ──► …
       x ──► + │                         ▲ x  │                     ▲ x
               └► norm, qkv, rope, write │    └► norm, gate·up, ────┘
                  attend, output ────────┘       down

Tokens of a step are flat: row after row, each row's tokens in order of position::

    rows           0        1           2
    token          0 │ 1  2  3  4  5 │  6
    query_starts   0   1               6    7
                   ▲   └ prefill chunk      └ decode
                   └ decode
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

from torch import Tensor

from charonia.config import Quantization
from charonia.data.comm import Comm
from charonia.protocol import KVLayout


class Pages(NamedTuple):
    """K and V of one layer, block by block. Block 0 is the null block, which pads block tables.

    The layout within a block is up to the `Ops` that reads and writes it. All numbers in the pages
    are finite, so masked ones cannot spoil a sum.
    """

    keys: Tensor  # [num_blocks, ...]
    values: Tensor  # [num_blocks, ...]


@dataclass(frozen=True)
class StepBatch:
    """The tokens of one step and the location of their contexts.

    Attributes:
        token_ids, positions, slots: per token; a slot is block_id * block_size + offset.
        query_starts: index of the first token of each row, then the number of tokens.
        context_lens: tokens of each row with K and V in the pages, after this step has written its
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
    """Cosine and sine of rotary angles, shared by the two halves of a head."""

    cos: Tensor  # [positions, head_dim / 2]
    sin: Tensor  # [positions, head_dim / 2]


@dataclass(frozen=True)
class NormWeights:
    """Root mean square normalization with a learned scale."""

    weight: Tensor  # [size]
    eps: float


@dataclass(frozen=True)
class MatrixWeights:
    """y = x Wᵀ + b."""

    weight: Tensor  # [outputs, inputs]
    bias: Tensor | None  # [outputs]


@dataclass(frozen=True)
class AttentionWeights:
    """The weights of causal self-attention.

    Attributes:
        qkv: queries, keys and values, one head after the other.
        head_norms: of each head of queries and of keys, before the rotation (Qwen3).
    """

    norm: NormWeights
    qkv: MatrixWeights
    output: MatrixWeights
    head_norms: tuple[NormWeights, NormWeights] | None
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class MlpWeights:
    """The weights of a SwiGLU layer; `gate_up` has gate's outputs, then up's."""

    norm: NormWeights
    gate_up: MatrixWeights
    down: MatrixWeights


StepT = TypeVar("StepT")

Sublayer = Callable[[Tensor | None, Tensor, StepT, Pages], Tensor]
"""(x, residual, step, pages of the layer): add x to the residual stream, in place; return the
sublayer's output for the normalized sum. All are [tokens, hidden]. x is None at the start of the
stream; its memory may be reused for the output. `step` is the result of `Ops.begin`: positions,
slots and contexts."""

Layer = Sequence[Sublayer[StepT]]
"""The sublayers of a layer, in order: each adds the output of the previous one."""

Layers = Callable[[Tensor, StepT, Sequence[Pages]], Tensor]
"""(residual, step, pages of each layer): run all layers in order. The residual stream is updated in
place, except for the last contribution, which is returned. Both are [tokens, hidden]."""

Head = Callable[[Tensor, Tensor], Tensor]
"""(x, residual): normalize the sum and return its logits, [tokens, hidden] to [tokens, vocab_size]
float32."""


class GuessOfRow(NamedTuple):
    """The work of a draft model for a row.

    Attributes:
        start, num_tokens: of the tokens to compute. If tokens are to be guessed, they end with the
            last known token.
        num_known, num_prompt: number of the row's tokens, and of those of its prompt.
        num_guesses: number of tokens to guess.
        sampling: the parameters for drawing, of `NativeDraw.parameters`.
    """

    row: int
    start: int
    num_tokens: int
    num_known: int
    num_guesses: int
    num_prompt: int
    sampling: Any


Guesser = Callable[[list[GuessOfRow], Tensor, Tensor, int, Sequence[Pages]], None]
"""(guesses, tokens, block ids, block size, pages of each layer): run all passes of a draft model.
The guesses are written after the rows' known tokens. Both tables are int64, [rows, ...]."""


class Ops(Protocol[StepT]):
    """The operations of a device. Weights that are passed in may be copied and released.

    Implementations are subclasses. Optional features have defaults that say they are missing.
    """

    def page_shapes(self, layout: KVLayout) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of one block's keys and values in memory."""
        ...

    def begin(self, batch: StepBatch, rotation: Rotation) -> StepT:
        """Prepare the data that all layers of a step share; `rotation` is of all positions."""
        ...

    def attention(self, weights: AttentionWeights) -> Sublayer[StepT]:
        """Prepare causal self-attention, softmax(q Kᵀ / √head_dim) V, per row over its own context.

        It stores K and V in the pages, and reads them as stored, even those of this step's own
        tokens. So the split of a prompt into steps does not change the result.
        """
        ...

    def mlp(self, weights: MlpWeights) -> Sublayer[StepT]:
        """Prepare a SwiGLU layer (Shazeer 2020, arXiv 2002.05202)."""
        ...

    def layers(self, layers: Sequence[Layer[StepT]], parts: Comm | None = None) -> Layers[StepT]:
        """Combine the sublayers of each layer, and the layers, into one call.

        Args:
            parts: the ranks with the other parts of the layers. The outputs of their sublayers are
                summed, and every rank has the whole residual stream.
        """
        ...

    def head(self, norm: NormWeights, weights: MatrixWeights) -> Head:
        """Prepare the final norm and the language model's head."""
        ...

    def quantized(self, quantization: Quantization | None) -> "Ops[StepT]":
        """The same operations for another model, with weights in this number format."""
        ...

    # Optional features.

    prefers_int8: ClassVar[bool] = False
    """True if int8 weights make a draft model faster; decides `quantization: auto`."""

    attends_in_pieces: ClassVar[bool] = False
    """True if attention takes the same memory for any length of context."""

    @property
    def kernels(self) -> ModuleType | None:
        """The CPU kernels, which also draw tokens and exchange tensors; None without."""
        return None

    def guesser(
        self, embedding: Tensor, layers: Layers[StepT], head: Head, rotation: Rotation
    ) -> Guesser | None:
        """Combine a draft model into one call; `layers` and `head` are of these operations."""
        return None
