"""Two hosts on one machine: network namespaces, each with its own address, and a cable between.

Owns the namespaces, the cable, and being inside one. Must not know what runs there.

    ┌─── host a ───┐      ┌──── switch ────┐      ┌─── host b ───┐
    │ 198.18.0.1   ├──────┤     bridge     ├──────┤ 198.18.0.2   │
    └──────────────┘      └────────────────┘      └──────────────┘

The cable is cut at the switch: a host keeps its address and its routes, and what it sends is lost
without a word, as on a real network. Nothing leads from these namespaces to anywhere else.
"""

import contextlib
import ctypes
import os
import secrets
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_NAMESPACES = Path("/run/netns")
_OWN = Path("/proc/thread-self/ns/net")
_libc = ctypes.CDLL(None, use_errno=True)


class NotPermittedError(Exception):
    """This machine lets nobody make network namespaces, or not this user; the text says why."""


@dataclass(frozen=True)
class Host:
    """One of the two."""

    namespace: str
    address: str

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Enter this host: sockets, threads and processes that the calling thread makes are there.

        They stay there; only the thread itself comes back.
        """
        with _OWN.open("rb") as own, (_NAMESPACES / self.namespace).open("rb") as theirs:
            _enter(theirs.fileno())
            try:
                yield
            finally:
                _enter(own.fileno())

    def pids(self) -> list[int]:
        """Processes on this host."""
        return [int(pid) for pid in _ip("netns", "pids", self.namespace).split()]


class TwoHosts:
    """A pair of connected hosts.

    Raises:
        NotPermittedError: they cannot be made here.
    """

    def __init__(self) -> None:
        token = secrets.token_hex(4)
        names = [f"charonia-{token}-{part}" for part in ("a", "b", "switch")]
        self._switch = names.pop()
        self.a = Host(names[0], "198.18.0.1")
        self.b = Host(names[1], "198.18.0.2")
        try:
            self._connect()
        except FileNotFoundError as error:
            raise NotPermittedError(f"no command {error.filename}") from None
        except subprocess.CalledProcessError as error:
            self.close()
            raise NotPermittedError(f"{' '.join(error.cmd)}: {error.stderr.strip()}") from None

    def cut(self) -> None:
        """Cut the connection, so that nothing that one host sends reaches the other."""
        _ip("-n", self._switch, "link", "set", "port-b", "down")

    def restore(self) -> None:
        """Mend the cable; what was lost stays lost, unless it is sent again."""
        _ip("-n", self._switch, "link", "set", "port-b", "up")

    def close(self) -> None:
        """Remove the hosts. Processes there live on without a network: see `Host.pids`."""
        for name in (self._switch, self.a.namespace, self.b.namespace):
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "delete", name)

    def _connect(self) -> None:
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge", "up")
        for host, port in ((self.a, "port-a"), (self.b, "port-b")):
            _ip("netns", "add", host.namespace)
            ends = ("netns", self._switch, "type", "veth", "peer", "cable", "netns", host.namespace)
            _ip("link", "add", port, *ends)
            _ip("-n", self._switch, "link", "set", port, "master", "bridge", "up")
            _ip("-n", host.namespace, "link", "set", "lo", "up")
            _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "cable")
            _ip("-n", host.namespace, "link", "set", "cable", "up")

    def __enter__(self) -> "TwoHosts":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _ip(*arguments: str) -> str:
    run = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True)
    return run.stdout


def _enter(descriptor: int) -> None:
    """Move the calling thread to the namespace of a file."""
    if _libc.setns(descriptor, _CLONE_NEWNET):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
