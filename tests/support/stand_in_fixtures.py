"""Fixtures of the launcher's tests and of supervision's: stand-in models on a real tritonserver.

The stand-ins' model repository holds a scheduler that needs no engine, so that these tests show
what the launcher does, whatever the models do. A folder's conftest imports what its tests use.
"""

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from charonia.launch.server.tritonserver import TritonServer
from charonia.supervision.server.judge import SupervisionLimits
from support.stand_ins import STAND_INS, Target
from support.supervised import ALLOWED_S
from support.watching import Clock, Questions

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "dtype": "float32",
}


@pytest.fixture(autouse=True)
def generous_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the timeouts, so that a slow answer on a busy machine does not count as silence.

    A test without an answer sets these times anew.
    """
    for name in (
        "charonia.metrics.page_server.REQUEST_S",
        "charonia.metrics.page_server.PAGE_S",
        "charonia.metrics.page_server.TAKE_S",
        "charonia.metrics.merged_page.SCHEDULERS_S",
        "charonia.metrics.merged_page.TRITON_S",
        "charonia.supervision.server.model_control._ANSWER_S",
        "charonia.supervision.models.model_control.CONNECT_S",
    ):
        monkeypatch.setattr(name, ALLOWED_S)


@pytest.fixture
def checkpoint_dir(tmp_path: Path) -> Path:
    """A directory that looks like a checkpoint; nothing loads it here."""
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    (directory / "model.safetensors").touch()
    (directory / "tokenizer.json").touch()
    return directory


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A copy of the stand-ins that a test may change; its model.json points to `checkpoint_dir`."""
    return Path(shutil.copytree(STAND_INS, tmp_path / "source" / "model_repository"))


@pytest.fixture
def make_server(repository: Path) -> Iterator[Callable[..., TritonServer]]:
    """Servers over the stand-ins that are closed at the end of the test."""
    servers = []

    def make(**options: object) -> TritonServer:
        servers.append(TritonServer(repository, **options))
        return servers[-1]

    yield make
    for server in servers:
        server.kill()
        server.close()


@pytest.fixture
def supervise(make_server: Callable[..., TritonServer]) -> Iterator[Callable[..., Target]]:
    """Starts a supervised server and waits until it serves."""
    with contextlib.ExitStack() as stack:

        def start(limits: SupervisionLimits) -> Target:
            supervised = stack.enter_context(Target(make_server(), limits))
            stack.callback(supervised.end_at_once)
            supervised.wait_serving()
            return supervised

        yield start


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Set the clock of the watch over a supervised server."""
    return Clock(monkeypatch)


@pytest.fixture
def questions(monkeypatch: pytest.MonkeyPatch) -> Questions:
    """Count the questions of the watch over a supervised server."""
    return Questions(monkeypatch)
