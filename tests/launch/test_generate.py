"""`charonia generate` and `charonia demo` against the real server with a real, random model."""

import functools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from charonia.launch.commands import demo
from charonia.launch.commands.cli import EXIT_BROKEN_PIPE, main
from charonia.launch.server.processes import find_by_argument
from charonia.launch.server.run import running_server
from charonia.launch.server.runtime_dir import sweep_stale_runs
from charonia.launch.server.tritonserver import TritonServer
from support.e2e import wait_for

SETTINGS = ("num_gpu_blocks_override=64",)
GREEDY = ("hello", "--max-tokens", "8", "--temperature", "0")


@pytest.fixture(scope="module")
def server(checkpoint: Callable[..., Path]) -> Iterator[TritonServer]:
    with running_server(model=checkpoint(), settings=SETTINGS) as server:
        yield server


def generate(server: TritonServer, protocol: str, *arguments: str) -> int:
    url = server.grpc_url if protocol == "grpc" else server.http_url
    return main(["generate", "--protocol", protocol, "--url", url, *arguments])


@pytest.mark.parametrize("model_name", ["scheduler", "llm"])
@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_text_and_json_tell_the_same_over_every_way_in(
    server: TritonServer, capsys: pytest.CaptureFixture[str], protocol: str, model_name: str
) -> None:
    assert generate(server, protocol, *GREEDY, "--model-name", model_name) == 0
    text = capsys.readouterr().out
    assert generate(server, protocol, *GREEDY, "--model-name", model_name, "--json") == 0
    chunks = [json.loads(line) for line in capsys.readouterr().out.split("\n")[:-1]]
    assert "".join(chunk["text"] for chunk in chunks) + "\n" == text
    assert sum(len(chunk["token_ids"]) for chunk in chunks) == 8
    assert chunks[-1]["finish_reason"] == "length"


def test_sampling_options_reach_the_server(
    server: TritonServer, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ("hello", "--max-tokens", "16", "--temperature", "1.5")
    texts = []
    for seed in ("1", "1", "2"):
        assert generate(server, "grpc", *base, "--seed", seed) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    stop = texts[0][3:5]
    assert generate(server, "grpc", *base, "--seed", "1", "--stop", "never", "--stop", stop) == 0
    assert capsys.readouterr().out == texts[0][: texts[0].index(stop)] + "\n"


def test_the_tenant_reaches_the_server_and_no_other_hits_its_cache(
    server: TritonServer, capsys: pytest.CaptureFixture[str]
) -> None:
    salad = (" salad" * 40, "--max-tokens", "1", "--json")

    def num_cached(tenant: str) -> int:
        assert generate(server, "grpc", *salad, "--tenant", tenant) == 0
        last = json.loads(capsys.readouterr().out.split("\n")[-2])
        return int(last["timing"]["cached_tokens"])

    assert num_cached("a") == 0
    assert num_cached("a") > 0
    assert num_cached("b") == 0


def test_the_time_limit_reaches_the_server(
    server: TritonServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """No engine generates so many tokens in a millisecond."""
    long = ("hello", "--max-tokens", "300", "--temperature", "0")
    assert generate(server, "grpc", *long, "--deadline-ms", "60000") == 0
    capsys.readouterr()
    assert generate(server, "grpc", *long, "--deadline-ms", "1") == 1
    assert "deadline_ms has passed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("hello", "--max-tokens", "0"), "max_tokens must be at least 1, but is 0"),
        (("hello", "--model-name", "no_such"), "unknown model: 'no_such'"),
        (
            ("hello", "--priority", "-1"),
            "priority = -1 has no effect with scheduling_policy 'fcfs'",
        ),
        (("hello", "--deadline-ms", "0"), "deadline_ms must be from 1 to 2147483647, but is 0"),
        (("hello", "--tenant", "x" * 257), "tenant must have at most 256 characters, but has 257"),
    ],
)
def test_a_refused_request_is_one_line(
    server: TritonServer,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    assert generate(server, "grpc", *arguments) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("protocol", "url"),
    [
        ("grpc", "127.0.0.1:abc"),
        ("grpc", "[::1"),
        ("http", "127.0.0.1:abc"),
        ("http", "127.0.0.1:99999"),
        ("http", "[]:1"),
    ],
)
def test_an_address_that_is_none_is_one_line(
    protocol: str, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "hello", "--protocol", protocol, "--url", url]) == 1
    error = capsys.readouterr().err
    assert url in error
    assert error.count("\n") == 1


def test_a_reader_that_leaves_early_ends_it_without_a_traceback(server: TritonServer) -> None:
    charonia = (sys.executable, "-m", "charonia.launch.commands.cli")
    # The reader is gone before the first chunk: tokens that wait are merged, so that how many
    # chunks follow, and whether a pipe would hold them all, depends on speed.
    with subprocess.Popen(
        [*charonia, "generate", "--url", server.grpc_url, *GREEDY],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        _, error = process.communicate(timeout=120)
    assert (process.returncode, error) == (EXIT_BROKEN_PIPE, b"")


KILLED = """
import sys, time
from pathlib import Path
from charonia.launch.server.run import running_server
with running_server(model=Path(sys.argv[1]), settings=("num_gpu_blocks_override=64",)) as server:
    print(server.runtime_dir, flush=True)
    time.sleep(600)
"""


def test_no_model_outlives_a_launcher_that_is_killed(checkpoint: Callable[..., Path]) -> None:
    command = [sys.executable, "-c", KILLED, str(checkpoint())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        path = Path(launcher.stdout.readline().strip())
        launcher.kill()
    of_run = f"{path}/repository/"
    assert not wait_for(
        lambda: find_by_argument(psutil.process_iter(), of_run),
        lambda found: not found,
        timeout=30,
    )
    assert path in sweep_stale_runs()


def test_the_demo_streams_its_prompts_and_stops(
    checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("DEMO_CHECKPOINT", "DEMO_DRAFT_CHECKPOINT"):
        monkeypatch.setattr(demo, name, checkpoint())
    # Whether drafts pay for so small a model depends on the machine, so it is not asked.
    drafts = json.dumps({"model": str(checkpoint()), "adaptive": False})
    serve = functools.partial(running_server, settings=(f"speculative_config={drafts}",))
    monkeypatch.setattr(demo, "running_server", serve)
    assert main(["demo"]) == 0
    shown = capsys.readouterr()
    assert [shown.out.count(prompt.text) for prompt in demo.DEMO_PROMPTS] == [1, 1, 1]
    assert shown.out.count("tokens/s, first token after") == 3
    assert shown.out.count("drafted tokens accepted (") == 3
    assert "loaded engine" in shown.err


def test_a_text_comes_in_pieces(server: TritonServer, capsys: pytest.CaptureFixture[str]) -> None:
    """On a machine that is busy a few tokens may come as one piece, but not hundreds."""
    arguments = ["hello", "--max-tokens", "300", "--temperature", "0", "--json"]
    assert generate(server, "grpc", *arguments) == 0
    assert len(capsys.readouterr().out.split("\n")[:-1]) > 1
