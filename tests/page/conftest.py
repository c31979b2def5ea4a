"""A real Chromium in front of a real gateway and a real tritonserver; `make test-page` runs these.

Without Playwright the tests here are not collected.
"""

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from charonia.launch.server.run import running_server
from charonia.launch.server.tritonserver import TritonServer
from support.e2e import ENDLESS_BLOCKS, MAX_MODEL_LEN, ONE_THREAD, one_torch_thread
from support.gateway import Gateway, running_gateway
from support.waiting import WAIT_S

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from support.page import Visit

if importlib.util.find_spec("playwright") is None:
    collect_ignore_glob = ["test_*.py"]

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
NAME = "small"


@pytest.fixture(scope="session")
def model(checkpoint: Callable[..., Path]) -> Path:
    """A random float32 Llama with a byte-level tokenizer and long contexts, which never stops."""
    return checkpoint("LlamaForCausalLM", max_position_embeddings=MAX_MODEL_LEN, eos_token_id=None)


@pytest.fixture(scope="session")
def server(model: Path) -> Iterator[TritonServer]:
    """The server of all tests here; it runs two requests at a time."""
    settings = (ONE_THREAD, ENDLESS_BLOCKS, "max_num_seqs=2")
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
    """A gateway in front of `server`."""
    with running_gateway([server.grpc_url], chatting, "--served-model-name", NAME) as gateway:
        yield gateway


@pytest.fixture(scope="session")
def browser() -> "Iterator[Browser]":
    """A Chromium without a window."""
    from playwright.sync_api import sync_playwright

    found = subprocess.run(
        [Path(__file__).parent / "find_chromium"], stdout=subprocess.PIPE, text=True, check=True
    )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=found.stdout.strip(),
            # Root, as in a container, has no sandbox for a browser.
            chromium_sandbox=os.geteuid() != 0,
        )
        yield browser
        browser.close()


@pytest.fixture
def visit(browser: "Browser", gateway: Gateway) -> "Iterator[Visit]":
    """The page as a visitor without a past has it, who meets no fault that a test does not name."""
    from support.page import Visit

    with Visit(browser, gateway.url, WAIT_S) as visit:
        visit.open()
        yield visit
