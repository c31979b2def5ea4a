"""What the clients call: a real gateway, and the same server over gRPC to compare with."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from charonia.launch.server.run import running_server
from charonia.launch.server.tritonserver import TritonServer
from charonia_client import Client
from support.checkpoints import EOS_TOKEN
from support.e2e import ENDLESS_BLOCKS, MAX_MODEL_LEN, ONE_THREAD, one_torch_thread
from support.gateway import Gateway, running_gateway, wait_metric

# No client may fetch anything from elsewhere.
os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    LITELLM_LOCAL_MODEL_COST_MAP="True",
    LITELLM_TELEMETRY="0",
)

TEMPLATE = """{% for message in messages %}<{{ message.role }}>{{ message.content }}</>
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
ENGINE = (ONE_THREAD, ENDLESS_BLOCKS, "max_num_seqs=32")


@pytest.fixture(scope="session")
def model(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random float32 Llama with a chat template, and a tokenizer that transformers loads."""
    made = checkpoint("LlamaForCausalLM", max_position_embeddings=MAX_MODEL_LEN)
    directory = tmp_path_factory.mktemp("chatting") / "small"
    shutil.copytree(made, directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    (directory / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": EOS_TOKEN,
                "model_max_length": MAX_MODEL_LEN,
            }
        )
    )
    return directory


@pytest.fixture(scope="session")
def server(model: Path) -> Iterator[TritonServer]:
    """The server behind the gateway."""
    with one_torch_thread(), running_server(model=model, settings=ENGINE) as server:
        yield server


@pytest.fixture(scope="session")
def gateway(server: TritonServer, model: Path) -> Iterator[Gateway]:
    """The gateway; its model is called "small"."""
    with running_gateway([server.grpc_url], model, "--served-model-name", "small") as gateway:
        yield gateway


@pytest.fixture(scope="session")
def base_url(gateway: Gateway) -> str:
    """What clients are told."""
    return f"{gateway.url}/v1"


@pytest.fixture(scope="session")
def direct(server: TritonServer) -> Iterator[Callable[..., list[str]]]:
    """The texts of a prompt's samples, over gRPC."""
    with Client(server.grpc_url) as client:

        def ask(prompt: str | list[int], **sampling: Any) -> list[str]:
            completion = client.generate(prompt, **sampling)
            return [sample.text for sample in completion.samples]

        yield ask


@pytest.fixture
def idle_afterwards(server: TritonServer) -> Iterator[None]:
    """Nothing runs on the server when the client has left."""
    yield
    wait_metric(server, "charonia_requests_running", 0)
