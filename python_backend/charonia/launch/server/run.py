"""Runs a charonia server from a model repository and overrides, without supervision.

Owns combining `repository`, `tritonserver` and the probe for temporary servers: those of the demo,
the benchmark and the tests. `charonia serve` does the same with a supervisor.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from charonia.errors import CrashError, NotReadyError
from charonia.launch.server.cores import cores_beside_engine
from charonia.launch.server.repository import (
    PreparedRepository,
    RepositoryOptions,
    prepare_repository,
)
from charonia.launch.server.runtime_dir import REPOSITORY, RuntimeDir
from charonia.launch.server.tritonserver import TritonServer
from charonia.supervision.server.probes import Probe
from charonia.supervision.server.supervisor import wait_serving


@contextlib.contextmanager
def prepared_server(
    options: RepositoryOptions, **server_options: Any
) -> Iterator[tuple[TritonServer, PreparedRepository]]:
    """A server over a prepared repository, not started yet. Everything is removed at the end.

    Raises:
        LaunchError, ConfigError, CheckpointError: as `prepare_repository` and `TritonServer`.
    """
    runtime = RuntimeDir()
    try:
        prepared = prepare_repository(runtime.path / REPOSITORY, options)
        cores = cores_beside_engine(prepared.engine_args)
        server = TritonServer(prepared.path, runtime=runtime, cores=cores, **server_options)
        try:
            yield server, prepared
        finally:
            server.close()
    finally:
        runtime.close()


@contextlib.contextmanager
def running_server(
    *,
    model: Path | None = None,
    draft_model: Path | None = None,
    dtype: str | None = None,
    settings: tuple[str, ...] = (),
    served_model_names: tuple[str, ...] = (),
    facades: tuple[str, ...] = (),
    is_facade_decoupled: bool = True,
    source: Path | None = None,
    timeout: float = 120.0,
    tritonserver: Sequence[str] = (),
    on_log: Callable[[str], None] = lambda line: None,
) -> Iterator[TritonServer]:
    """A server on free ports that has run an inference; arguments as of RepositoryOptions.

    Call this from a thread that lives as long as the server. `timeout` is in seconds.
    `tritonserver` has additional options of tritonserver, `--name=value` each.

    Raises:
        LaunchError, ConfigError, CheckpointError: it cannot be started, for the reason in the text.
    """
    options = RepositoryOptions(
        source=source,
        model=model,
        draft_model=draft_model,
        dtype=dtype,
        served_model_names=served_model_names,
        facades=facades,
        is_facade_decoupled=is_facade_decoupled,
        settings=settings,
    )
    with prepared_server(options, further_options=tritonserver, on_log=on_log) as (
        server,
        prepared,
    ):
        with contextlib.closing(Probe(server.http_url, prepared.scheduler)) as probe:
            _start(server, probe, timeout)
        yield server


def _start(server: TritonServer, probe: Probe, timeout: float) -> None:
    """Start a server; try once more if it crashes or hangs during the start."""
    server.start()
    try:
        wait_serving(server, probe, timeout)
    except (CrashError, NotReadyError) as error:
        said = "\n".join([str(error), *getattr(error, "__notes__", [])])
        with contextlib.suppress(OSError):  # a full disk, say
            print(f"charonia: {said}\ncharonia: starting it once more", file=sys.stderr, flush=True)
        server.kill()
        server.start()
        wait_serving(server, probe, timeout)
