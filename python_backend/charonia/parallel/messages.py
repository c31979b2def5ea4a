"""What the engine's process and its ranks say to each other, beside tensors.

Owns the messages and their encoding: MessagePack of typed Structs. Must not know sockets.

    rank                        engine's process
      Join ───────────────────────►               here I am
           ◄─────────────────────── Setup         you are rank 1 of 2
      Prepared ───────────────────►               this computes here, from this checkpoint
           ◄─────────────────────── Form          all are prepared: exchange tensors like this
      Loaded ─────────────────────►               the weights are there
           ◄─────────────────────── Measure       all have loaded: run the largest step together
      Ready ──────────────────────►               there is memory for so many KV blocks
           ◄─────────────────────── Allocate      take as many as the others
      Allocated ──────────────────►               done
           ◄─────────────────────── Forward       one for each pass of a model
           ◄─────────────────────── Lines         more logits of the last pass
           ◄─────────────────────── Copy          blocks of a model's KV cache
           ◄─────────────────────── Move          blocks to slower tiers, and back
      Moved ──────────────────────►               all but these, if any was to come back
           ◄─────────────────────── End           the engine is unloaded

Both have shown before that they know the secret, see `handshake`. A rank connects a second time
when it is to exchange tensors, and says UseTable there, see `table`.

Instead of what is due a rank may send a Refusal, as its last message; and the engine's process one
instead of Setup. An empty message only says that its sender lives.
"""

from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from charonia.config import EngineArgs
from charonia.data.ops.base import StepBatch
from charonia.errors import ConfigError
from charonia.protocol import BlockCopy, BlockLoad, BlockSave

BEAT = b""


class Join(msgspec.Struct, frozen=True, tag=True):
    """A rank's first message.

    Attributes:
        version: of this package.
        host: equal for processes that can share memory, see `groups.host_identity`.
        local_index: its place among the ranks that the engine's process started; None for others.
    """

    version: str
    pid: int
    host: str
    local_index: int | None


class UseTable(msgspec.Struct, frozen=True, tag=True):
    """The first message of a rank's other connection, behind which it speaks to the table."""


class Setup(msgspec.Struct, frozen=True, tag=True):
    """What a rank is to be.

    Attributes:
        local_index, num_local: its place among the ranks of its machine, and their number.
    """

    rank: int
    args: EngineArgs
    local_index: int
    num_local: int


class Prepared(msgspec.Struct, frozen=True, tag=True):
    """A rank has what it needs to be that.

    Attributes:
        device: the type of what it computes on. has_kernels: whether by our CPU kernels.
        checkpoints: by model, digests of the checkpoint that it has parts of, see `fingerprint`.
    """

    device: str
    has_kernels: bool
    checkpoints: dict[str, dict[str, str]]


class Form(msgspec.Struct, frozen=True, tag=True):
    """All ranks are prepared.

    Attributes:
        memories: of each rank, see `groups.Membership`.
    """

    memories: list[str | None]


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The weights are loaded."""


class Measure(msgspec.Struct, frozen=True, tag=True):
    """All ranks have loaded theirs: see what the largest step takes, with the others."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """There is memory for so many KV blocks; see `Room`."""

    num_blocks: int
    slot_bytes: int


class Refusal(msgspec.Struct, frozen=True, tag=True):
    """A rank cannot be what it is to be, or may not: name of the error's class, and its text."""

    kind: str
    text: str


class Allocate(msgspec.Struct, frozen=True, tag=True):
    """Take so many KV blocks; a slot has so many bytes at most; see `Room`."""

    num_blocks: int
    slot_bytes: int


class Allocated(msgspec.Struct, frozen=True, tag=True):
    """The KV blocks are there."""


class Forward(msgspec.Struct, frozen=True, tag=True):
    """A pass of a model: `StepBatch` with its tensors in one array, and `lines` of `Model`."""

    model: str
    indices: bytes
    query_starts: list[int]
    context_lens: list[int]
    block_size: int
    lines: list[int]


class Lines(msgspec.Struct, frozen=True, tag=True):
    """Logits of more tokens of the model's last pass."""

    model: str
    start: int
    stop: int


class Copy(msgspec.Struct, frozen=True, tag=True):
    """Copy blocks of a model's KV cache, see `Model.copy_blocks`."""

    model: str
    copies: list[BlockCopy]


class Move(msgspec.Struct, frozen=True, tag=True):
    """Save blocks to slower tiers, load others from them, and discard some; see `StepPlan`.

    Attributes:
        uses_all: whether all blocks are in use again, after some were discarded.
        is_answered: whether the engine waits for `Moved`.
    """

    saves: list[BlockSave]
    loads: list[BlockLoad]
    discards: list[int]
    uses_all: bool
    is_answered: bool


class Moved(msgspec.Struct, frozen=True, tag=True):
    """The blocks are loaded and saved, but for these; see `StepResult`."""

    not_loaded: list[int]
    not_saved: list[int]


class End(msgspec.Struct, frozen=True, tag=True):
    """This engine is not needed any more."""


Message = (
    Join
    | UseTable
    | Setup
    | Prepared
    | Form
    | Loaded
    | Measure
    | Ready
    | Refusal
    | Allocate
    | Allocated
    | Forward
    | Lines
    | Copy
    | Move
    | Moved
    | End
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Encode a message."""
    return _encoder.encode(message)


def decode(data: bytes) -> Message:
    """Decode a message.

    Raises:
        msgspec.DecodeError: not MessagePack, or not of the messages' types.
    """
    try:
        message: Message = _decoder.decode(data)
    except RecursionError:
        raise msgspec.DecodeError("it is nested too deeply") from None
    except UnicodeDecodeError as error:  # which msgspec lets through
        raise msgspec.DecodeError(f"it is not UTF-8: {error.reason}") from None
    except ConfigError as error:  # which msgspec does not know
        raise msgspec.DecodeError(str(error)) from None
    return message


def forward_of(model: str, batch: StepBatch, lines: list[int]) -> Forward:
    """Pack a pass."""
    tensors = (batch.token_ids, batch.positions, batch.slots, batch.block_tables)
    indices = np.concatenate([tensor.cpu().numpy().ravel() for tensor in tensors])
    return Forward(
        model=model,
        indices=indices.tobytes(),
        query_starts=batch.query_starts,
        context_lens=batch.context_lens,
        block_size=batch.block_size,
        lines=lines,
    )


def batch_of(message: Forward, device: torch.device) -> StepBatch:
    """Unpack a pass."""
    indices = torch.frombuffer(bytearray(message.indices), dtype=torch.int64).to(device)
    num_tokens, num_rows = message.query_starts[-1], len(message.context_lens)

    def tokens(number: int) -> Tensor:
        return indices[number * num_tokens : (number + 1) * num_tokens]

    return StepBatch(
        token_ids=tokens(0),
        positions=tokens(1),
        slots=tokens(2),
        query_starts=message.query_starts,
        context_lens=message.context_lens,
        block_tables=indices[3 * num_tokens :].view(num_rows, -1),
        block_size=message.block_size,
    )
