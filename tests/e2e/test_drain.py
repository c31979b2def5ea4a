"""A server that is drained finishes what it has, takes nothing more, and ends."""

import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from charonia_client import Client, RetryPolicy
from charonia_client.errors import Unavailable
from support.e2e import ENDLESS, ENDLESS_BLOCKS, ONE_THREAD, wait_for
from support.faults import make_faulty_repository
from support.leftovers import leftovers
from support.live_stream import LiveStream
from support.serving import CHARONIA, Serving

PROMPT = [5, 6, 7]
NUM_TOKENS = 300
STEP_S = 0.02
"""Of each step at least, so that what is finished takes some seconds."""


class Drained(Serving):
    """A `charonia serve` whose steps take their time, and its address."""

    def __init__(self, checkpoint: Path, repository: Path, *options: object) -> None:
        settings = [part for one in (ONE_THREAD, ENDLESS_BLOCKS) for part in ("--set", one)]
        where = ("--model", checkpoint, "--model-repository", repository)
        super().__init__(*where, *settings, *options)
        (self.url,) = re.findall(r"gRPC +(\S+)", self.wait_announced())

    def stream(self, max_tokens: int, model: str = "scheduler") -> LiveStream:
        stream = LiveStream(
            self.url, PROMPT, model=model, max_tokens=max_tokens, temperature=0.0, ignore_eos=True
        )
        stream.wait_tokens(1)
        return stream

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
        server.process.kill()
        server.process.communicate()


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


def test_a_second_signal_ends_it_at_once(make_server: Callable[..., Drained]) -> None:
    server = make_server("--drain-timeout", 100_000)
    endless = server.stream(ENDLESS)
    server.process.send_signal(signal.SIGTERM)
    assert wait_for(server.refuses, bool)
    server.end(signal.SIGTERM)
    assert server.process.returncode == 0
    assert endless.wait_over().error


def test_the_command_shows_how_far_it_is_and_returns_when_the_server_has_ended(
    make_server: Callable[..., Drained],
) -> None:
    server = make_server("--drain-timeout", 1000)
    holder = server.stream(ENDLESS)
    command = [*CHARONIA, "drain", "--url", server.url]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as drain:
        assert drain.stderr is not None
        assert drain.stderr.readline() == "charonia: draining: 1 request is left\n"
        holder.leave()
        stdout, _ = drain.communicate()
    assert (stdout, drain.returncode) == ("drained; the server has ended\n", 0)
    server.process.communicate()
    assert server.process.returncode == 0
