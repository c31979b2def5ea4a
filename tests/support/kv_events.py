"""A reader of KV events as a router is one: its own structs of the format, and ZeroMQ.

Must not know the publisher's insides.
"""

import contextlib
from collections.abc import Iterator

import msgspec
import zmq

from support.waiting import WAIT_S


class BlockStored(msgspec.Struct, array_like=True, tag=True):
    """An event as readers of vLLM's events have it."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None


class BlockRemoved(msgspec.Struct, array_like=True, tag=True):
    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, array_like=True, tag=True):
    pass


class KVEventBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None


CLEARED = AllBlocksCleared()
decode = msgspec.msgpack.Decoder(KVEventBatch).decode


class Reader:
    """Subscribes to an endpoint.

    Attributes:
        topic: of the message that was read last.
        numbers: of the batches that were read.
    """

    def __init__(self, endpoint: str, topic: str = "kv@", *, binds: bool = False) -> None:
        self.topic = ""
        self.numbers: list[int] = []
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt_string(zmq.SUBSCRIBE, topic)
        (self._sub.bind if binds else self._sub.connect)(endpoint)

    def read(self, timeout_s: float = WAIT_S) -> KVEventBatch:
        """The next batch. Raises TimeoutError: none comes."""
        if not self._sub.poll(1000 * timeout_s):
            raise TimeoutError
        topic, number, batch = self._sub.recv_multipart()
        self.topic = topic.decode()
        assert len(number) == 8
        self.numbers.append(int.from_bytes(number, "big"))
        return decode(batch)

    def close(self) -> None:
        self._context.destroy(linger=0)


@contextlib.contextmanager
def reading(endpoint: str, **options) -> Iterator[Reader]:
    """A reader, for a while."""
    with contextlib.closing(Reader(endpoint, **options)) as reader:
        yield reader


def replay(endpoint: str, first: int) -> list[tuple[int, KVEventBatch]]:
    """The batches that are sent again, from one of this number on."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as asker:
        asker.setsockopt(zmq.LINGER, 0)
        asker.connect(endpoint)
        asker.send_multipart((b"", first.to_bytes(8, "big")))
        found = []
        while asker.poll(1000 * WAIT_S):
            empty, number, batch = asker.recv_multipart()
            assert empty == b""
            if int.from_bytes(number, "big", signed=True) == -1:
                assert batch == b""
                return found
            found.append((int.from_bytes(number, "big"), decode(batch)))
    raise TimeoutError
