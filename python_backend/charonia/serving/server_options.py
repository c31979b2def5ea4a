"""How a tritonserver was started, as far as model control needs it.

Owns reading its command line. Must not know what is asked of the server.
"""

from collections.abc import Sequence
from pathlib import Path

_MODEL_CONTROL = "model-control-mode"
_ALLOW_GRPC = "allow-grpc"
_ADDRESS = "grpc-address"
_PORT = "grpc-port"
_SSL = "grpc-use-ssl"
_MUTUAL_SSL = "grpc-use-ssl-mutual"
_RESTRICTED = "grpc-restricted-protocol"
_NAMES = (_MODEL_CONTROL, _ALLOW_GRPC, _ADDRESS, _PORT, _SSL, _MUTUAL_SSL, _RESTRICTED)
_PROTOCOL = "model-repository"
_HEADER = "triton-grpc-protocol-"
_DEFAULT_PORT = "8001"
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_TRUE = ("true", "1", "on")

NOT_EXPLICIT = "recovery is off: tritonserver was not started with --model-control-mode=explicit"
NO_GRPC = "recovery is off: tritonserver serves no gRPC, over which models are loaded"
ENCRYPTED = "recovery is off: tritonserver's gRPC, over which models are loaded, is encrypted"


class ServerOptions:
    """What a tritonserver that was started by this command line can be asked.

    Attributes:
        refusal: why it loads and unloads no models on a model's order; None where it does.
        grpc_url: `host:port` on this machine. metadata: opens its model control.
    """

    def __init__(self, command_line: Sequence[str]) -> None:
        values = _read(command_line)
        self.refusal = _refusal(values)
        address = values[_ADDRESS][-1] if values[_ADDRESS] else "0.0.0.0"
        host = _LOOPBACK.get(address, address)
        port = values[_PORT][-1] if values[_PORT] else _DEFAULT_PORT
        self.grpc_url = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.metadata = _metadata(values[_RESTRICTED])

    @classmethod
    def of_process(cls, pid: int) -> "ServerOptions":
        """Those of a tritonserver that runs; none of one that has ended."""
        try:
            text = Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace")
        except OSError:
            text = ""
        return cls(text.split("\0"))


def _read(command_line: Sequence[str]) -> dict[str, list[str]]:
    """The values of each option of `_NAMES`, as getopt_long takes them apart."""
    values: dict[str, list[str]] = {name: [] for name in _NAMES}
    parts = iter(command_line)
    for part in parts:
        if not part.startswith("--"):
            continue
        given, equals, value = part[2:].partition("=")
        name = _full_name(given)
        if name is not None:
            values[name].append(value if equals else next(parts, ""))
    return values


def _full_name(given: str) -> str | None:
    """A name may be shortened as long as it is clear; else the server would not have started."""
    if given in _NAMES:
        return given
    meant = [name for name in _NAMES if given and name.startswith(given)]
    return meant[0] if len(meant) == 1 else None


def _refusal(values: dict[str, list[str]]) -> str | None:
    if values[_MODEL_CONTROL][-1:] != ["explicit"]:
        return NOT_EXPLICIT
    if values[_ALLOW_GRPC] and not _is_true(values[_ALLOW_GRPC]):
        return NO_GRPC
    if _is_true(values[_SSL]) or _is_true(values[_MUTUAL_SSL]):
        return ENCRYPTED
    return None


def _is_true(values: list[str]) -> bool:
    return bool(values) and values[-1].lower() in _TRUE


def _metadata(restrictions: list[str]) -> tuple[tuple[str, str], ...]:
    """Of all restrictions, each `protocol,protocol,…:key=value`, what opens model control."""
    for restriction in restrictions:
        protocols, _, pair = restriction.partition(":")
        key, _, value = pair.partition("=")
        if _PROTOCOL in protocols.split(","):
            return ((f"{_HEADER}{key}", value),)
    return ()
