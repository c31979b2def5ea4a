"""`charonia top` in front of a real server."""

import contextlib
import http.server
import io
import json
import os
import pty
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from rich.console import Console

from charonia.launch.commands.cli import main
from charonia.launch.commands.top import screen
from charonia.launch.server.processes import ReservedPorts
from charonia.launch.server.run import running_server
from charonia.launch.server.tritonserver import TritonServer
from charonia.metrics.snapshot import Snapshot, Span
from support.e2e import (
    ENDLESS_BLOCKS,
    ONE_THREAD,
    endless_request,
    infer_grpc,
    one_torch_thread,
    request_inputs,
    wait_for,
    wait_idle,
)
from support.serving import CHARONIA
from support.waiting import WAIT_S

SCREEN_IS_BACK = b"\x1b[?25h\x1b[?1049l"
"""What gives a terminal its cursor and its former screen again."""


def url_of(server: TritonServer) -> str:
    return server.metrics_url.removeprefix("http://").removesuffix("/metrics")


@pytest.fixture(scope="module")
def busy_server(
    endless_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    """It runs two requests at a time, drafts, and names two tenants."""
    tenants_file = tmp_path_factory.mktemp("tenants") / "tenants.json"
    tenants_file.write_text(json.dumps({"tenants": {"night": {}, "day": {}}}), encoding="utf-8")
    settings = (
        ONE_THREAD,
        ENDLESS_BLOCKS,
        "max_num_seqs=2",
        'speculative_config={"method": "ngram", "num_speculative_tokens": 3, "adaptive": false}',
        f"scheduler.tenants_file={tenants_file}",
    )
    with one_torch_thread(), running_server(model=endless_checkpoint, settings=settings) as server:
        yield server


@contextlib.contextmanager
def short_requests(server: TritonServer, tenant: str, num_clients: int) -> Iterator[None]:
    """Clients that ask the same again and again for as long as this lasts."""
    is_over = threading.Event()
    sampling = {"max_tokens": 16, "ignore_eos": True, "temperature": 0, "tenant": tenant}

    def ask() -> None:
        while not is_over.is_set():
            infer_grpc(server, request_inputs([5, 6, 7] * 16, sampling))

    with ThreadPoolExecutor(num_clients) as pool:
        calls = [pool.submit(ask) for _ in range(num_clients)]
        try:
            yield
        finally:
            is_over.set()
    for call in calls:
        call.result()


def test_one_screen_says_what_runs(
    busy_server: TritonServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One long request, and more short ones of a tenant than have room beside it."""
    monkeypatch.setenv("COLUMNS", "120")
    rates = r" +[\d,.]+" * 3
    patterns = (
        r"charonia top +\S+ +serving",
        r"[1-9][\d,.]* tokens/s",
        r"running +2 of 2",
        r"waiting +[1-9]",
        r"slowest requests +[\d,.]+, .*\d s so far",
        r"finished +[\d,.]+/s",
        r"between tokens +[\d.]+ m?s +[\d.]+ m?s",
        r"blocks +[1-9][\d,]* used",
        r"prefix hits +[1-9]\d* %",
        r"drafts accepted +\d+ %",
        r"failures +none",
        rf"(?m)^night +[01] +[1-4]{rates}",
        rf"(?m)^other +1 +0{rates}",
        rf"(?m)^day +0 +0{rates}",
    )

    def look() -> str:
        assert main(["top", "--once", "--interval", "0.5", "--url", url_of(busy_server)]) == 0
        return capsys.readouterr().out

    def missing(shown: str) -> list[str]:
        return [pattern for pattern in patterns if not re.search(pattern, shown)]

    with endless_request(busy_server), short_requests(busy_server, "night", 4):
        shown = wait_for(look, lambda shown: not missing(shown))  # a busy machine may be silent
    assert missing(shown) == [], shown
    wait_idle(busy_server)
    assert re.search(r"slowest requests +none", look())


def test_the_slowest_requests_are_those_of_all_models() -> None:
    ages = {"a": (3700.0, 12.34, 0.04, 0.0, 0.0), "b": (99.0, 2.0, 1.5, 1.0, 0.0)}
    page = "".join(
        f'charonia_oldest_request_seconds{{model="{model}",place="{place}"}} {age}\n'
        for model, own in ages.items()
        for place, age in enumerate(own, 1)
    )
    assert line_of(page, "slowest requests").endswith(" 3,700, 99, 12, 2, 1.5 s so far")
    assert line_of("", "slowest requests").endswith(" -")


def line_of(page: str, title: str) -> str:
    """The line of a screen that has this title, without what stands beside it."""
    console = Console(file=io.StringIO(), width=120)
    with console.capture() as capture:
        console.print(screen("here:1", Span(Snapshot.of("", 0.0), Snapshot.of(page, 1.0)), []))
    (line,) = (line for line in capture.get().splitlines() if line.startswith(title))
    return re.sub(r"   +(first token|between tokens).*", "", line).rstrip()


def test_what_tenants_get_in_time_is_of_the_time_between_two_pages() -> None:
    """Of 100 deadlines 90 were met before; of four since then, one."""

    def page(met: int, missed: int) -> str:
        return "".join(
            f'charonia_{name}{{model="m",tenant="{tenant}"}} {value}\n'
            for tenant in ("eager", "other")
            for name, value in (
                ("tenant_requests_running", 1),
                ("deadline_met_total", met),
                ("deadline_missed_total", missed),
            )
        )

    def shown(before: str, after: str) -> str:
        console = Console(file=io.StringIO(), width=120)
        span = Span(Snapshot.of(before, 0.0), Snapshot.of(after, 10.0))
        with console.capture() as capture:
            console.print(screen("here:1", span, []))
        (line,) = (line for line in capture.get().splitlines() if line.startswith("eager"))
        return line.rstrip()

    assert shown(page(90, 10), page(91, 13)).endswith(" 25 %")
    assert shown(page(90, 10), page(90, 10)).endswith(" -")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_it_goes_on_until_it_is_ended(server: TritonServer, signum: signal.Signals) -> None:
    infer_grpc(server, request_inputs("abc", {"max_tokens": 2}))
    ours, theirs = pty.openpty()
    command = [*CHARONIA, "top", "--interval", "0.1", "--url", url_of(server)]
    environment = os.environ | {"TERM": "xterm"}
    with (
        os.fdopen(ours, "rb", buffering=0) as screen,
        subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
        ) as process,
    ):
        os.close(theirs)
        seen = b""
        for part in parts_of(screen):
            seen += part
            if seen.count(b"charonia top") > 2:
                break
        process.send_signal(signum)
        for part in parts_of(screen):
            seen += part
        assert process.wait(WAIT_S) == 130
    assert b"Traceback" not in seen
    assert seen.endswith(SCREEN_IS_BACK)
    assert seen.count(b"serving") > 2


def parts_of(screen: "io.FileIO") -> Iterator[bytes]:
    """What comes, until the other end is closed."""
    try:
        while part := screen.read(65536):
            yield part
    except OSError:  # so Linux says that
        return


def test_a_page_that_is_not_charonias_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    class Page(http.server.BaseHTTPRequestHandler):
        content = b""

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(self.content)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Page) as page:
        thread = threading.Thread(target=page.serve_forever)
        thread.start()
        url = f"127.0.0.1:{page.server_port}"
        for content, says in (
            (b"up 1\n", "has no metrics of charonia"),
            (b"<html>", "the page is not in Prometheus' text format"),
        ):
            Page.content = content
            assert main(["top", "--once", "--url", url]) == 1
            assert says in capsys.readouterr().err
        page.shutdown()
        thread.join()
    ports = ReservedPorts("127.0.0.1", 1)
    assert main(["top", "--once", "--url", f"127.0.0.1:{ports.ports[0]}"]) == 1
    ports.close()
    assert "cannot be read: [Errno 111] Connection refused" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["FORCE_COLOR", "TTY_COMPATIBLE", "TERM"])
def test_where_nothing_can_be_drawn_it_says_what_to_do(
    server: TritonServer,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """Also where the environment makes rich write as if to a terminal."""
    monkeypatch.setenv(name, "xterm" if name == "TERM" else "1")
    assert main(["top", "--url", url_of(server)]) == 1
    assert "cannot be watched here" in capsys.readouterr().err
