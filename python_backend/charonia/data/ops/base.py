"""The seam between the model and a device: a decoder layer's sublayers, and the shape of one step.

Owns the protocol that every implementation follows and the types that they exchange. Must not know
weights' names, plans or sampling.

A layer is a list of sublayers. They are cut where tensor parallelism joins its partial sums
(Shoeybi et al. 2019, arXiv 1909.08053, section 3)::

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

from charonia.data.comm import Comm
from charonia.protocol import KVLayout


class Pages(NamedTuple):
    """K and V of one layer, block by block; block 0 is the null block: it pads block tables.

    How they lie within a block is up to the `Ops` that reads and writes them. All that is in the
    pages is finite, so that what is masked out cannot spoil a sum.
    """

    keys: Tensor  # [num_blocks, ...]
    values: Tensor  # [num_blocks, ...]


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
    """Cosine and sine of rotary angles; the two halves of a head share them."""

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
    """Of causal self-attention.

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
    """Of a SwiGLU layer; `gate_up` holds gate's outputs, then up's."""

    norm: NormWeights
    gate_up: MatrixWeights
    down: MatrixWeights


StepT = TypeVar("StepT")

Sublayer = Callable[[Tensor | None, Tensor, StepT, Pages], Tensor]
"""(x, residual, step, pages of the layer): add x to the residual stream, in place; return what the
sublayer makes of its norm. All [tokens, hidden]; x is None where the stream begins, and its memory
may be used for what is returned. `step` is of `Ops.begin`: positions, slots and contexts."""

Layer = Sequence[Sublayer[StepT]]
"""The sublayers of a layer, in their order: each adds what the one before returned."""

Layers = Callable[[Tensor, StepT, Sequence[Pages]], Tensor]
"""(residual, step, pages of each layer): all layers, one after the other. The residual stream, in
place, lacks the last contribution still, which is returned; both [tokens, hidden]."""

Head = Callable[[Tensor, Tensor], Tensor]
"""(x, residual): the logits of the norm of their sum, [tokens, hidden] to [tokens, vocab_size]
float32."""


class GuessOfRow(NamedTuple):
    """What a draft model is asked for in a row.

    Attributes:
        start, num_tokens: of the tokens to compute; where there is to be a guess, they end with
            the last one known.
        num_known, num_prompt: tokens that the row has, and had at first.
        num_guesses: tokens to guess, one after the other.
        sampling: what to draw with, of `NativeDraw.parameters`.
    """

    row: int
    start: int
    num_tokens: int
    num_known: int
    num_guesses: int
    num_prompt: int
    sampling: Any


Guesser = Callable[[list[GuessOfRow], Tensor, Tensor, int, Sequence[Pages]], None]
"""(guesses, tokens, block ids, block size, pages of each layer): all passes of a draft model. What
it guesses is written behind the rows' known tokens; both tables are int64, [rows, ...]."""


class Ops(Protocol[StepT]):
    """What a device does for the model. Weights that it is given may be copied and let go.

    Implementations are subclasses: what not every device can do has a default that says so.
    """

    def page_shapes(self, layout: KVLayout) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Say how one block's keys and its values lie in memory."""
        ...

    def begin(self, batch: StepBatch, rotation: Rotation) -> StepT:
        """Prepare what all layers of a step share; `rotation` is of all positions."""
        ...

    def attention(self, weights: AttentionWeights) -> Sublayer[StepT]:
        """Prepare causal self-attention, softmax(q Kᵀ / √head_dim) V, per row over its own context.

        It stores K and V in the pages. K and V are read as stored there, also those of this step's
        own tokens, so that how a prompt is cut into steps cannot change what is attended to.
        """
        ...

    def mlp(self, weights: MlpWeights) -> Sublayer[StepT]:
        """Prepare a SwiGLU layer (Shazeer 2020, arXiv 2002.05202)."""
        ...

    def layers(self, layers: Sequence[Layer[StepT]], parts: Comm | None = None) -> Layers[StepT]:
        """Join the sublayers of each layer, and the layers.

        Args:
            parts: the ranks that have the other parts of them. What their sublayers return is
                added up, and every rank's residual stream is whole.
        """
        ...

    def head(self, norm: NormWeights, weights: MatrixWeights) -> Head:
        """Prepare the last norm and the language model's head."""
        ...

    def as_int8(self) -> "Ops[StepT]":
        """The same for another model, whose weights are kept as int8."""
        ...

    # What not every device can do.

    prefers_int8: ClassVar[bool] = False
    """Whether weights as int8 make a draft model faster: what `quantization: auto` asks."""

    attends_in_pieces: ClassVar[bool] = False
    """Whether attention takes no more memory where contexts are longer."""

    @property
    def kernels(self) -> ModuleType | None:
        """The CPU kernels, which draw tokens and exchange tensors between ranks as well."""
        return None

    def guesser(
        self, embedding: Tensor, layers: Layers[StepT], head: Head, rotation: Rotation
    ) -> Guesser | None:
        """Join a draft model into one call; `layers` and `head` are of these operations."""
        return None
