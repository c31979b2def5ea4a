"""What the end-to-end tests share: a real tritonserver over a small random checkpoint."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from charonia.launch.run import running_server
from charonia.launch.server import TritonServer

MAX_MODEL_LEN = 4096
ROOMY = ("num_gpu_blocks_override=2049", "max_num_seqs=64")


@pytest.fixture(scope="session")
def small_checkpoint(checkpoint: Callable[..., Path]) -> Path:
    """A random float32 Llama with a byte-level tokenizer; long contexts, for long streams."""
    return checkpoint("LlamaForCausalLM", max_position_embeddings=MAX_MODEL_LEN)


@pytest.fixture(scope="session")
def server_log() -> list[str]:
    """What `server` has logged so far."""
    return []


@pytest.fixture(scope="session")
def server(small_checkpoint: Path, server_log: list[str]) -> Iterator[TritonServer]:
    """The server that tests share which do it no harm: 64 rows, 2,048 KV blocks of 16 tokens."""
    with running_server(model=small_checkpoint, settings=ROOMY, on_log=server_log.append) as server:
        yield server
