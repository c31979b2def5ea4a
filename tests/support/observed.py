"""A server and a gateway that do everything at once, for those who look at what they show.

Owns how they are started, and what is asked of them meanwhile. Must not know who looks.
"""

import contextlib
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from charonia.launch.server.run import running_server
from charonia.launch.server.tritonserver import TritonServer
from charonia_client import Client
from charonia_client.errors import CharoniaClientError
from support.checkpoints import make_checkpoint
from support.e2e import one_torch_thread, scrape, wait_for
from support.gateway import Gateway, running_gateway
from support.waiting import WAIT_S

MAX_NUM_SEQS = 8
TENANTS = {
    "tenants": {
        "search": {"weight": 3, "ttft_target_ms": 60_000, "inter_token_target_ms": 60_000},
        "batch": {"requests_per_s": 2},
    }
}
SHARED = list(range(40, 104))
"""Beginning of every prompt."""


@contextlib.contextmanager
def observed_server(folder: Path) -> Iterator[tuple[TritonServer, Gateway]]:
    """A server with two ranks, drafts, tenants, slower tiers and cached answers, and a gateway.

    Args:
        folder: for its files.
    """
    model = make_checkpoint(folder / "model", max_position_embeddings=2048)
    (folder / "tenants.json").write_text(json.dumps(TENANTS), encoding="utf-8")
    settings = (
        "dtype=float32",
        "cpu_threads=1",
        f"max_num_seqs={MAX_NUM_SEQS}",
        "num_gpu_blocks_override=200",
        "tensor_parallel_size=2",
        "scheduling_policy=deadline",
        'speculative_config={"method": "ngram", "num_speculative_tokens": 3, "adaptive": false}',
        f"kv_cache_path={json.dumps(str(folder / 'kv'))}",
        "kv_cache_file_space=0.01",
        "scheduler.fair_share=true",
        f"scheduler.tenants_file={folder / 'tenants.json'}",
        f"scheduler.answer_cache_bytes={2**20}",
        "scheduler.REPORT_CUSTOM_METRICS=yes",
    )
    with (
        one_torch_thread(),
        running_server(model=model, settings=settings) as server,
        running_gateway([server.grpc_url], model, "--served-model-name", "small") as gateway,
    ):
        yield server, gateway


def targets_of(server: TritonServer, gateway: Gateway) -> dict[str, list[str]]:
    """Return the addresses that a Prometheus scrapes of them, by job."""
    page = server.metrics_url.removeprefix("http://").removesuffix("/metrics")
    return {"charonia": [page], "charonia-gateway": [gateway.url.removeprefix("http://")]}


@contextlib.contextmanager
def client(server: TritonServer, gateway: Gateway, number: int) -> Iterator[None]:
    """A client that asks for all kinds of things meanwhile, one after the other.

    Args:
        number: of the client, which says what it asks for.
    """
    stop = threading.Event()
    thread = threading.Thread(target=_ask, args=(server, gateway, stop, number))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _ask(server: TritonServer, gateway: Gateway, stop: threading.Event, number: int) -> None:
    # A connection that is kept may be closed by the gateway just when it is used again.
    limits = httpx.Limits(max_keepalive_connections=0)
    with (
        Client(server.grpc_url) as client,
        httpx.Client(base_url=gateway.url, timeout=WAIT_S, limits=limits) as http,
    ):
        for count in range(10_000):
            if stop.is_set():
                return
            sampling: dict[str, Any] = {
                "max_tokens": 24,
                "ignore_eos": True,
                "tenant": ("search", "batch")[number % 2],
                "deadline_ms": 60_000,
                "temperature": 0.0 if count % 3 else 1.0,
            }
            prompt = SHARED + [5, 6, 7] * 4 + [count % 5]
            with contextlib.suppress(CharoniaClientError):
                client.generate(prompt, sampling)  # type: ignore[arg-type]
            body = {"prompt": [*prompt, number, count % 90], "max_tokens": 8, "stream": True}
            with http.stream("POST", "/v1/completions", json=body) as reply:
                for _ in reply.iter_lines():
                    pass
            if not count % 4:
                entry = {"prompt_tokens": [*prompt, number], "max_tokens": 4}
                http.post("/v1/batch", json={"requests": [entry, entry]})


def kill_engine(server: TritonServer) -> None:
    """Kill the engine, and wait for the next one."""
    (engine,) = server.pids("engine")
    name = "charonia_engine_restarts_total"
    before = scrape(server)[name]
    os.kill(engine, signal.SIGKILL)
    assert wait_for(lambda: scrape(server)[name], lambda count: count > before) == before + 1
