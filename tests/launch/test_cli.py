"""The `charonia` command as a person or a container uses it."""

import contextlib
import io
import json
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import httpx
import pytest

from charonia import __version__
from charonia.launch.commands import generate
from charonia.launch.commands.arguments import values
from charonia.launch.commands.cli import main
from charonia.launch.server.processes import find_by_argument
from charonia_client import Chunk
from support.behind_proxy import BEHIND_PROXY
from support.leftovers import leftovers
from support.long import long
from support.serving import Serving
from support.stopping import stop_process
from support.supervised import ALLOWED_S


@pytest.fixture
def serving(repository: Path, checkpoint_dir: Path) -> Iterator[Serving]:
    serving = Serving(
        "--model-repository", repository, "--model", checkpoint_dir, variables=BEHIND_PROXY
    )
    with serving.process:
        yield serving
        serving.process.kill()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_serve_announces_itself_and_ends_cleanly_on_a_signal(
    serving: Serving, signum: signal.Signals
) -> None:
    announcement = serving.wait_announced()
    curl = re.search(r"curl .*", announcement)
    assert curl is not None
    answer = subprocess.run(["sh", "-c", curl[0]], capture_output=True, text=True)
    assert '"text_output":"word31 "' in answer.stdout
    for address in re.findall(r"gRPC +(\S+)|http://([^/\s]+)", announcement):
        host, port = "".join(address).split(":")
        socket.create_connection((host, int(port)), timeout=ALLOWED_S).close()

    runtime_dir = serving.runtime_dir
    _, stderr = serving.end(signum)
    assert serving.process.returncode == 0
    assert leftovers(runtime_dir) == []
    assert stderr.splitlines()[-1] == "charonia: stopped"
    assert "Traceback" not in stderr


@long
def test_serve_ends_with_a_stopped_process_and_an_open_stream(serving: Serving) -> None:
    announcement = serving.wait_announced()
    url = re.search(r"http://\S+/generate_stream", announcement)
    assert url is not None
    body = {"text_input": "x", "max_tokens": 10_000, "delay": 0.05}
    runtime_dir = serving.runtime_dir
    [engine] = find_by_argument(serving.server().children(), "/engine/")
    with httpx.stream("POST", url[0], json=body, timeout=ALLOWED_S) as stream:
        lines = stream.iter_lines()  # whoever drops it hangs up
        next(lines)
        stop_process(engine.pid)
        serving.end(signal.SIGTERM)
    assert leftovers(runtime_dir) == []


def test_a_signal_while_the_server_starts_ends_it_too(serving: Serving) -> None:
    runtime_dir = serving.runtime_dir
    _, stderr = serving.end(signal.SIGTERM)
    assert (serving.process.returncode, "Traceback" in stderr) == (0, False)
    assert leftovers(runtime_dir) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "/no/such/directory"), "no checkpoint directory /no/such/directory"),
        (("--set", "max_seqs=1"), "unknown engine argument 'max_seqs'"),
        (("--model-repository", "/no/such"), "/no/such is not charonia's model repository"),
        (("--address", "192.0.2.1"), "cannot listen on 192.0.2.1"),
        (("--decoupled-mode", "false"), "--decoupled-mode is about the models of a --facade"),
        (("--facade", "vllm"), "--facade 'vllm' is not known; accepted are tensorrt-llm"),
    ],
)
def test_a_start_that_cannot_work_is_one_line(
    repository: Path,
    checkpoint_dir: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    base = ("serve", "--model-repository", str(repository), "--model", str(checkpoint_dir))
    assert main([*base, *arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"charonia: {message}")
    assert error.count("\n") == 1


def test_a_taken_port_is_one_line(
    repository: Path, checkpoint_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ("serve", "--model-repository", str(repository), "--model", str(checkpoint_dir))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main([*base, "--http-port", str(port)]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"charonia: HTTP port {port} on 127.0.0.1 cannot be used: Address already in use"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--http-port=1", "--grpc-port=1"), "HTTP and gRPC cannot both have port 1"),
        (("--metrics-port=8001",), "gRPC and metrics cannot both have port 8001"),
        (
            ("--gateway", "--gateway-port=8000"),
            "HTTP and the gateway cannot both have port 8000",
        ),
        (("--http-port=8080", "--gateway"), "HTTP and the gateway cannot both have port 8080"),
    ],
)
def test_a_port_for_two_is_one_line(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *arguments]) == 1
    assert capsys.readouterr().err == f"charonia: {message}\n"


def test_metrics_of_no_repository_of_another_url_or_at_a_taken_port_are_one_line(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["metrics", "--model-repository", "/no/such"]) == 1
    assert capsys.readouterr().err == "charonia: no model repository /no/such\n"
    url = "https://127.0.0.1:1/metrics"
    assert main(["metrics", "--model-repository", str(repository), "--triton", url]) == 1
    said = f"charonia: --triton {url}: a URL that begins with http:// is needed\n"
    assert capsys.readouterr().err == said
    for url, reason in (
        ("http://a:b/metrics", "Invalid port: 'b'"),
        ("http:///metrics", "a URL with a host is needed"),
    ):
        assert main(["metrics", "--model-repository", str(repository), "--triton", url]) == 1
        assert capsys.readouterr().err == f"charonia: --triton {url}: {reason}\n"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["metrics", "--model-repository", str(repository), "--port", str(port)]) == 1
    reason = "cannot be used: Address already in use"
    assert capsys.readouterr().err == f"charonia: metrics port {port} on 127.0.0.1 {reason}\n"


@pytest.mark.parametrize(
    "arguments", [("serve", "--http-port", "99999"), ("serve", "--dtype", "int3"), (), ("fly",)]
)
def test_wrong_arguments_exit_with_2(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2
    assert "usage: charonia" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["http://127.0.0.1:8000", "127.0.0.1:abc", "[]:1", "::1", "a b:1"])
@pytest.mark.parametrize(
    "arguments",
    [
        ("health", "--url"),
        ("health", "--metrics-url"),
        ("top", "--once", "--url"),
        ("reload", "--url"),
        ("drain", "--url"),
        ("log-level", "--url"),
        ("gateway", "--tokenizer", "/no/such", "--server"),
        ("gateway", "--tokenizer", "/no/such", "--server", "127.0.0.1:1", "--fallback-server"),
    ],
)
def test_what_is_no_address_is_refused_with_what_would_be_one(
    arguments: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main([*arguments, text])
    assert exit_info.value.code == 2
    option = arguments[-1]
    assert f"error: argument {option}: {text!r} is not HOST:PORT\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["127.0.0.1:1", "localhost:1", "localhost", "[::1]:1", "a-b_c.d:1"]
)
def test_addresses_are_names_or_numbers_with_or_without_a_port(text: str) -> None:
    assert values.address(text) == text


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "soon"])
def test_nobody_waits_for_a_time_that_never_ends(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["health", "--url", "127.0.0.1:1", f"--wait={text}"])
    assert f"{text!r} is not a number of seconds from 0 on" in capsys.readouterr().err


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["--version"])
    assert exit_info.value.code == 0
    assert capsys.readouterr().out == f"charonia {__version__}\n"


@pytest.mark.parametrize("as_json", [False, True])
def test_what_the_terminals_encoding_lacks_is_escaped(
    monkeypatch: pytest.MonkeyPatch, *, as_json: bool
) -> None:
    class Server:
        """Answers with what ASCII lacks."""

        def __init__(self, *args: object, **kwargs: object) -> None:
            pass

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *args: object) -> None:
            pass

        @contextlib.contextmanager
        def stream(self, *args: object) -> Iterator[list[Chunk]]:
            yield [Chunk(text="Grüße 🐚", is_final=True)]

    monkeypatch.setattr(generate, "Client", Server)
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", stdout)
    assert main(["generate", "x", *(["--json"] if as_json else [])]) == 0
    said = stdout.buffer.getvalue().decode("ascii")
    if as_json:
        assert json.loads(said)["text"] == "Grüße 🐚"
    else:
        assert said == "Gr\\xfc\\xdfe \\U0001f41a\n"
