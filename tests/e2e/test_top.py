"""`charonia top` in front of a real server."""

import http.server
import io
import os
import pty
import re
import signal
import subprocess
import threading
from collections.abc import Iterator

import pytest
from rich.console import Console

from charonia.launch.commands.cli import main
from charonia.launch.commands.top import screen
from charonia.launch.server.processes import ReservedPorts
from charonia.launch.server.tritonserver import TritonServer
from charonia.metrics.snapshot import Snapshot, Span
from support.e2e import (
    endless_request,
    infer_grpc,
    request_inputs,
    wait_for,
    wait_idle,
    wait_running,
)
from support.serving import CHARONIA
from support.waiting import WAIT_S


def url_of(server: TritonServer) -> str:
    return server.metrics_url.removeprefix("http://").removesuffix("/metrics")


def test_one_screen_says_what_runs(
    server: TritonServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    patterns = (
        r"charonia top +\S+ +serving",
        r"[1-9][\d,.]* tokens/s",
        r"running +1 of \d+",
        r"between tokens +[\d.]+ m?s +[\d.]+ m?s",
        r"blocks +[1-9][\d,]* used",
        r"failures +(none|\w+ \d)",  # other tests share the server
    )

    def look() -> str:
        assert main(["top", "--once", "--interval", "0.5", "--url", url_of(server)]) == 0
        return capsys.readouterr().out

    def missing(shown: str) -> list[str]:
        return [pattern for pattern in patterns if not re.search(pattern, shown)]

    with endless_request(server):
        wait_running(server, 1)
        shown = wait_for(look, lambda shown: not missing(shown))  # a busy machine may be silent
    assert missing(shown) == []
    wait_idle(server)


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


def test_it_goes_on_until_it_is_ended(server: TritonServer) -> None:
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
        process.send_signal(signal.SIGINT)
        for part in parts_of(screen):
            seen += part
        assert process.wait(WAIT_S) == 130
    assert b"Traceback" not in seen
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
