"""The engine argument `kv_events_config`.

Owns its keys. Knows nothing about the events, or ZeroMQ.
"""

import os
from typing import Literal

import msgspec

from charonia.config.values import MAX_INTEGER, is_address, is_path
from charonia.errors import ConfigError, shown

_OWN_HOSTS = ("*", "0.0.0.0", "[::]", "localhost", "[::1]")


class KVEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Publication of events of the prefix cache over ZeroMQ; names are vLLM's.

    Events contain token ids, that is prompts. Anybody who can reach an endpoint can read them.

    Attributes:
        enable_kv_cache_events: publish events.
        publisher: "zmq", or "null" for none.
        endpoint: "tcp://HOST:PORT" or "ipc://PATH". A path is bound, and so is the host `*`,
            `0.0.0.0`, `[::]` or a loopback address. Any other host is connected to, for a reader
            that binds there. vLLM's default is "tcp://*:5557", all addresses of this machine.
        replay_endpoint: where readers ask again for batches that they missed. It has the same form,
            is always bound, and must differ from `endpoint`; None turns it off.
        buffer_steps: batches that are kept for replay.
        hwm: most batches that wait for each reader; a slow reader misses further ones.
        max_queue_size: most batches that wait to be sent. Beyond that they are dropped, and readers
            are told that nothing is cached.
        topic: topic of all messages; None is "kv@POD@MODEL". POD is the environment's `POD_NAME`,
            `POD_IP`, or else the host's name; MODEL is the scheduler's name in Triton. "" is vLLM's
            default, for readers that subscribe to everything.
    """

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] = "zmq"
    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str | None = None

    def __post_init__(self) -> None:
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            if not 1 <= (value := getattr(self, name)) < MAX_INTEGER:
                raise ConfigError(
                    f"kv_events_config: {name} = {value} must be 1 to {MAX_INTEGER - 1}"
                )
        for name in ("endpoint", "replay_endpoint"):
            value = getattr(self, name)
            if value is not None and not _is_endpoint(value):
                raise ConfigError(
                    f"kv_events_config: {name} = {shown(value)} is neither tcp://HOST:PORT nor"
                    " ipc://PATH"
                )
        again = self.replay_endpoint
        if again is not None and _place(again) == _place(self.endpoint):
            # The second to bind a path would take it from the first, without an error.
            raise ConfigError(
                f"kv_events_config: replay_endpoint = {shown(again)} is the same place as endpoint"
                f" = {shown(self.endpoint)}; each needs one of its own"
            )

    @property
    def is_on(self) -> bool:
        """True if events are published."""
        return self.enable_kv_cache_events and self.publisher == "zmq"

    @property
    def is_bound(self) -> bool:
        """True if `endpoint` is bound here; otherwise the reader binds it, and we connect."""
        scheme, _, address = self.endpoint.partition("://")
        host = address.rpartition(":")[0]
        return scheme == "ipc" or host in _OWN_HOSTS or host.startswith("127.")


def _place(endpoint: str) -> str:
    """The endpoint in a normal form: the same for all spellings of one path."""
    scheme, _, address = endpoint.partition("://")
    return os.path.abspath(address) if scheme == "ipc" else endpoint


def _is_endpoint(text: str) -> bool:
    if not text.isascii():
        return False
    scheme, _, address = text.partition("://")
    if scheme == "ipc":
        return bool(address) and is_path(address)
    return scheme == "tcp" and is_address(address)
