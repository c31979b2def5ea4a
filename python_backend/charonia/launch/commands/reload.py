"""`charonia reload`: a running server goes on with another checkpoint or configuration.

Owns finding the server, checking what is asked for as `charonia serve` would, and what is shown.
Must not know how the scheduler replaces its engine.
"""

import contextlib
import json
import socket
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from charonia.errors import LaunchError
from charonia.launch.server.repository import RepositoryOptions, change_engine
from charonia.launch.server.runtime_dir import REPOSITORY, SERVER_FILE, living_runs
from charonia.serving.messages.reload import (
    RELOAD_SOCKET,
    ReloadOrder,
    ReloadQuestion,
    ReloadState,
    check_same_tokenizer,
    fingerprint_tokenizer,
)
from charonia.sockets.channel import Channel
from charonia.sockets.local import connect

POLL_S = 0.2
ANSWER_TIMEOUT_S = 30.0


def reload(
    options: RepositoryOptions, *, drain: bool, runtime_dir: Path | None, url: str | None
) -> None:
    """Have a running `charonia serve` go on with another engine, and wait until it does.

    Args:
        options: what shall change; `source` is not looked at.
        drain: let live requests finish on the old engine first.
        runtime_dir, url: of the server, where there are several: its directory, or `host:port` of
            its HTTP or gRPC endpoint.

    Raises:
        LaunchError: there is no such server, or it goes on with the old engine; the text says why.
        ConfigError, CheckpointError: what is asked for cannot be served.
    """
    repository = find_run(runtime_dir, url) / REPOSITORY
    change = change_engine(repository, options)
    check_same_tokenizer(fingerprint_tokenizer(change.before), change.after)
    try:
        channel = connect(repository / change.scheduler / "1" / RELOAD_SOCKET)
    except OSError as error:
        raise LaunchError(f"the server's scheduler cannot be reached: {error.strerror}") from None
    with contextlib.closing(channel):
        state = _ask(channel, ReloadOrder(change.values, drain))
        try:
            state = _follow(channel, state)
        except KeyboardInterrupt:
            state = _follow(channel, _ask(channel, ReloadQuestion(state.number, cancel=True)))
    if state.phase == "failed":
        after = f" (after {state.seconds:.1f} s)" if state.seconds else ""
        raise LaunchError(f"not reloaded{after}, the old configuration stays: {state.reason}")
    print(f"reloaded in {state.seconds:.1f} s; {state.num_live} live requests went on")
    for name, (old, new) in change.differences().items():
        print(f"  {name}: {json.dumps(old)} -> {json.dumps(new)}")


def find_run(runtime_dir: Path | None, url: str | None) -> Path:
    """The runtime directory of the server that is meant.

    Raises:
        LaunchError: there is none, or there are several.
    """
    if runtime_dir is not None:
        if not (runtime_dir / REPOSITORY).is_dir():
            raise LaunchError(f"{runtime_dir} is not the runtime directory of a server")
        return runtime_dir.absolute()
    runs = {path: _addresses(path) for path in living_runs()}
    if url is not None:
        meant = _same_addresses(url)
        runs = {path: found for path, found in runs.items() if meant.intersection(found)}
    if len(runs) == 1:
        return next(iter(runs))
    if not runs:
        raise LaunchError(
            "no server of this user runs here" + (f" at {url}" if url is not None else "")
        )
    known = "; ".join(f"{path} at {', '.join(urls)}" for path, urls in runs.items())
    raise LaunchError(f"several servers run, name one by --url or --runtime-dir: {known}")


def _addresses(path: Path) -> list[str]:
    try:
        values = json.loads((path / SERVER_FILE).read_text(encoding="utf-8"))
        return [values["http_url"], values["grpc_url"]]
    except (OSError, ValueError, KeyError):
        return []  # it is being started


def _same_addresses(url: str) -> set[str]:
    """Resolve the address that a user names to those that a server may have for it."""
    host, _, port = url.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except OSError:
        return set()
    hosts = {str(address[0]) for *_, address in found}
    return {f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts}


def _ask(channel: Channel, message: Any) -> ReloadState:
    try:
        channel.send(msgspec.msgpack.encode(message), ANSWER_TIMEOUT_S)
        reply = channel.receive(ANSWER_TIMEOUT_S)
    except OSError as error:
        raise LaunchError(f"the server's scheduler does not answer: {error}") from None
    if reply is None:
        raise LaunchError("the server's scheduler has gone, or is of another version")
    return msgspec.msgpack.decode(reply, type=ReloadState)


def _follow(channel: Channel, state: ReloadState) -> ReloadState:
    """Show how far it is until it is over; returns how it ended.

    A line for each phase; of a drain one more whenever half of the requests that run have ended.
    """
    shown: ReloadState | None = None
    while state.phase not in ("done", "failed"):
        if shown is None or state.phase != shown.phase or 2 * state.num_live <= shown.num_live > 0:
            line: str = state.phase
            if state.phase == "draining":
                line += f": {state.num_live} requests are running, {state.num_held} wait"
            print(f"charonia: {line}", file=sys.stderr, flush=True)
            shown = state
        time.sleep(POLL_S)
        state = _ask(channel, ReloadQuestion(state.number))
    return state
