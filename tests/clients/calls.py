"""What the tests of several clients share."""

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.gateway import Gateway, running_gateway
from support.waiting import WAIT_S

FOLDER = Path(__file__).parent


def rendered(*messages: tuple[str, str]) -> str:
    """The prompt of a conversation, by roles and contents."""
    return "".join(f"<{role}>{content}</>\n" for role, content in messages) + "<assistant>"


@contextlib.contextmanager
def broken_gateway(tokenizer: Path) -> Iterator[Gateway]:
    """A gateway without a server: it answers 503 with retry-after."""
    with running_gateway(["127.0.0.1:9"], tokenizer, "--served-model-name", "small") as gateway:
        yield gateway


def run_node(script: str, *arguments: str) -> Any:
    """What a script of this folder prints, which is JSON."""
    command = ["node", str(FOLDER / script), *arguments]
    found = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)
