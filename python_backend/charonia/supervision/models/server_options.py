"""How a tritonserver was started, as far as having it load models, and its requests, need that.

Owns reading its command line, as tritonserver 2.51.0 does, and its environment. Must not know what
is asked of a server.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from charonia.errors import ConfigError

_NAMES = (
    "allow-grpc",
    "allow-http",
    "grpc-address",
    "grpc-header-forward-pattern",
    "grpc-port",
    "grpc-restricted-protocol",
    "grpc-use-ssl",
    "grpc-use-ssl-mutual",
    "http-header-forward-pattern",
    "model-control-mode",
    "reuse-grpc-port",
)
_PROTOCOL = "model-repository"
_HEADER = "triton-grpc-protocol-"
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_TRUE = ("true", "1", "on")
KEY_VARIABLE = "CHARONIA_MODEL_CONTROL_KEY"
"""In the environment of a tritonserver that wants the run's key in the name of each model which is
to be loaded or unloaded (`launch/server/guard.c`), instead of in a header."""

NOT_EXPLICIT = "recovery is off: tritonserver was not started with --model-control-mode=explicit"
NO_GRPC = "recovery is off: tritonserver serves no gRPC, over which models are loaded"
ENCRYPTED = "recovery is off: tritonserver's gRPC, over which models are loaded, is encrypted"
SHARED = "recovery is off: tritonserver shares its gRPC port, over which models are loaded"


def keyed_name(key: str, model: str) -> str:
    """What a model is called in a call to load or unload it that shows the key."""
    return f"{key}:{model}"


class ServerOptions:
    """What a tritonserver that was started by this command line can be asked.

    Args:
        command_line: with or without the name of the executable.
        key: what `KEY_VARIABLE` is in its environment; empty where it is not there.

    Attributes:
        refusal: why it loads and unloads no models on a model's order; None where it does.
        grpc_url: `host:port` on this machine. metadata: opens its model control.
    """

    def __init__(self, command_line: Sequence[str], key: str = "") -> None:
        self._key = key
        host, port = "0.0.0.0", "8001"
        is_explicit = is_encrypted = is_shared = False
        serves_grpc = serves_http = True
        self.metadata: tuple[tuple[str, str], ...] = ()
        self._header_patterns: dict[str, re.Pattern[str] | None] = {}
        for name, value in _options(command_line):
            is_true = value.lower() in _TRUE
            match name:
                case "model-control-mode":
                    is_explicit = value.lower() == "explicit"
                case "allow-grpc":
                    serves_grpc = is_true
                case "allow-http":
                    serves_http = is_true
                case "grpc-address":
                    host = value.removeprefix("[").removesuffix("]")
                case "grpc-port":
                    port = value
                case "reuse-grpc-port":
                    is_shared = is_true
                case "grpc-use-ssl":
                    is_encrypted = is_true
                case "grpc-use-ssl-mutual":
                    is_encrypted = True  # whatever its value
                case "grpc-header-forward-pattern" | "http-header-forward-pattern":
                    self._header_patterns.pop(name, None)
                    if value:
                        self._header_patterns[name] = _pattern(value)
                case "grpc-restricted-protocol":
                    self.metadata = _metadata(value) or self.metadata
        obstacles = {
            NOT_EXPLICIT: not is_explicit,
            NO_GRPC: not serves_grpc,
            ENCRYPTED: is_encrypted,
            SHARED: is_shared,
        }
        served = {"http": serves_http, "grpc": serves_grpc}
        self._protocols = [protocol for protocol, is_served in served.items() if is_served]
        self.refusal = next((reason for reason, holds in obstacles.items() if holds), None)
        host = _LOOPBACK.get(host, host)
        self.grpc_url = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def forwards(self, name: str) -> bool:
        """Whether a header of this name may become a request's parameter.

        Over gRPC headers have names in lower case; over HTTP they keep theirs.
        """
        return any(
            pattern is None or pattern.search(name) for pattern in self._header_patterns.values()
        )

    def check_forwarded(self, name: str) -> None:
        """Make sure that a header of this name becomes a parameter over every protocol.

        Where one does not forward it, a client's own parameter of its name would count instead.
        Over HTTP it may come in lower case too, as HTTP/2 has it.

        Raises:
            ConfigError: a protocol does not forward it, or by a pattern that Python does not know.
        """
        spellings = {"http": {name, name.lower()}, "grpc": {name.lower()}}
        advised = {"http": f"'(?i){name}'", "grpc": name.lower()}
        missing = []
        for protocol in self._protocols:
            option = f"{protocol}-header-forward-pattern"
            pattern = self._header_patterns.get(option)
            if pattern is None or not all(map(pattern.search, spellings[protocol])):
                missing.append(f"--{option}={advised[protocol]}")
        if missing:
            raise ConfigError(
                f"tritonserver does not forward the header {name} over every protocol; start it"
                f" with {' and '.join(missing)}"
            )

    def control_name(self, model: str) -> str:
        """What a model is called when it is to be loaded or unloaded."""
        return keyed_name(self._key, model) if self._key else model

    @classmethod
    def of_process(cls, pid: int) -> "ServerOptions":
        """Those of a tritonserver that runs; none of one that has ended."""
        variables = dict(line.partition("=")[::2] for line in _lines(pid, "environ"))
        return cls(_lines(pid, "cmdline"), variables.get(KEY_VARIABLE, ""))


def _lines(pid: int, file: str) -> list[str]:
    """What one of a process's files in /proc holds; nothing of one that has ended."""
    try:
        text = Path(f"/proc/{pid}/{file}").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    return text.split("\0")


def _options(command_line: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Those of `_NAMES` with their values, in order, as getopt_long takes them apart."""
    parts = iter(command_line)
    for part in parts:
        if part.startswith("--"):
            given, equals, value = part[2:].partition("=")
            name = _full_name(given)
            if name is not None:
                yield name, value if equals else next(parts, "")


def _full_name(given: str) -> str | None:
    """A name may be shortened as long as it is clear; else the server would not have started."""
    if given in _NAMES:
        return given
    meant = [name for name in _NAMES if given and name.startswith(given)]
    return meant[0] if len(meant) == 1 else None


def _pattern(text: str) -> re.Pattern[str] | None:
    """Triton's syntax is RE2's; None where Python does not know it."""
    try:
        return re.compile(text)
    except re.error:
        return None


def _metadata(restriction: str) -> tuple[tuple[str, str], ...]:
    """What opens model control, if that is among the protocols of `protocol,…:key=value`."""
    protocols, _, pair = restriction.partition(":")
    key, _, value = pair.partition("=")
    return ((f"{_HEADER}{key}", value),) if _PROTOCOL in protocols.split(",") else ()
