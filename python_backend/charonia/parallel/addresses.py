"""This machine's addresses: which are its own, and who listens there.

Must not know ranks or messages.
"""

import socket

import psutil

from charonia.errors import ConfigError


def own_address(host: str) -> str:
    """The numeric address of this machine that `host`, a name or an address, stands for.

    Others must be able to reach it, so it is none that stands for all addresses of a machine.

    Raises:
        ConfigError: it cannot be resolved, or is no address of this machine.
    """
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{host!r} cannot be resolved: {reason}") from None
    found = list(dict.fromkeys(str(entry[4][0]) for entry in entries))
    for address in found:
        if _find_interface(address) is not None:
            return address
    meaning = "" if found == [host] else f", which means {' or '.join(found)},"
    raise ConfigError(f"{host!r}{meaning} is not an address of this machine")


def interface_of(address: str) -> str:
    """Name the network interface that has this address.

    Raises:
        ConfigError: none has.
    """
    name = _find_interface(address)
    if name is None:
        raise ConfigError(f"{address!r} is not an address of this machine")
    return name


def listen(address: str, port: int) -> socket.socket:
    """Listen for connections; port 0 is any.

    Raises:
        ConfigError: it is taken, or not ours to take.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"ranks cannot be waited for at {address}:{port}: {error.strerror}"
        ) from None
    return listener


def _find_interface(address: str) -> str | None:
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return name
    return None
