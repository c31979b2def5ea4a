"""The engine argument `kv_events_config`.

Owns its keys. Must not know what is told, nor ZeroMQ.
"""

import os
from typing import Literal

import msgspec

from charonia.config.values import MAX_INTEGER, is_address, is_path
from charonia.errors import ConfigError, shown

_OWN_HOSTS = ("*", "0.0.0.0", "[::]", "localhost", "[::1]")


class KVEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who is told over ZeroMQ what the prefix cache holds; names are vLLM's.

    What is told are token ids, that is prompts, to whoever can reach an endpoint.

    Attributes:
        enable_kv_cache_events: tell it at all.
        publisher: "zmq", or "null" for none.
        endpoint: "tcp://HOST:PORT" or "ipc://PATH". A path is bound, and so is a host that is `*`,
            `0.0.0.0`, `[::]` or a loopback address. Any other host is a reader's that binds, and is
            connected to. vLLM's default is "tcp://*:5557", all addresses of this machine.
        replay_endpoint: where readers ask for batches again that they have missed, of the same
            form, always bound, and never the same address; None is nowhere.
        buffer_steps: batches that are kept for that.
        hwm: batches that wait for each reader at most; a slow one misses those that come then.
        max_queue_size: batches that wait to be sent at most; then they are dropped, and readers are
            told that nothing is cached.
        topic: of all messages; None is "kv@POD@MODEL", with the environment's `POD_NAME`, `POD_IP`,
            or else the name of the host, and the scheduler's name in Triton. "" is vLLM's
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
        """Whether anybody is told."""
        return self.enable_kv_cache_events and self.publisher == "zmq"

    @property
    def is_bound(self) -> bool:
        """Whether readers connect to `endpoint`; else it is the reader's, and connected to."""
        scheme, _, address = self.endpoint.partition("://")
        host = address.rpartition(":")[0]
        return scheme == "ipc" or host in _OWN_HOSTS or host.startswith("127.")


def _place(endpoint: str) -> str:
    """What is the same for one path, however it is written."""
    scheme, _, address = endpoint.partition("://")
    return os.path.abspath(address) if scheme == "ipc" else endpoint


def _is_endpoint(text: str) -> bool:
    if not text.isascii():
        return False
    scheme, _, address = text.partition("://")
    if scheme == "ipc":
        return bool(address) and is_path(address)
    return scheme == "tcp" and is_address(address)
