"""What the end-to-end tests share: a real tritonserver over a small random checkpoint."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from charonia.launch.server.run import running_server
from charonia.launch.server.tritonserver import TritonServer
from support.e2e import ENDLESS_BLOCKS, MAX_MODEL_LEN, ONE_THREAD, one_torch_thread
from support.faults import make_faulty_repository

FORWARDING = (
    "--http-header-forward-pattern=(X-.*|Host)",
    "--grpc-header-forward-pattern=x-.*",
)
ROOMY = (ONE_THREAD, ENDLESS_BLOCKS, "max_num_seqs=64")
NARROW = (
    ONE_THREAD,
    ENDLESS_BLOCKS,
    "max_num_seqs=1",
    "scheduler.max_queue_size=2",
    "scheduler.REPORT_CUSTOM_METRICS=yes",
    "scheduling_policy=priority",
)


@pytest.fixture(scope="session")
def small_checkpoint(checkpoint: Callable[..., Path]) -> Path:
    """A random float32 Llama with a byte-level tokenizer; long contexts, for long streams."""
    return checkpoint("LlamaForCausalLM", max_position_embeddings=4096)


@pytest.fixture(scope="session")
def endless_checkpoint(checkpoint: Callable[..., Path]) -> Path:
    """The same with contexts for requests of `ENDLESS` tokens."""
    return checkpoint("LlamaForCausalLM", max_position_embeddings=MAX_MODEL_LEN)


@pytest.fixture(scope="session")
def faulty_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model repository whose engine fails on order (see faulty_steps.py) and takes its time."""
    return make_faulty_repository(tmp_path_factory.mktemp("faulty") / "model_repository")


@pytest.fixture(scope="session")
def server_log() -> list[str]:
    """What `server` has logged so far."""
    return []


@pytest.fixture(scope="session")
def server(endless_checkpoint: Path, server_log: list[str]) -> Iterator[TritonServer]:
    """The server that tests share which do it no harm: 64 rows, requests of `ENDLESS` tokens.

    Its scheduler has a second name, "second", and TensorRT-LLM's models beside it.
    """
    with (
        one_torch_thread(),
        running_server(
            model=endless_checkpoint,
            settings=ROOMY,
            served_model_names=("second",),
            facades=("tensorrt-llm",),
            tritonserver=FORWARDING,
            on_log=server_log.append,
        ) as server,
    ):
        yield server


@pytest.fixture(scope="session")
def narrow_server(endless_checkpoint: Path) -> Iterator[TritonServer]:
    """A server that runs one request at a time, by priority, and queues two; it has vLLM's metrics.

    TensorRT-LLM's models are there, and cannot stream.
    """
    with (
        one_torch_thread(),
        running_server(
            model=endless_checkpoint,
            settings=NARROW,
            facades=("tensorrt-llm",),
            is_facade_decoupled=False,
        ) as server,
    ):
        yield server
