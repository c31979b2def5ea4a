"""One engine on two hosts, and a network between them that fails."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from charonia import LLM, SamplingParams
from charonia.launch.server.run import running_server
from charonia.launch.server.tritonserver import TritonServer
from charonia.parallel.handshake import SECRET_VARIABLE
from support.e2e import scrape, wait_for, wait_idle
from support.live_stream import LiveStream
from support.long import long
from support.many_streams import finish
from support.two_hosts import NotPermittedError, TwoHosts

ANSWER_TIMEOUT_S = 30.0
SILENCE_S = 0.5
RENDEZVOUS_PORT = 29400
PATIENT = ("rendezvous_timeout_s=120", "rank_timeout_s=60")
IMPATIENT = ("rendezvous_timeout_s=30", "rank_timeout_s=10")
"""For tests in which the other host falls silent."""
SERVES_AGAIN_S = 120.0
NUM_TOKENS = 600
PROMPTS = [[7, 8, 9], [200], [*range(1, 100)]]


@contextlib.contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Two hosts, on which nothing is left running."""
    try:
        made = TwoHosts()
    except NotPermittedError as error:
        pytest.skip(f"network namespaces cannot be made here: {error}")
    with made as hosts:
        yield hosts
        assert hosts.a.pids() == hosts.b.pids() == []


# ---------------------------------------------------------------------- the hosts


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    """Two hosts."""
    with two_hosts() as hosts:
        yield hosts


@pytest.fixture
def connection(hosts: TwoHosts) -> Iterator[tuple[socket.socket, socket.socket]]:
    """The two ends of a TCP connection, on host a and on host b."""
    with hosts.b.entered():
        listener = socket.create_server((hosts.b.address, 0))
    with listener:
        with hosts.a.entered():
            near = socket.create_connection(listener.getsockname(), ANSWER_TIMEOUT_S)
        with near:
            far, address = listener.accept()
            with far:
                assert address[0] == hosts.a.address
                far.settimeout(ANSWER_TIMEOUT_S)
                yield near, far


def test_the_hosts_hear_each_other(connection: tuple[socket.socket, socket.socket]) -> None:
    near, far = connection
    for sender, receiver in ((near, far), (far, near)):
        sender.sendall(b"hello")
        assert receiver.recv(16) == b"hello"


def test_a_cut_cable_loses_everything_without_a_word_until_it_is_mended(
    hosts: TwoHosts, connection: tuple[socket.socket, socket.socket]
) -> None:
    near, far = connection
    for sender, receiver in ((near, far), (far, near)):
        hosts.cut()
        sender.sendall(b"lost")
        receiver.settimeout(SILENCE_S)
        with pytest.raises(TimeoutError):
            receiver.recv(16)
        hosts.restore()
        receiver.settimeout(ANSWER_TIMEOUT_S)
        assert receiver.recv(16) == b"lost", "TCP sends it again"


def test_nobody_else_is_reachable_and_this_process_is_on_neither_host(hosts: TwoHosts) -> None:
    for host in (hosts.a, hosts.b):
        with host.entered():
            assert {name for _, name in socket.if_nameindex()} == {"lo", "cable"}
    with pytest.raises(OSError, match="Cannot assign requested address"):
        socket.create_server((hosts.a.address, 0))


def test_a_process_that_is_started_on_a_host_stays_there(hosts: TwoHosts) -> None:
    serve = (
        "import socket, sys\n"
        "listener = socket.create_server((sys.argv[1], 0))\n"
        "print(listener.getsockname()[1], flush=True)\n"
        "listener.accept()[0].sendall(b'from b')"
    )
    with hosts.b.entered():
        server = subprocess.Popen(
            [sys.executable, "-c", serve, hosts.b.address], stdout=subprocess.PIPE, text=True
        )
    with server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        assert hosts.b.pids() == [server.pid]
        with hosts.a.entered():
            near = socket.create_connection((hosts.b.address, port), ANSWER_TIMEOUT_S)
        with near:
            assert near.recv(16) == b"from b"


@pytest.mark.usefixtures("hosts")  # which says where they cannot be made
def test_the_hosts_are_gone_when_they_are_closed() -> None:
    with TwoHosts() as others, others.a.entered():
        pass
    with pytest.raises(FileNotFoundError), others.a.entered():
        pass


# ---------------------------------------------------------------------- an engine on both


@dataclass
class Cluster:
    """A server on host a whose engine has a rank on host b, started there by torchrun."""

    hosts: TwoHosts
    server: TritonServer
    undisturbed: list[list[int]]

    def start_streams(self) -> list[LiveStream]:
        """One greedy stream per prompt, each with some tokens."""
        with self.hosts.a.entered():
            streams = [
                LiveStream(
                    self.server.http_url,
                    prompt,
                    protocol="http",
                    timeout=2 * SERVES_AGAIN_S,
                    max_tokens=NUM_TOKENS,
                    ignore_eos=True,
                    temperature=0.0,
                )
                for prompt in PROMPTS
            ]
        for stream in streams:
            stream.wait_tokens(3)
        assert not any(stream.is_over for stream in streams), "too short to be disturbed"
        return streams

    def check_complete(self, streams: Sequence[LiveStream]) -> None:
        """Assert that the streams end as they should."""
        assert finish(self.server.repository, streams) == self.undisturbed

    def check_survived(self, streams: Sequence[LiveStream]) -> None:
        """Assert that the streams outlive one engine, and nothing is left of them."""
        self.check_complete(streams)
        assert [stream.timing["restarts"] for stream in streams] == [1] * len(streams)
        with self.hosts.a.entered():
            wait_idle(self.server)

    def engine_pid(self) -> int | None:
        """Of the engine's process, or None while there is none."""
        return next(iter(self.server.pids("engine")), None)

    def wait_engine_gone(self, pid: int | None) -> None:
        """Wait until this engine has ended."""
        assert wait_for(self.engine_pid, lambda found: found != pid) != pid


@pytest.fixture(scope="module")
def undisturbed(small_checkpoint: Path) -> list[list[int]]:
    """The tokens of each prompt, of an engine that is not split."""
    with contextlib.closing(
        LLM(model=str(small_checkpoint), num_gpu_blocks_override=600, cpu_threads=1)
    ) as llm:
        sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        answers = llm.generate(PROMPTS, sampling, use_tqdm=False)
    return [list(answer.outputs[0].token_ids) for answer in answers]


StartCluster = Callable[[tuple[str, ...]], contextlib.AbstractContextManager[Cluster]]


@pytest.fixture(scope="module")
def start_cluster(
    small_checkpoint: Path,
    faulty_repository: Path,
    undisturbed: list[list[int]],
    tmp_path_factory: pytest.TempPathFactory,
) -> StartCluster:
    """Starts both hosts, with these timeouts."""

    @contextlib.contextmanager
    def start(timeouts: tuple[str, ...]) -> Iterator[Cluster]:
        log = tmp_path_factory.mktemp("worker") / "log"
        with running_cluster(small_checkpoint, faulty_repository, timeouts, log) as running:
            yield Cluster(*running, undisturbed)

    return start


@pytest.fixture(scope="module")
def cluster(start_cluster: StartCluster) -> Iterator[Cluster]:
    """Shared by the tests in which no host falls silent, each of which leaves it whole."""
    with start_cluster(PATIENT) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def impatient_cluster(start_cluster: StartCluster) -> Iterator[Cluster]:
    """Shared by the tests in which one does, each of which leaves it whole."""
    with start_cluster(IMPATIENT) as cluster:
        yield cluster


@contextlib.contextmanager
def running_cluster(
    model: Path, source: Path, timeouts: tuple[str, ...], worker_log: Path
) -> Iterator[tuple[TwoHosts, TritonServer]]:
    """Both hosts, and the server on host a."""
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(two_hosts())
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv(SECRET_VARIABLE, "of this test")
        patch.setenv("OMP_NUM_THREADS", "1")
        rendezvous = f"{hosts.a.address}:{RENDEZVOUS_PORT}"
        worker = stack.enter_context(running_worker(hosts, rendezvous, worker_log))
        settings = (
            "tensor_parallel_size=2",
            "num_local_ranks=1",
            f"rendezvous={rendezvous}",
            "num_gpu_blocks_override=600",
            "cpu_threads=1",
            *timeouts,
        )
        with hosts.a.entered():
            server = stack.enter_context(
                running_server(model=model, settings=settings, source=source)
            )
        yield hosts, server
        assert worker.poll() is None, worker_log.read_text(encoding="utf-8")


@contextlib.contextmanager
def running_worker(
    hosts: TwoHosts, rendezvous: str, log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """A rank on host b that joins one engine after the other."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1")
    command = [*torchrun, "-m", "charonia.parallel.worker", "--join", rendezvous]
    with log.open("wb") as file, hosts.b.entered():
        worker = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    with worker:
        yield worker
        worker.send_signal(signal.SIGTERM)


def test_an_engine_on_two_hosts_gives_the_tokens_of_one_process(cluster: Cluster) -> None:
    cluster.check_complete(cluster.start_streams())


@long
def test_streams_survive_a_cable_that_is_cut_and_mended(impatient_cluster: Cluster) -> None:
    cluster = impatient_cluster
    engine = cluster.engine_pid()
    streams = cluster.start_streams()
    cluster.hosts.cut()
    cluster.wait_engine_gone(engine)
    cluster.hosts.restore()
    cluster.check_survived(streams)


@long
def test_streams_survive_the_death_of_the_other_host_s_rank(cluster: Cluster) -> None:
    streams = cluster.start_streams()
    for pid in cluster.hosts.b.pids():
        if "--parent" in psutil.Process(pid).cmdline():
            os.kill(pid, signal.SIGKILL)
    cluster.check_survived(streams)


@long
def test_while_the_other_host_stays_away_requests_fail_and_then_it_serves_again(
    impatient_cluster: Cluster,
) -> None:
    cluster = impatient_cluster
    streams = cluster.start_streams()
    cluster.hosts.cut()
    for stream in streams:
        stream.wait_over(SERVES_AGAIN_S)
        assert "the engine is down and cannot be loaded" in (stream.error or "")
        assert "only 0 of 1 other ranks have joined" in (stream.error or "")
    cluster.hosts.restore()
    with cluster.hosts.a.entered():
        is_up = wait_for(lambda: scrape(cluster.server)["charonia_engine_up"], bool, SERVES_AGAIN_S)
    assert is_up
    cluster.check_complete(cluster.start_streams())
