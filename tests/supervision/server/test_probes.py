"""The probe of the scheduler, over HTTP: what becomes of it when something goes wrong with it."""

import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from charonia.supervision.server.background import in_background
from charonia.supervision.server.probes import Health, Probe
from support.sockets import refuse_threads
from support.supervised import ALLOWED_S
from support.waiting import eventually


class KeepsConnections(BaseHTTPRequestHandler):
    """Refuses everything, and leaves the connection open for more."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(400)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


def test_a_probe_that_cannot_be_judged_is_an_error_and_waits_for_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise RecursionError("the answer is nested too deeply")

    monkeypatch.setattr(Probe, "_ask", fail)
    answer = in_background(lambda: Probe("127.0.0.1:1", "scheduler").check(1.0))
    with pytest.raises(RecursionError):
        answer.result(timeout=ALLOWED_S)


def test_a_call_that_no_thread_can_be_started_for_begins_once_one_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        refuse_threads(patch, "charonia-background")
        answer = in_background(lambda: "an answer")
        assert not answer.done()
    eventually(answer.done)
    assert answer.result() == "an answer"


def test_a_probe_waits_until_a_thread_can_be_started_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refuse_threads(monkeypatch, "charonia-background")
    probe = Probe("127.0.0.1:1", "scheduler")
    assert probe.check(1.0, meanwhile=monkeypatch.undo).health is Health.SILENT
    probe.close()


def test_a_probe_that_is_closed_while_it_connects_leaves_no_connection_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connect = socket.create_connection
    made: list[socket.socket] = []

    def close_and_connect(*args: object, **options: object) -> socket.socket:
        probe.close()
        made.append(connect(*args, **options))
        return made[-1]

    with ThreadingHTTPServer(("127.0.0.1", 0), KeepsConnections) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        probe = Probe(f"127.0.0.1:{server.server_port}", "scheduler")
        monkeypatch.setattr(socket, "create_connection", close_and_connect)
        probe.check(ALLOWED_S)
        server.shutdown()
        thread.join()
    assert [connection.fileno() for connection in made] == [-1]
