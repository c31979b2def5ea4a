"""A server that is drained finishes what it has, takes nothing more, and ends."""

import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from charonia.launch.server.runtime_dir import REPOSITORY
from charonia_client import Client, RetryPolicy
from charonia_client.errors import Unavailable
from support.e2e import ENDLESS, ENDLESS_BLOCKS, ONE_THREAD, wait_for
from support.faults import make_faulty_repository, paced
from support.leftovers import leftovers
from support.live_stream import LiveStream
from support.long import long
from support.serving import CHARONIA, Serving

PROMPT = [5, 6, 7]
NUM_TOKENS = 300
STEP_S = 0.02
"""Of each step at least, so that what is finished takes some seconds."""

NUM_STREAMS = 32
BURST_TOKENS = 50
JOIN_S = 2.0
"""Of a step while so many streams come, so that all of them join the next one."""


class Drained(Serving):
    """A `charonia serve` whose steps take their time, and its address."""

    def __init__(self, checkpoint: Path, repository: Path, *options: object) -> None:
        settings = [part for one in (ONE_THREAD, ENDLESS_BLOCKS) for part in ("--set", one)]
        where = ("--model", checkpoint, "--model-repository", repository)
        super().__init__(*where, *settings, *options)
        self.commands: list[subprocess.Popen[str]] = []
        (self.url,) = re.findall(r"gRPC +(\S+)", self.wait_announced())

    def start(self, max_tokens: int, model: str) -> LiveStream:
        return LiveStream(
            self.url, PROMPT, model=model, max_tokens=max_tokens, temperature=0.0, ignore_eos=True
        )

    def stream(self, max_tokens: int, model: str = "scheduler") -> LiveStream:
        stream = self.start(max_tokens, model)
        stream.wait_tokens(1)
        return stream

    def drain(self) -> subprocess.Popen[str]:
        """A `charonia drain` of this server."""
        command = [*CHARONIA, "drain", "--url", self.url]
        self.commands.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
        return self.commands[-1]

    def refuses(self) -> bool:
        with Client(self.url, retry=RetryPolicy(max_attempts=1)) as client:
            try:
                client.generate("a", max_tokens=1)
            except Unavailable as error:
                return error.kind == "shutting_down"
        return False


@pytest.fixture(scope="module")
def slow_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_faulty_repository(tmp_path_factory.mktemp("slow") / "repository", step_s=STEP_S)


@pytest.fixture
def make_server(
    endless_checkpoint: Path, slow_repository: Path
) -> Iterator[Callable[..., Drained]]:
    made: list[Drained] = []

    def make(*options: object) -> Drained:
        made.append(Drained(endless_checkpoint, slow_repository, *options))
        return made[-1]

    yield make
    for server in made:
        for process in (server.process, *server.commands):
            is_running = process.poll() is None
            process.kill()
            output = process.communicate()  # which also closes the pipes
            if is_running:
                print(*output, sep="\n")


def test_what_runs_is_finished_and_what_comes_is_refused(
    make_server: Callable[..., Drained],
) -> None:
    server = make_server("--drain-timeout", 1000)
    runtime_dir = server.runtime_dir
    holder = server.stream(ENDLESS)  # so that it drains until this leaves
    streams = [server.stream(NUM_TOKENS, model) for model in ("scheduler", "llm")]
    server.process.send_signal(signal.SIGTERM)
    assert wait_for(server.refuses, bool)
    for stream in streams:
        assert stream.wait_over().error is None
        assert len(stream.token_ids) == NUM_TOKENS
    assert not holder.is_over
    holder.leave()
    _, stderr = server.process.communicate()
    assert server.process.returncode == 0
    assert re.search("charonia: draining: [123] requests? (is|are) left", stderr)
    assert stderr.splitlines()[-1] == "charonia: stopped"
    assert leftovers(runtime_dir) == []


def test_what_is_not_finished_in_time_ends_with_an_error(
    make_server: Callable[..., Drained],
) -> None:
    server = make_server("--drain-timeout", 0.5)
    endless = server.stream(ENDLESS)
    _, stderr = server.end(signal.SIGTERM)
    assert server.process.returncode == 0
    assert "charonia: 1 are not finished, and end now" in stderr
    assert "[charonia:shutting_down]" in (endless.wait_over().error or "")


@long
def test_streams_that_end_together_at_the_very_end_get_all_their_tokens(
    make_server: Callable[..., Drained],
) -> None:
    """When no request is left, their last chunks may still be on their way through `llm`."""
    server = make_server("--drain-timeout", 1000)
    repository = server.runtime_dir / REPOSITORY
    with paced(repository, JOIN_S):  # all but the first one wait for its first step to end
        streams = [server.start(BURST_TOKENS + (index == 0), "llm") for index in range(NUM_STREAMS)]
        for stream in streams:
            stream.wait_tokens(1)
    _, stderr = server.end(signal.SIGTERM)
    assert server.process.returncode == 0, stderr
    ends = [(one.wait_over().error, one.finish_reason, len(one.token_ids)) for one in streams]
    whole = [(None, "length", BURST_TOKENS + (index == 0)) for index in range(NUM_STREAMS)]
    assert ends == whole, stderr


@long
def test_sigint_ends_a_drain_at_once(make_server: Callable[..., Drained]) -> None:
    server = make_server("--drain-timeout", 100_000)
    endless = server.stream(ENDLESS)
    server.process.send_signal(signal.SIGTERM)
    assert wait_for(server.refuses, bool)
    _, stderr = server.end(signal.SIGINT)
    assert server.process.returncode == 0
    assert "charonia: 1 are not finished, and end now" in stderr
    assert endless.wait_over().error


def test_the_command_shows_how_far_it_is_and_returns_when_the_server_has_ended(
    make_server: Callable[..., Drained],
) -> None:
    server = make_server("--drain-timeout", 1000)
    holder = server.stream(ENDLESS)
    with server.drain() as command:
        assert command.stderr is not None
        assert command.stderr.readline() == "charonia: draining: 1 request is left\n"
        holder.leave()
        stdout, _ = command.communicate()
    assert (stdout, command.returncode) == ("drained; the server has ended\n", 0)
    server.process.communicate()
    assert server.process.returncode == 0


@long
def test_who_drains_a_second_time_waits_with_the_first(make_server: Callable[..., Drained]) -> None:
    """Commands and an orchestrator's SIGTERM, in any number, lose no request."""
    server = make_server("--drain-timeout", 1000)
    streams = [server.stream(ENDLESS) for _ in range(2)]
    first, second = server.drain(), server.drain()
    for command in (first, second):
        assert command.stderr is not None
        assert command.stderr.readline() == "charonia: draining: 2 requests are left\n"
        server.process.send_signal(signal.SIGTERM)
    for stream in streams:
        stream.wait_tokens(len(stream.token_ids) + 20)
        assert not stream.is_over
        stream.leave()
    for command in (first, second):
        stdout, stderr = command.communicate()
        assert (stdout, command.returncode) == ("drained; the server has ended\n", 0), stderr
        assert stderr.splitlines()[-1] == "charonia: draining: 0 requests are left"
    server.process.communicate()
    assert server.process.returncode == 0


@long
def test_the_command_fails_where_requests_were_not_finished(
    make_server: Callable[..., Drained],
) -> None:
    server = make_server("--drain-timeout", 0.5)
    endless = server.stream(ENDLESS)
    command = server.drain()
    stdout, stderr = command.communicate()
    assert (stdout, command.returncode) == ("", 1)
    end = "charonia: the server has ended; requests that were not finished: 1"
    assert stderr.splitlines()[-1] == end
    assert endless.wait_over().error
