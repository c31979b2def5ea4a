"""The options that a tritonserver was started with, as far as charonia's models depend on them.

Owns reading its command line, as tritonserver 2.51.0 does, and its environment. Must not know the
calls that are made to a server.
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
"""Environment variable of a tritonserver that expects the run's key in the name of each model to
load or unload (`launch/server/guard.c`), instead of in a header."""

NOT_EXPLICIT = "recovery is off: tritonserver was not started with --model-control-mode=explicit"
NO_GRPC = "recovery is off: tritonserver serves no gRPC, over which models are loaded"
ENCRYPTED = "recovery is off: tritonserver's gRPC, over which models are loaded, is encrypted"
SHARED = "recovery is off: tritonserver shares its gRPC port, over which models are loaded"


def keyed_name(key: str, model: str) -> str:
    """The name of a model in a call to load or unload it, including the key."""
    return f"{key}:{model}"


class ServerOptions:
    """The options of a tritonserver with this command line.

    Args:
        command_line: its arguments, with or without the name of the executable.
        key: the value of `KEY_VARIABLE` in its environment; empty if it is not set.

    Attributes:
        refusal: why a model cannot have it load and unload models; None if it can.
        grpc_url: `host:port` on this machine. metadata: grants access to its model control.
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
        """Return whether a header of this name may become a request's parameter.

        Over gRPC headers have names in lower case; over HTTP they keep theirs.
        """
        return any(
            pattern is None or pattern.search(name) for pattern in self._header_patterns.values()
        )

    def check_forwarded(self, name: str) -> None:
        """Make sure that a header of this name becomes a parameter over every protocol.

        If one does not forward it, a client could set a parameter of that name itself. Over HTTP
        the header may also come in lower case, as in HTTP/2.

        Raises:
            ConfigError: a protocol does not forward it, or its pattern is not valid in Python.
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
        """The name of a model in a call to load or unload it."""
        return keyed_name(self._key, model) if self._key else model

    @classmethod
    def of_process(cls, pid: int) -> "ServerOptions":
        """Read the options of a running tritonserver; all are defaults if it has ended."""
        variables = dict(line.partition("=")[::2] for line in _lines(pid, "environ"))
        return cls(_lines(pid, "cmdline"), variables.get(KEY_VARIABLE, ""))


def header_pattern(command_line: Sequence[str], protocol: str) -> str:
    """The pattern of headers that `grpc` or `http` forwards, by its last option; "" for none."""
    values = [
        value
        for name, value in _options(command_line)
        if name == f"{protocol}-header-forward-pattern"
    ]
    return values[-1] if values else ""


def _lines(pid: int, file: str) -> list[str]:
    """Read a file of NUL-separated strings in /proc; nothing if the process has ended."""
    try:
        text = Path(f"/proc/{pid}/{file}").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    return text.split("\0")


def _options(command_line: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The options of `_NAMES` with their values, in order, parsed as getopt_long does."""
    parts = iter(command_line)
    for part in parts:
        if part.startswith("--"):
            given, equals, value = part[2:].partition("=")
            name = _full_name(given)
            if name is not None:
                yield name, value if equals else next(parts, "")


def _full_name(given: str) -> str | None:
    """Complete an option's name. It may be shortened if it is unambiguous."""
    if given in _NAMES:
        return given
    meant = [name for name in _NAMES if given and name.startswith(given)]
    return meant[0] if len(meant) == 1 else None


def _pattern(text: str) -> re.Pattern[str] | None:
    """Compile a pattern. Triton's syntax is RE2's; None if it is not valid in Python."""
    try:
        return re.compile(text)
    except re.error:
        return None


def _metadata(restriction: str) -> tuple[tuple[str, str], ...]:
    """The metadata for model control, if that is among the protocols of `protocol,…:key=value`."""
    protocols, _, pair = restriction.partition(":")
    key, _, value = pair.partition("=")
    return ((f"{_HEADER}{key}", value),) if _PROTOCOL in protocols.split(",") else ()
