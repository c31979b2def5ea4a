"""`charonia demo`: the whole way once, from a checkpoint to streamed text, on free ports.

Owns what is shown. Must not know how a server is started or a request sent.
"""

import re
import signal
import time
from collections.abc import Mapping
from typing import Any

from charonia.config import DEMO_CHECKPOINT, DEMO_DRAFT_CHECKPOINT
from charonia.demo.prompts import DEMO_PROMPTS, DemoPrompt
from charonia.errors import LaunchError
from charonia.launch.commands.serve import say
from charonia.launch.server.run import running_server
from charonia_client import CharoniaClientError, Client

PUBLIC_MODEL = "llm"


def run_demo() -> None:
    """Serve the demo pair, stream the built-in prompts with their speed, and stop.

    Raises:
        LaunchError, CheckpointError: the server cannot be started, or a request failed.
    """
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    try:
        _serve_and_stream()
    finally:
        signal.signal(signal.SIGTERM, before)


def _serve_and_stream() -> None:
    say(f"starting tritonserver with {DEMO_CHECKPOINT.name} and {DEMO_DRAFT_CHECKPOINT.name}")
    started = time.monotonic()
    with running_server(
        model=DEMO_CHECKPOINT, draft_model=DEMO_DRAFT_CHECKPOINT, on_log=_show_loading
    ) as server:
        say(f"serving on {server.grpc_url} (gRPC) after {time.monotonic() - started:.1f} s")
        with Client(server.grpc_url, protocol="grpc", model=PUBLIC_MODEL) as client:
            for prompt in DEMO_PROMPTS:
                try:
                    _stream(client, prompt)
                except CharoniaClientError as error:
                    raise LaunchError(str(error)) from None
    print()
    say("stopped; `charonia serve` goes on serving")


def _show_loading(line: str) -> None:
    if match := re.search(r"successfully loaded '(\S+)'", line):
        say(f"loaded {match[1]}")


def _stream(client: Client, prompt: DemoPrompt) -> None:
    """Print a prompt, its completion as it comes, how fast it came and what drafts were worth."""
    print(f"\n{'─' * 72}\n{prompt.text}", end="", flush=True)
    sent = time.monotonic()
    first = None
    num_tokens = 0
    timing: Mapping[str, Any] = {}
    for chunk in client.stream(
        prompt.text,
        max_tokens=prompt.max_tokens,
        temperature=prompt.temperature,
        seed=prompt.seed,
    ):
        first = first or time.monotonic()
        num_tokens += len(chunk.token_ids)
        timing = chunk.timing or timing
        print(chunk.text, end="", flush=True)
    total_s = time.monotonic() - sent
    first_ms = ((first or sent) - sent) * 1000
    print(
        f"\n── {num_tokens} tokens, {num_tokens / total_s:.0f} tokens/s, "
        f"first token after {first_ms:.0f} ms"
    )
    if drafted := timing.get("drafted_tokens"):
        accepted = timing["accepted_tokens"]
        print(
            f"── {accepted} of {drafted} drafted tokens accepted ({accepted / drafted:.0%}), "
            f"{1 + timing['mean_accepted_length']:.1f} tokens per step with drafts"
        )
