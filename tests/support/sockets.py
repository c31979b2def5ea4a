"""The other ends of the sockets between models, for tests of one end.

Owns what such an end keeps. Must not know which model is tested.
"""

import threading
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from charonia.protocol import EngineInfo, Hello, KVLayout, StepPlan, decode_reply, encode
from charonia.serving.messages.executor import STEPS_SOCKET
from charonia.serving.messages.relay_client import requests_socket
from charonia.serving.messages.relay_server import RelayServer
from charonia.serving.requests.raw_request import RawRequest
from charonia.serving.requests.responders import Responder
from charonia.sockets.local import connect
from support.waiting import WAIT_S

INFO = EngineInfo(
    epoch=0,
    pids=[2**22 + 1],
    num_blocks=3,
    kv=KVLayout(
        num_layers=1, num_kv_heads=1, head_dim=4, block_size=16, dtype="float32", bytes_per_block=9
    ),
    max_model_len=32,
    max_num_seqs=2,
    max_num_batched_tokens=16,
    vocab_size=10,
    eos_token_ids=[0],
    architecture="LlamaForCausalLM",
    dtype="float32",
    device="cpu",
    num_parameters=1,
)
"""Description of an engine."""


def refuse_threads(patch: pytest.MonkeyPatch, name: str) -> None:
    """Have no thread of this name start until the patch is undone, as under a limit."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    patch.setattr(threading.Thread, "start", refuse)


class SchedulerEnd:
    """The scheduler's end of the connections, with a record of its messages.

    Attributes:
        taken, cancelled, acknowledged, delivered: requests, keys, and answers of which it was told,
            as they came. is_stopping: it was told that the server is. log: its lines.
        lost: whether some deliveries were lost, for each connection with deliveries, at its end.
        take: called with each request; keeps it in `taken`.
    """

    def __init__(self, repository: Path) -> None:
        self.path = requests_socket(repository, "scheduler")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.taken: SimpleQueue[tuple[str, RawRequest, Responder]] = SimpleQueue()
        self.cancelled: SimpleQueue[str] = SimpleQueue()
        self.acknowledged: SimpleQueue[tuple[str, int]] = SimpleQueue()
        self.delivered: SimpleQueue[tuple[str, int]] = SimpleQueue()
        self.lost: SimpleQueue[bool] = SimpleQueue()
        self.is_stopping = threading.Event()
        self.log: list[str] = []
        self.take = lambda *request: self.taken.put(request)
        self.relay = RelayServer(self.path, self, self, log=self.log.append)
        self.relay.start()

    def on_request(self, key: str, raw: RawRequest, responder: Responder) -> None:
        self.take(key, raw, responder)

    def on_cancelled(self, key: str) -> None:
        self.cancelled.put(key)

    def on_acknowledged(self, key: str, number: int) -> None:
        self.acknowledged.put((key, number))

    def on_server_stopping(self) -> None:
        self.is_stopping.set()

    def report(self, key: str, number: int) -> None:
        self.delivered.put((key, number))

    def stop_reports(self, is_lost: bool) -> None:
        self.lost.put(is_lost)

    def next(self) -> tuple[str, RawRequest, Responder]:
        """Wait for a request."""
        return self.taken.get(timeout=WAIT_S)


class StepsClient:
    """Sends messages to an engine's socket, as the scheduler does."""

    def __init__(self, engine_dir: Path) -> None:
        self._path = engine_dir / STEPS_SOCKET
        self._channel = connect(self._path)

    def ask(self, message: Hello | StepPlan) -> Any:
        """Send a message and return the reply."""
        self.send(message)
        return self.receive()

    def ask_beside(self, message: Hello | StepPlan) -> Any:
        """The same through a connection of its own."""
        channel = connect(self._path)
        channel.send(encode(message))
        reply = decode_reply(channel.receive(WAIT_S) or b"")
        channel.close()
        return reply

    def send(self, message: Hello | StepPlan) -> None:
        """Send a message; its reply can be received later."""
        self._channel.send(encode(message))

    def receive(self) -> Any:
        """Wait for a reply."""
        return decode_reply(self._channel.receive(WAIT_S) or b"")

    def close(self) -> None:
        """Hang up."""
        self._channel.close()
