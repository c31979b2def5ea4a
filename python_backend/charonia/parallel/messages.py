"""Messages between the engine's process and its ranks. Tensors are exchanged elsewhere.

Owns the messages and their encoding: MessagePack of typed Structs. Must not know sockets.

    rank                        engine's process
      Join ───────────────────────►               asks to join
           ◄─────────────────────── Setup         the rank's number and the arguments
      Prepared ───────────────────►               its device and its checkpoints
           ◄─────────────────────── Form          all are prepared: form groups
      Loaded ─────────────────────►               its weights are loaded
           ◄─────────────────────── Measure       all have loaded: run the largest step
      Ready ──────────────────────►               how many KV blocks fit
           ◄─────────────────────── Allocate      the number of KV blocks for all ranks
      Allocated ──────────────────►               done
           ◄─────────────────────── Forward       one pass of a model
           ◄─────────────────────── Lines         more logits of the last pass
           ◄─────────────────────── Copy          copies blocks of a model's KV cache
           ◄─────────────────────── Move          moves blocks to slower tiers, and back
      Moved ──────────────────────►               which blocks failed, if asked for
           ◄─────────────────────── End           the engine is being unloaded

Before the first message both have authenticated, see `handshake`. To form its groups a rank opens a
second connection and sends UseTable there, see `table`.

A rank may send a Refusal instead of the expected message; it is its last message. The engine's
process may send one instead of Setup. An empty message is a heartbeat.
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
        host: equal for ranks that can share memory, see `groups.host_identity`.
        local_index: its index among the ranks that the engine's process started; None for other
            ranks.
    """

    version: str
    pid: int
    host: str
    local_index: int | None


class UseTable(msgspec.Struct, frozen=True, tag=True):
    """The first message of a rank's second connection; requests to the table follow."""


class Setup(msgspec.Struct, frozen=True, tag=True):
    """The role of a rank.

    Attributes:
        local_index, num_local: its index among the ranks of its machine, and their number.
    """

    rank: int
    args: EngineArgs
    local_index: int
    num_local: int


class Prepared(msgspec.Struct, frozen=True, tag=True):
    """A rank has checked that it can take its role.

    Attributes:
        device: the type of its device. has_kernels: whether it uses our CPU kernels.
        checkpoints: digests of the checkpoint of each model that it has a part of, see
            `fingerprint`.
    """

    device: str
    has_kernels: bool
    checkpoints: dict[str, dict[str, str]]


class Form(msgspec.Struct, frozen=True, tag=True):
    """All ranks are prepared.

    Attributes:
        memories: one entry per rank, see `groups.Membership`.
    """

    memories: list[str | None]


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The weights are loaded."""


class Measure(msgspec.Struct, frozen=True, tag=True):
    """All ranks have loaded their weights: run the largest step together and measure its memory."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The number of KV blocks that there is memory for; see `Room`."""

    num_blocks: int
    slot_bytes: int


class Refusal(msgspec.Struct, frozen=True, tag=True):
    """A rank cannot take its role, or may not join: the name of the error's class, and its text."""

    kind: str
    text: str


class Allocate(msgspec.Struct, frozen=True, tag=True):
    """Allocate this many KV blocks; a slot has at most this many bytes; see `Room`."""

    num_blocks: int
    slot_bytes: int


class Allocated(msgspec.Struct, frozen=True, tag=True):
    """The KV blocks are allocated."""


class Forward(msgspec.Struct, frozen=True, tag=True):
    """A pass of a model: a `StepBatch`, its tensors in one array, and the `lines` of `forward`."""

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
    """Save blocks to slower tiers, load blocks from them, and discard blocks; see `StepPlan`.

    Attributes:
        uses_all: whether all blocks are in use again, after some had been discarded.
        is_answered: whether the engine waits for `Moved`.
    """

    saves: list[BlockSave]
    loads: list[BlockLoad]
    discards: list[int]
    uses_all: bool
    is_answered: bool


class Moved(msgspec.Struct, frozen=True, tag=True):
    """The blocks are moved. These failed; see `StepResult`."""

    not_loaded: list[int]
    not_saved: list[int]


class End(msgspec.Struct, frozen=True, tag=True):
    """The engine ends."""


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
        msgspec.DecodeError: the data is not MessagePack, or not one of these messages.
    """
    try:
        message: Message = _decoder.decode(data)
    except RecursionError:
        raise msgspec.DecodeError("it is nested too deeply") from None
    except UnicodeDecodeError as error:  # msgspec does not convert it
        raise msgspec.DecodeError(f"it is not UTF-8: {error.reason}") from None
    except ConfigError as error:  # from the checks of our Structs
        raise msgspec.DecodeError(str(error)) from None
    return message


def forward_of(model: str, batch: StepBatch, lines: list[int]) -> Forward:
    """Pack a pass of a model."""
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
    """Unpack a pass of a model."""
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
