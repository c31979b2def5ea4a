"""`charonia serve --gateway`, and what `charonia gateway` says of a start that cannot work."""

import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from openai import OpenAI

from charonia.launch.commands.cli import main
from charonia.launch.server.gateway_process import GatewayProcess
from support.behind_proxy import BEHIND_PROXY
from support.e2e import wait_for
from support.long import long
from support.serving import Serving
from support.waiting import WAIT_S

KEY = "sk-of-the-test"
JSON = ("--log-format", "json")
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACED = {"traceparent": f"00-{TRACE_ID}-00f067aa0ba902b7-01"}


@pytest.fixture
def serving(model: Path, tmp_path: Path) -> Iterator[Serving]:
    template = tmp_path / "mine.jinja"
    template.write_text("{{ messages[0].content }}")
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY}\n")
    gateway = ("--gateway", "--gateway-port", "0", "--chat-template", template)
    arguments = ("--model", model, *gateway, "--api-key-file", keys, *JSON)
    serving = Serving(*arguments, variables=BEHIND_PROXY)
    with serving.process:
        yield serving
        serving.process.kill()


def gateways(serving: Serving) -> list[psutil.Process]:
    """Its gateways' processes."""
    children = psutil.Process(serving.process.pid).children()
    return [child for child in children if "gateway" in child.cmdline()]


def is_ready(url: str) -> bool:
    try:
        return httpx.get(url.replace("/v1", "/health/ready")).status_code == 200
    except httpx.TransportError:
        return False


def test_the_gateway_beside_a_server_comes_back_when_it_is_killed_and_ends_with_it(
    serving: Serving, model: Path
) -> None:
    announced = serving.wait_announced()
    (url,) = re.findall(r"OpenAI +(\S+)", announced)
    assert wait_for(lambda: is_ready(url), bool)
    (page,) = re.findall(r"page +(\S+)", announced)
    assert "<title>charonia</title>" in httpx.get(page).text
    assert f'curl -N {url}/completions -H "authorization: Bearer $API_KEY" ' in announced
    (first,) = gateways(serving)
    first.kill()
    assert wait_for(lambda: is_ready(url), bool)
    (second,) = gateways(serving)
    assert second.pid != first.pid
    client = OpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=WAIT_S)
    with client:
        assert main(["log-level", "debug", "--runtime-dir", str(serving.runtime_dir)]) == 0
        chat = client.chat.completions.create(
            model=model.name,
            messages=[{"role": "user", "content": "x"}],
            max_tokens=1,
            extra_headers={"x-request-id": "traced", **TRACED},
        )
        assert main(["log-level", "info", "--runtime-dir", str(serving.runtime_dir)]) == 0
        assert chat.usage is not None
        assert chat.usage.prompt_tokens == 1
        stream = client.completions.create(
            model=model.name,
            prompt="x",
            max_tokens=1000,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(stream)
        serving.process.send_signal(signal.SIGTERM)
        assert list(stream)[-1].choices[0].finish_reason == "length"
    _, stderr = serving.process.communicate(timeout=WAIT_S)
    assert serving.process.returncode == 0, stderr
    logged = [json.loads(line) for line in stderr.splitlines()]
    assert all({"time", "level", "source"} <= line.keys() for line in logged)
    assert "gateway_restarting" in stderr
    assert "gateway_draining" in stderr
    assert "Traceback" not in stderr
    check_lines_of_requests(logged)
    assert not second.is_running()


def check_lines_of_requests(logged: list[dict[str, Any]]) -> None:
    """One request came at the level "debug", and another one at "info"."""
    traced = [line for line in logged if line.get("trace_id") == TRACE_ID]
    of = {
        source: [(one["event"], one["level"]) for one in traced if one["source"] == source]
        for source in ("charonia", "scheduler")
    }
    assert of["charonia"] == [("request_received", "debug"), ("request", "info")]
    names = ("request_received", "request_started", "request_first_token", "request_ended")
    assert of["scheduler"] == [(name, "debug") for name in names]
    assert {line["request_id"] for line in traced} == {"traced", "traced-0"}
    events = [(one["source"], one["event"]) for one in logged if "event" in one]
    assert events.count(("scheduler", "request_ended")) == 1
    paths = [one["path"] for one in logged if one.get("event") == "request"]
    assert [path for path in paths if path.startswith("/v1")] == [
        "/v1/chat/completions",
        "/v1/completions",
    ]
    (restarting,) = (line for line in logged if line.get("event") == "gateway_restarting")
    assert restarting["level"] == "error"


@long
def test_sigint_ends_both_at_once(serving: Serving) -> None:
    (url,) = re.findall(r"OpenAI +(\S+)", serving.wait_announced())
    assert wait_for(lambda: is_ready(url), bool)
    (process,) = gateways(serving)
    _, stderr = serving.end(signal.SIGINT)
    assert serving.process.returncode == 0, stderr
    assert not process.is_running()
    assert "Traceback" not in stderr


@long
def test_a_gateway_dies_with_a_launcher_that_is_killed(serving: Serving) -> None:
    (url,) = re.findall(r"OpenAI +(\S+)", serving.wait_announced())
    assert wait_for(lambda: is_ready(url), bool)
    (process,) = gateways(serving)
    serving.process.kill()
    process.wait(WAIT_S)


def test_a_gateway_that_is_ended_while_it_starts_leaves_no_traceback(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import time\nprint('starting', flush=True)\ntime.sleep(60)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    log: list[str] = []
    with GatewayProcess(
        "127.0.0.1:1", model, ["m"], address="127.0.0.1", port=0, drain_s=1.0, log=log.append
    ):
        wait_for(lambda: log, bool)
    assert log == ["starting"]


def test_what_cannot_work_is_one_line(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        base = ["gateway", "--server", "127.0.0.1:1", "--tokenizer"]
        cases = [
            ([*base, str(tmp_path)], f"{tmp_path}: the checkpoint has no tokenizer.json"),
            (
                [*base, str(model), "--fallback-server", "127.0.0.1:2", "--fallback-tokenizer=no"],
                "no: the checkpoint has no tokenizer.json",
            ),
            ([*base, str(model), "--port", port], f"127.0.0.1:{port} cannot be listened on"),
            ([*base, str(model), "--host", "192.0.2.1"], "192.0.2.1:8080 cannot be listened on"),
            ([*base, str(model), "--host", "no such"], "no such:8080 is no address"),
            (["serve", "--gateway-port", "1"], "--gateway-port is about the --gateway"),
            (
                ["serve", "--gateway", "--no-gateway", "--gateway-port", "1"],
                "--gateway-port is about the --gateway",
            ),
            (["serve", "--api-key-file", "x"], "--api-key-file is about the --gateway"),
            (
                ["serve", "--model", str(model), "--gateway", "--api-key-file", "no"],
                "API keys cannot be read from no: No such file or directory",
            ),
            (
                [*base, str(model), "--fallback-server", "127.0.0.1:2"],
                "a fallback model needs --fallback-tokenizer",
            ),
            (
                [*base, str(model), "--fallback-tokenizer", str(model)],
                "a fallback model needs --fallback-server",
            ),
            (["serve", "--chat-template", "x"], "--chat-template is about the --gateway"),
            (
                ["serve", "--model", str(model), "--gateway", "--gateway-port", port],
                f"gateway port {port} on 127.0.0.1 cannot be used: Address already in use; name "
                "another one with --gateway-port, or serve with --no-gateway",
            ),
            (
                ["serve", "--model", str(model), "--gateway", "--chat-template", "no"],
                "no chat template no",
            ),
        ]
        for arguments, says in cases:
            assert main(arguments) == 1
            last = capsys.readouterr().err.splitlines()[-1]
            assert last.startswith(f"charonia: {says}"), last


def test_a_gateway_without_servers_is_a_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["gateway", "--tokenizer", "x"])
    assert "--server" in capsys.readouterr().err
