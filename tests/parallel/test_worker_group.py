"""The engine's process and its ranks: who is let in, what is said when one cannot load, the end."""

import contextlib
import gc
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from charonia.errors import CheckpointError, ConfigError
from charonia.parallel.handshake import SECRET_VARIABLE
from charonia.parallel.messages import Allocate, encode
from charonia.protocol import StepPlan
from parity.reference import greedy, random_prompt
from support.long import long
from support.ranked_engine import (
    descriptors,
    free_address,
    is_alive,
    listening_ports,
    rank_args,
    ranked_engine,
)
from support.waiting import eventually

Checkpoint = Callable[..., Path]
PROMPT = random_prompt(20)
KERNELS = ["auto", pytest.param("torch", marks=long)]


@contextmanager
def rank_elsewhere(port: int, secret: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A rank started by hand."""
    command = [sys.executable, "-m", "charonia.parallel.worker", "--join", f"127.0.0.1:{port}"]
    env = os.environ | {SECRET_VARIABLE: secret, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [*command, *arguments], env=env, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            yield process
        finally:
            process.terminate()


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Arguments of an engine whose second rank comes by itself."""
    monkeypatch.setenv(SECRET_VARIABLE, "open sesame")
    return {"num_local_ranks": 1, "rendezvous": free_address()}


def port_of(remote: dict[str, Any]) -> int:
    return int(remote["rendezvous"].rpartition(":")[2])


def test_whoever_does_not_know_the_secret_is_refused_and_a_rank_that_does_may_still_join(
    checkpoint: Checkpoint, remote: dict[str, Any]
) -> None:
    port = port_of(remote)
    with (
        rank_elsewhere(port, "open barley"),
        stranger(port),
        rank_elsewhere(port, "open sesame"),
        ranked_engine(rank_args(checkpoint(), **remote)) as engine,
    ):
        assert engine.step(PROMPT).rows[0].token_ids == greedy(checkpoint(), PROMPT, 1).token_ids
    assert sum("has joined" in line for line in engine.log) == 1
    assert any("refused" in line for line in engine.log)
    assert not any("sesame" in line or "barley" in line for line in engine.log)


@contextmanager
def stranger(port: int) -> Iterator[None]:
    """Says what is no message, what no rank says first, and nothing at all."""
    is_over = threading.Event()
    connections = []

    def call() -> None:
        for words in (b"GET / HTTP/1.1\r\n\r\n", _framed(encode(Allocate(3, 64))), b""):
            while not is_over.wait(0.05):
                with contextlib.suppress(OSError):
                    connections.append(socket.create_connection(("127.0.0.1", port)))
                    connections[-1].sendall(words)
                    break

    thread = threading.Thread(target=call)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        for connection in connections:
            connection.close()


def _framed(data: bytes) -> bytes:
    return len(data).to_bytes(4, "little") + data


def test_ranks_of_other_machines_need_a_secret(
    checkpoint: Checkpoint, remote: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SECRET_VARIABLE)
    args = rank_args(checkpoint(), **remote)
    with pytest.raises(ConfigError, match=f"set {SECRET_VARIABLE}"), ranked_engine(args):
        pass


def test_a_rendezvous_that_is_taken_is_named(
    checkpoint: Checkpoint, remote: dict[str, Any]
) -> None:
    args = rank_args(checkpoint(), **remote)
    with (
        socket.create_server(("127.0.0.1", port_of(remote))),
        pytest.raises(ConfigError, match=f"{remote['rendezvous']}: Address"),
        ranked_engine(args),
    ):
        pass


def test_a_rank_that_cannot_load_its_checkpoint_says_why(
    checkpoint: Checkpoint, remote: dict[str, Any], tmp_path: Path
) -> None:
    elsewhere = shutil.copytree(checkpoint(), tmp_path / "elsewhere")
    (elsewhere / "model.safetensors").unlink()
    args = rank_args(checkpoint(), **remote)
    with (
        rank_elsewhere(port_of(remote), "open sesame", "--model", str(elsewhere)),
        pytest.raises(CheckpointError, match=r"rank 1: .*"),
        ranked_engine(args),
    ):
        pass


@pytest.mark.parametrize("cpu_kernels", KERNELS)
def test_nothing_is_left_when_an_engine_is_closed(checkpoint: Checkpoint, cpu_kernels: str) -> None:
    args = rank_args(checkpoint(), cpu_kernels=cpu_kernels, pipeline_parallel_size=2)
    open_before, listening_before = descriptors(), listening_ports()
    children_before = set(psutil.Process().children(recursive=True))
    with ranked_engine(args) as engine:
        engine.step(PROMPT)
        for pid in engine.pids:
            # A file with a name would outlive processes that are killed.
            lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()
            assert not [
                line for line in lines if "/dev/shm/" in line and not line.endswith("(deleted)")
            ]
        assert len(engine.pids) == 4
    assert not any(is_alive(pid) for pid in engine.pids[1:])
    assert set(psutil.Process().children(recursive=True)) <= children_before
    assert engine.lost.empty()
    del engine
    gc.collect()  # a group's connections end with the last one who could use them
    eventually(lambda: listening_ports() <= listening_before, "nobody listens any more")
    eventually(lambda: set(descriptors()) <= set(open_before), "everything is closed")


@long
def test_an_engine_that_cannot_be_split_leaves_no_rank(checkpoint: Checkpoint) -> None:
    before = set(psutil.Process().children())
    args = rank_args(checkpoint(), tensor_parallel_size=3)
    with (
        pytest.raises(ConfigError, match="does not divide the model's 4 attention heads"),
        ranked_engine(args),
    ):
        pass
    eventually(lambda: set(psutil.Process().children()) <= before, "all ranks have ended")


@pytest.mark.parametrize("cpu_kernels", KERNELS)
def test_a_step_counts_what_its_ranks_exchanged(checkpoint: Checkpoint, cpu_kernels: str) -> None:
    num_layers, hidden, vocab = 2, 64, 389
    model_dir = checkpoint(vocab_size=vocab)
    with ranked_engine(rank_args(model_dir, cpu_kernels=cpu_kernels)) as engine:
        for num_tokens in (20, 1, 33):
            found = engine.step(random_prompt(num_tokens)).collectives
            assert found is not None
            sums = 1 + 2 * num_layers  # of the embedding, and of both halves of each layer
            assert found["all_reduce"][:2] == (sums, sums * num_tokens * hidden * 4)
            # The other rank's half of one line of logits.
            assert found["broadcast"][:2] == (1, (vocab + 1) // 2 * 4)
            assert set(found) == {"all_reduce", "broadcast"}
            assert all(seconds > 0 for _, _, seconds in found.values())


@pytest.mark.parametrize("cpu_kernels", ["auto", pytest.param("torch", marks=long)])
def test_a_pipelines_step_counts_what_goes_from_stage_to_stage(
    checkpoint: Checkpoint, cpu_kernels: str
) -> None:
    hidden, vocab = 64, 384
    args = rank_args(
        checkpoint(), cpu_kernels=cpu_kernels, tensor_parallel_size=1, pipeline_parallel_size=2
    )
    with ranked_engine(args) as engine:
        found = engine.step(PROMPT).collectives
        assert found is not None
        # The hidden states of all tokens there, one line of logits back.
        assert found["broadcast"][:2] == (2, (len(PROMPT) * hidden + vocab) * 4)
        assert set(found) == {"broadcast"}


def test_an_engine_of_one_rank_exchanges_nothing(checkpoint: Checkpoint) -> None:
    with ranked_engine(rank_args(checkpoint(), tensor_parallel_size=1)) as engine:
        assert engine.step(PROMPT).collectives is None
        assert engine.pids == [os.getpid()]


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="there are no huge pages"
)
def test_all_ranks_wish_for_huge_pages_again_once_all_blocks_are_in_use(
    checkpoint: Checkpoint,
) -> None:
    def num_small(pid: int) -> int:
        """Ranges of memory for which a process wants no huge pages."""
        lines = Path(f"/proc/{pid}/smaps").read_text(encoding="ascii").splitlines()
        return sum(line.startswith("VmFlags:") and " nh" in line for line in lines)

    with ranked_engine(rank_args(checkpoint("LlamaForCausalLM"))) as engine:
        before = {pid: num_small(pid) for pid in engine.pids}
        engine.runner.execute(StepPlan(epoch=1, step_id=0, reset=True))
        discards = [*range(2, 32)]
        engine.runner.execute(StepPlan(epoch=1, step_id=1, discards=discards, num_blocks=2))
        for pid in engine.pids:
            eventually(lambda pid=pid: num_small(pid) > before[pid])
        engine.runner.execute(StepPlan(epoch=1, step_id=2))
        for pid in engine.pids:
            eventually(lambda pid=pid: num_small(pid) == before[pid])
