"""Addresses of this machine: finds them, and listens at them.

Must not know ranks or messages.
"""

import socket

import psutil

from charonia.errors import ConfigError


def own_address(host: str) -> str:
    """Resolve `host`, a name or an address, to a numeric address of this machine.

    Other machines must be able to reach it, so wildcard addresses are refused.

    Raises:
        ConfigError: `host` cannot be resolved, or is not an address of this machine.
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
        ConfigError: no interface has it.
    """
    name = _find_interface(address)
    if name is None:
        raise ConfigError(f"{address!r} is not an address of this machine")
    return name


def listen(address: str, port: int) -> socket.socket:
    """Listen for connections; port 0 takes any free port.

    Raises:
        ConfigError: the port is in use, or this user may not bind it.
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
            f"cannot listen for ranks at {address}:{port}: {error.strerror}"
        ) from None
    return listener


def _find_interface(address: str) -> str | None:
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return name
    return None
