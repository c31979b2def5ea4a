"""A real tritonserver over a small random checkpoint, and gateways in front of it."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from charonia.launch.server.run import running_server
from charonia.launch.server.tritonserver import TritonServer
from support.e2e import ENDLESS_BLOCKS, MAX_MODEL_LEN, ONE_THREAD, one_torch_thread
from support.gateway import Gateway, running_gateway

TEMPLATE = """{% for message in messages %}
{% if message.role not in ('system', 'user', 'assistant') %}
{{ raise_exception('no such role') }}
{% endif %}
<{{ message.role }}{{ ' ' + message.name if message.name else '' }}>{{ message.content }}</>
{% endfor %}
{% if messages | length > 5 %}{{ raise_exception('too many messages') }}{% endif %}
{% if add_generation_prompt %}<assistant{{ mood | default('') }}>{% endif %}"""
NAMES = ("--served-model-name", "small", "alias")


@pytest.fixture(scope="session")
def model(checkpoint: Callable[..., Path]) -> Path:
    """A random float32 Llama with a byte-level tokenizer and long contexts."""
    return checkpoint("LlamaForCausalLM", max_position_embeddings=MAX_MODEL_LEN)


@pytest.fixture(scope="session")
def server(model: Path) -> Iterator[TritonServer]:
    """The server that tests share which do it no harm."""
    settings = (ONE_THREAD, ENDLESS_BLOCKS, "max_num_seqs=32")
    with one_torch_thread(), running_server(model=model, settings=settings) as server:
        yield server


@pytest.fixture(scope="session")
def narrow_server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A server that runs one request at a time, and queues two; it keeps answers.

    Of the tenant "narrow" it queues one.
    """
    tenants = tmp_path_factory.mktemp("narrow") / "tenants.json"
    tenants.write_text(json.dumps({"tenants": {"narrow": {"max_queue_size": 1}}}))
    settings = (
        ONE_THREAD,
        ENDLESS_BLOCKS,
        "max_num_seqs=1",
        "scheduler.max_queue_size=2",
        f"scheduler.tenants_file={tenants}",
        f"scheduler.answer_cache_bytes={2**20}",
    )
    with one_torch_thread(), running_server(model=model, settings=settings) as server:
        yield server


@pytest.fixture(scope="session")
def chatting(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer of `model`, with a chat template."""
    directory = tmp_path_factory.mktemp("chatting")
    shutil.copy(model / "tokenizer.json", directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@pytest.fixture(scope="session")
def gateway(server: TritonServer, chatting: Path) -> Iterator[Gateway]:
    """A gateway in front of `server`; its model is called "small", or "alias"."""
    with running_gateway([server.grpc_url], chatting, *NAMES) as gateway:
        yield gateway
