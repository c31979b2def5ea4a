"""TritonServer, on the real tritonserver with stand-in models."""

import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

import charonia
from charonia.errors import LaunchError, NotReadyError
from charonia.launch.server.discovery import Installation
from charonia.launch.server.runtime_dir import (
    KEY_FILE,
    living_runs,
    owner_of,
    sweep_stale_runs,
)
from charonia.launch.server.tritonserver import (
    END_REQUESTS_S,
    EXIT_TIMEOUT_S,
    INDEX_S,
    STOP_S,
    TritonServer,
    check_further_option,
)
from charonia.supervision.server.background import in_background
from support.e2e import HTTP, wait_for
from support.leftovers import leftovers
from support.long import long
from support.stand_ins import SLOW_LINE, STAND_INS, control_over_http
from support.stopping import stop_process
from support.supervised import ALLOWED_S

MakeServer = Callable[..., TritonServer]
EXIT_TIMEOUT = "Exit timeout expired"


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A server that some tests share, which only look at it."""
    repository = tmp_path_factory.mktemp("unharmed") / "model_repository"
    with TritonServer(Path(shutil.copytree(STAND_INS, repository))) as server:
        yield server


def test_a_server_answers_and_leaves_nothing_behind(make_server: MakeServer) -> None:
    with make_server() as server:
        reply = HTTP.post(
            f"http://{server.http_url}/v2/models/scheduler/generate", json={"text_input": "x"}
        )
        assert reply.json()["text_output"] == "word0 "
        assert len(server.pids("scheduler")) == len(server.pids("engine")) == 1
        assert HTTP.get(server.metrics_url).status_code == 200
        assert leftovers(server.runtime_dir)
    assert leftovers(server.runtime_dir) == []


def test_a_stopped_server_can_be_started_again_and_its_metrics_port_stays(
    make_server: MakeServer,
) -> None:
    server = make_server()
    for end in (server.stop, server.kill):
        server.start()
        server.wait_ready()
        assert "nv_inference_count" in HTTP.get(server.metrics_url).text
        end()
        assert server.pids("scheduler") == []
        page = HTTP.get(server.metrics_url)
        assert (page.status_code, page.text) == (503, "tritonserver does not run\n")
    server.close()
    with pytest.raises(httpx.ConnectError):
        HTTP.get(server.metrics_url)


def test_the_address_is_the_metrics_too_but_not_that_of_tritons_own_page(
    make_server: MakeServer,
) -> None:
    with make_server(address="0.0.0.0") as server:
        assert HTTP.get(server.metrics_url).status_code == 200
        assert HTTP.get(f"http://127.0.0.2:{server.metrics_port}/metrics").status_code == 200
        own_url = server._triton_metrics_url()
        assert own_url is not None
        assert HTTP.get(own_url).status_code == 200
        with pytest.raises(httpx.ConnectError):
            HTTP.get(own_url.replace("127.0.0.1", "127.0.0.2"))


def test_a_stopped_process_does_not_survive_a_stop(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("charonia.launch.server.tritonserver.EXIT_TIMEOUT_S", 1)
    monkeypatch.setattr("charonia.launch.server.tritonserver.STOP_S", ALLOWED_S)
    log: list[str] = []
    with make_server(on_log=log.append) as server:
        stop_process(server.pids("scheduler")[0])
    assert [line for line in log if EXIT_TIMEOUT in line], "that is what bounds it"
    assert leftovers(server.runtime_dir) == []


def test_all_that_a_stop_waits_for_is_over_in_time() -> None:
    # Docker gives a container ten seconds.
    assert END_REQUESTS_S + INDEX_S + EXIT_TIMEOUT_S + STOP_S <= 10


def test_a_server_that_is_not_ready_in_time_is_given_up_with_what_it_said_last(
    make_server: MakeServer, repository: Path
) -> None:
    (repository / "load-slowly").touch()
    log: list[str] = []
    server = make_server(on_log=log.append)
    server.start()
    wait_for(lambda: log, lambda lines: any(SLOW_LINE in line for line in lines))
    with pytest.raises(NotReadyError, match="not ready within 0 s") as caught:
        server.wait_ready(0)
    _, _, said = str(caught.value).partition("; it said last: ")
    assert wait_for(lambda: said in log, bool)
    assert said in caught.value.__notes__[0]


def test_a_server_is_not_ready_before_its_metrics_can_be_read(make_server: MakeServer) -> None:
    # tritonserver opens its port for metrics last.
    server = make_server()
    server.start()
    ready_url = f"http://{server.http_url}/v2/health/ready"
    with pytest.MonkeyPatch.context() as patch, socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        patch.setattr(server, "_triton_metrics_port", deaf.getsockname()[1])
        assert wait_for(lambda: is_ok(ready_url), bool)
        with pytest.raises(NotReadyError):
            server.wait_ready(0)
    server.wait_ready()
    assert HTTP.get(server.metrics_url).status_code == 200


def is_ok(url: str) -> bool:
    """Whether a page is there."""
    try:
        return HTTP.get(url).status_code == 200
    except httpx.TransportError:
        return False


def test_a_stop_waits_for_no_model_that_is_being_loaded(
    make_server: MakeServer, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("INDEX_S", "EXIT_TIMEOUT_S", "STOP_S"):
        monkeypatch.setattr(f"charonia.launch.server.tritonserver.{name}", int(ALLOWED_S))
    log: list[str] = []
    with make_server(on_log=log.append) as server:
        control_over_http(server, "engine", "unload").raise_for_status()
        (repository / "load-slowly").touch()
        in_background(lambda: control_over_http(server, "engine", "load"))
        wait_for(lambda: log, lambda lines: any(SLOW_LINE in line for line in lines))
    assert [line for line in log if "failed to load 'engine'" in line]
    assert [line for line in log if "did not end" in line or EXIT_TIMEOUT in line] == []
    assert leftovers(server.runtime_dir) == []


@long
def test_a_stop_of_a_server_that_is_ending_already_leaves_nothing_behind(
    make_server: MakeServer, repository: Path
) -> None:
    with make_server() as server:
        (repository / "load-slowly").touch()
        in_background(lambda: load_again(server, "engine"))
        wait_for(lambda: server.pids("engine"), lambda pids: len(pids) > 1)
        assert server.pid is not None
        os.kill(server.pid, signal.SIGTERM)
        time.sleep(0.5)  # it answers still, though it takes no calls
    assert leftovers(server.runtime_dir) == []


def load_again(server: TritonServer, model: str) -> None:
    (server.repository / model / "1" / "model.py").touch()
    control_over_http(server, model, "load")


def test_a_process_that_ends_while_it_is_looked_at_harms_nobody(
    unharmed: TritonServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = psutil.Process.cmdline
    seen: set[int] = set()

    def read_once(process: psutil.Process) -> list[str]:
        if process.pid in seen:
            return []  # as of one that has just ended
        seen.add(process.pid)
        return list(read(process))

    monkeypatch.setattr(psutil.Process, "cmdline", read_once)
    assert set(unharmed.stubs()) == {"engine", "generate", "scheduler"}
    assert unharmed.stubs() == {}


def test_restricted_endpoints_open_only_with_the_key_over_http(unharmed: TritonServer) -> None:
    endpoints = (
        ("GET", "/v2/systemsharedmemory/status"),
        ("GET", "/v2/trace/setting"),
        ("GET", "/v2/logging"),
    )
    for headers, expected in (({}, 403), (unharmed.api_headers, 200)):
        for method, path in endpoints:
            reply = HTTP.request(method, f"http://{unharmed.http_url}{path}", headers=headers)
            assert (path, reply.status_code) == (path, expected)


def test_restricted_protocols_open_only_with_the_key_over_grpc(unharmed: TritonServer) -> None:
    with tritonclient.grpc.InferenceServerClient(unharmed.grpc_url) as client:
        calls: tuple[Callable[..., object], ...] = (
            client.get_system_shared_memory_status,
            client.get_trace_settings,
            client.get_log_settings,
        )
        for call in calls:
            with pytest.raises(InferenceServerException, match="restricted"):
                call()
            call(headers=unharmed.api_headers)


def test_the_key_is_for_the_operator_alone(make_server: MakeServer) -> None:
    server = make_server()
    key_file = server.runtime_dir / KEY_FILE
    assert key_file.read_text("utf-8").strip() == server.api_key
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    assert stat.S_IMODE(server.runtime_dir.stat().st_mode) == 0o700
    assert make_server().api_key != server.api_key


@pytest.mark.parametrize(
    ("option", "what"),
    [("http_port", "HTTP"), ("grpc_port", "gRPC"), ("metrics_port", "metrics")],
)
def test_a_taken_port_is_named_before_anything_starts(
    make_server: MakeServer, option: str, what: str
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = make_server(**{option: port})
        with pytest.raises(LaunchError, match=f"^{what} port {port} on 127.0.0.1"):
            server.start()
    assert server.pid is None


NEWER_TRITON = """#!/bin/sh
[ "$1" = --help ] && { echo "  --http-max-input-size <integer>" >&2; exit 1; }
printf '%s\\n' "$@"
"""


def test_a_release_that_can_bound_a_request_is_told_to(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installation = Installation(tmp_path / "newer", None, ())
    installation.binary.parent.mkdir(parents=True)
    installation.binary.write_text(NEWER_TRITON, encoding="utf-8")
    installation.binary.chmod(0o755)
    monkeypatch.setattr(
        "charonia.launch.server.tritonserver.find_tritonserver", lambda: installation
    )
    log: list[str] = []
    server = TritonServer(repository, on_log=log.append)
    server.start()
    with pytest.raises(LaunchError):
        server.wait_ready()
    server.close()
    assert "--http-max-input-size=67108864" in log


def test_a_model_that_cannot_be_loaded_is_the_reason(
    make_server: MakeServer, repository: Path
) -> None:
    (repository / "refuse-to-load").touch()
    server = make_server()
    server.start()
    with pytest.raises(LaunchError, match=r"'scheduler'.* the stand-in refuses to load"):
        server.wait_ready()


def test_the_models_import_the_launchers_own_copy_of_charonia_wherever_it_is_started(
    make_server: MakeServer, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = repository / "engine" / "1" / "model.py"
    tell = f"import charonia\nopen({str(tmp_path / 'told')!r}, 'w').write(charonia.__file__)\n"
    model.write_text(tell + model.read_text("utf-8"), encoding="utf-8")
    (tmp_path / "charonia").mkdir()
    (tmp_path / "charonia" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    with make_server():
        assert (tmp_path / "told").read_text("utf-8") == charonia.__file__


LAUNCHER = """
import sys, time
from pathlib import Path
from charonia.launch.server.tritonserver import check_further_option, TritonServer
server = TritonServer(Path(sys.argv[1]))
server.start()
server.wait_ready()
print(server.runtime_dir, server.pid, server.pids("scheduler")[0], flush=True)
time.sleep(600)
"""


def test_a_killed_launcher_takes_its_server_along_and_the_next_one_sweeps(
    repository: Path,
) -> None:
    command = [sys.executable, "-c", LAUNCHER, str(repository)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        path, pid, stub = launcher.stdout.readline().split()
        assert Path(path) not in sweep_stale_runs()
        stop_process(int(stub))  # the one thing that does not die by itself
        launcher.kill()
    assert not wait_for(lambda: psutil.pid_exists(int(pid)), lambda is_there: not is_there)
    assert Path(path) in sweep_stale_runs()
    # What was killed may take its time on a busy machine.
    assert wait_for(lambda: leftovers(Path(path)), lambda found: not found) == []


ZOMBIE = """
import time
from charonia.launch.server.runtime_dir import RuntimeDir
print(RuntimeDir().path, flush=True)
time.sleep(600)
"""


def test_a_killed_launcher_that_nobody_has_waited_for_runs_no_more() -> None:
    command = [sys.executable, "-c", ZOMBIE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        path = Path(launcher.stdout.readline().strip())
        before = living_runs()
        launcher.kill()
        assert path in before
        os.waitid(os.P_PID, launcher.pid, os.WEXITED | os.WNOWAIT)
        assert path not in living_runs()
        assert owner_of(path) is None
        assert path in sweep_stale_runs()


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        ("log-verbose=1", "'log-verbose=1' of tritonserver is not --NAME=VALUE"),
        ("--log-verbose", "'--log-verbose' of tritonserver is not --NAME=VALUE"),
        ("--http-port=1", "'--http-port=1' of tritonserver is for charonia to choose"),
        ("--http-restricted=x", "'--http-restricted=x' of tritonserver is for charonia to choose"),
        ("--model-store=/m", "'--model-store=/m' of tritonserver is for charonia to choose"),
        ("--allow-http=false", "'--allow-http=false' of tritonserver is for charonia to choose"),
        (
            "--backend-config=python,shm-region-prefix-name=a",
            "'--backend-config=python,shm-region-prefix-name=a' of tritonserver is for charonia to"
            " choose",
        ),
    ],
)
def test_an_option_of_tritonserver_is_checked_before_the_start(
    repository: Path, option: str, problem: str
) -> None:
    with pytest.raises(LaunchError) as error:
        TritonServer(repository, further_options=[option])
    assert str(error.value) == f"option {problem}"
    check_further_option(
        "--backend-config=python,shm-default-byte-size=1048576", ["backend-config"]
    )


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("--no-such=1", "/bin/tritonserver: unrecognized option '--no-such=1'"),
        ("--log-verbose=x", 'Bad option: "--log-verbose".'),
    ],
)
def test_an_option_that_tritonserver_does_not_take_is_the_reason_without_its_list_of_options(
    make_server: MakeServer, option: str, reason: str
) -> None:
    log: list[str] = []
    server = make_server(further_options=[option], on_log=log.append)
    server.start()
    with pytest.raises(LaunchError, match="ended with exit code 1: ") as error:
        server.wait_ready()
    assert str(error.value).endswith(reason)
    assert len(log) < 5
