"""Tells routers the contents of the prefix cache: vLLM's KV events over ZeroMQ.

Owns the wire format, the sockets and the sender thread. Must not know the cache, only its keys (see
`CacheEvents`). Only the sender thread waits for sockets.

    KVCache ── stored, removed, cleared ──► KVEvents ── a batch per step ──► KVEventPublisher
                                                                   PUB: topic, number, batch
                                                      ROUTER: batches from a number on, again

The format is that of vLLM's `distributed/kv_events.py`: each event is an array that begins with its
name. vLLM sends maps since its pull request 42892. llm-d and NVIDIA Dynamo read both, but their
older releases read only arrays. A block's hash is the last 8 bytes of its key as a big-endian
number. llm-d converts bytes to the same number; older releases of Dynamo take only numbers.
"""

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import zmq

from charonia.config import KVEventsConfig
from charonia.errors import ConfigError, shown
from charonia.events import RareLog, event, warning_event

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
"""Sent in place of a number, after the last batch of a replay."""
_LINGER_MS = 500
_CLOSE_S = 5.0


class BlockStored(msgspec.Struct, array_like=True, tag=True):
    """Consecutive blocks of one prefix can be hit from now on.

    Attributes:
        parent_block_hash: of the block before them; None if there is none.
        token_ids: of all these blocks.
        medium: vLLM's word for the memory that an engine computes from, even a CPU's.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: None = None
    medium: str = "GPU"
    lora_name: None = None


class BlockRemoved(msgspec.Struct, array_like=True, tag=True):
    """Blocks cannot be hit any more."""

    block_hashes: list[int]
    medium: str = "GPU"


class AllBlocksCleared(msgspec.Struct, array_like=True, tag=True):
    """No block can be hit any more."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True):
    """The events of one step.

    Attributes:
        ts: seconds since the epoch.
        data_parallel_rank: always present, because Dynamo takes no batch without it.
    """

    ts: float
    events: list[Event]
    data_parallel_rank: int = 0


class _Sockets(NamedTuple):
    context: "zmq.Context[zmq.Socket[bytes]]"
    pub: "zmq.Socket[bytes]"
    router: "zmq.Socket[bytes] | None"


class KVEvents:
    """Collects the events of a step. All calls come from one thread.

    Args:
        publish: takes the events; returns how many batches were dropped for them.

    Attributes:
        num_dropped: batches dropped so far.
    """

    def __init__(self, publish: Callable[[list[Event]], int]) -> None:
        self.num_dropped = 0
        self._publish = publish
        self._events: list[Event] = []
        self._last_key: bytes | None = None  # of the last event, if that can be extended

    def stored(self, key: bytes, parent: bytes | None, token_ids: Sequence[int]) -> None:
        """See `CacheEvents`. Consecutive blocks are one event."""
        if parent is not None and parent == self._last_key:
            last = self._events[-1]
            assert isinstance(last, BlockStored)
            last.block_hashes.append(_hash_of(key))
            last.token_ids.extend(token_ids)
        else:
            parent_hash = None if parent is None else _hash_of(parent)
            self._events.append(
                BlockStored([_hash_of(key)], parent_hash, list(token_ids), len(token_ids))
            )
        self._last_key = key

    def removed(self, key: bytes) -> None:
        """See `CacheEvents`. Removals in a row are one event."""
        self._last_key = None
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved):
            last.block_hashes.append(_hash_of(key))
        else:
            self._events.append(BlockRemoved([_hash_of(key)]))

    def cleared(self) -> None:
        """See `CacheEvents`. Published at once, because the next step may be long in coming."""
        self._events = [AllBlocksCleared()]
        self.flush()

    def flush(self) -> None:
        """Publish the events, if there are any."""
        if self._events:
            events, self._events, self._last_key = self._events, [], None
            self.num_dropped += self._publish(events)


class KVEventPublisher:
    """Numbers batches, and sends them from a thread of its own.

    If the thread cannot keep up, the waiting batches are dropped, and the next batch begins with
    `AllBlocksCleared`. So readers may miss blocks, and see that by the numbers, but they never take
    an evicted block for a cached one.

    Args:
        model: the name of the engine's model, as clients call it.
        log: takes one line, from any thread.
    """

    def __init__(self, config: KVEventsConfig, model: str, *, log: Callable[[str], None]) -> None:
        self._config = config
        self._topic = (default_topic(model) if config.topic is None else config.topic).encode()
        self._log = log
        self._rare_log = RareLog(log)
        self._sockets: _Sockets | None = None
        self._lock = threading.Lock()
        self._queue: deque[tuple[int, KVEventBatch]] = deque()
        self._next_number = 0
        self._is_closing = False
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # rings if there is work
        self._thread = threading.Thread(target=self._run, name="charonia-kv-events", daemon=True)

    def bind(self) -> None:
        """Bind, or connect, the endpoints.

        Raises:
            ConfigError: an endpoint cannot be bound; the message names it.
        """
        context = zmq.Context[zmq.Socket[bytes]]()
        config = self._config
        router = None
        try:
            pub = _socket(context, zmq.PUB, config.hwm)
            _attach(pub, "endpoint", config.endpoint, connects=not config.is_bound)
            if config.replay_endpoint is not None:
                # A reader that asks again before it has read a replay may miss parts of the second.
                router = _socket(context, zmq.ROUTER, config.buffer_steps + 1)
                _attach(router, "replay_endpoint", config.replay_endpoint)
        except ConfigError:
            context.destroy(linger=0)
            raise
        self._sockets = _Sockets(context, pub, router)

    def start(self) -> None:
        """Begin to send; `bind` first if that was not done.

        Raises:
            ConfigError: as `bind`.
        """
        if self._sockets is None:
            self.bind()
        self._thread.start()
        endpoint, topic = self._config.endpoint, self._topic.decode()
        self._log(event("kv_events_published", endpoint=endpoint, topic=topic))

    def publish(self, events: list[Event]) -> int:
        """Send events, which the caller must not change any more; before `start` they are dropped.

        Returns:
            Number of batches that were dropped for them.
        """
        if self._thread.ident is None:
            return 0
        with self._lock:
            num_dropped = 0
            if len(self._queue) >= self._config.max_queue_size:
                num_dropped = len(self._queue)
                self._queue.clear()
                events = [AllBlocksCleared(), *events]
            self._queue.append((self._next_number, KVEventBatch(time.time(), events)))
            self._next_number += 1
        os.eventfd_write(self._bell, 1)
        if num_dropped:
            self._rare_log(warning_event("kv_events_dropped", batches=num_dropped))
        return num_dropped

    def close(self) -> None:
        """Send `AllBlocksCleared` after the waiting batches, and release the endpoints."""
        if self._thread.ident is not None:
            self.publish([AllBlocksCleared()])
            self._is_closing = True
            os.eventfd_write(self._bell, 1)
            self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            return  # it still uses the sockets; they end with the process
        os.close(self._bell)
        if self._sockets is not None:
            self._sockets.context.destroy()

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        assert self._sockets is not None
        context, pub, router = self._sockets
        try:
            self._send(pub, router)
        finally:
            # In this thread: libzmq 4.3.5 may wait for ever if a reader leaves at the same moment.
            context.destroy(linger=_LINGER_MS)

    def _send(self, pub: "zmq.Socket[bytes]", router: "zmq.Socket[bytes] | None") -> None:
        encode = msgspec.msgpack.Encoder().encode
        num_kept = self._config.buffer_steps if router is not None else 0
        kept: deque[tuple[bytes, bytes]] = deque(maxlen=num_kept)
        poller = zmq.Poller()
        poller.register(self._bell, zmq.POLLIN)
        if router is not None:
            poller.register(router, zmq.POLLIN)
        while not self._is_closing or self._queue:
            ready = dict(poller.poll())
            if self._bell in ready:
                os.eventfd_read(self._bell)
            while (next_one := self._take()) is not None:
                number, batch = next_one[0].to_bytes(8, "big"), encode(next_one[1])
                pub.send_multipart((self._topic, number, batch))
                kept.append((number, batch))
            if router is not None and router in ready:
                self._replay(router, kept)

    def _take(self) -> tuple[int, KVEventBatch] | None:
        with self._lock:
            return self._queue.popleft() if self._queue else None

    def _replay(self, router: "zmq.Socket[bytes]", kept: Sequence[tuple[bytes, bytes]]) -> None:
        """Answer a replay request with the kept batches from the requested number on."""
        frames = router.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            self._rare_log(warning_event("kv_events_bad_replay", sizes=str([*map(len, frames)])))
            return
        reader, _, first = frames
        for number, batch in kept:
            if number >= first:
                router.send_multipart((reader, b"", number, batch))
        router.send_multipart((reader, b"", END_OF_REPLAY, b""))


def default_topic(model: str) -> str:
    """The topic from which llm-d reads the names of the pod and the model."""
    pod = os.environ.get("POD_NAME") or os.environ.get("POD_IP") or socket.gethostname()
    return f"kv@{pod}@{model}"


def _hash_of(key: bytes) -> int:
    return int.from_bytes(key[-8:], "big")


def _socket(
    context: "zmq.Context[zmq.Socket[bytes]]", kind: int, most_waiting: int
) -> "zmq.Socket[bytes]":
    made = context.socket(kind)
    made.setsockopt(zmq.SNDHWM, most_waiting)
    return made


def _attach(
    taken: "zmq.Socket[bytes]", name: str, endpoint: str, *, connects: bool = False
) -> None:
    taken.setsockopt(zmq.IPV6, "[" in endpoint)
    path = Path(endpoint.removeprefix("ipc://"))
    if endpoint.startswith("ipc://") and path.exists() and not path.is_socket():
        # libzmq would remove the file.
        raise ConfigError(f"kv_events_config: {name} = {shown(endpoint)} is there and no socket")
    try:
        if connects:
            taken.connect(endpoint)
        else:
            taken.bind(endpoint)
    except zmq.ZMQError as error:
        what = "connected to" if connects else "bound"
        reason = zmq.strerror(error.errno or 0)  # the error's own text contains the whole endpoint
        raise ConfigError(
            f"kv_events_config: {name} = {shown(endpoint)} cannot be {what}: {reason}"
        ) from None
