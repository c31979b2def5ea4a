"""Every panel of every dashboard has data, in front of a server that does everything at once."""

import contextlib
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from charonia.launch.server.run import running_server
from charonia.launch.server.tritonserver import TritonServer
from charonia_client import Client
from charonia_client.errors import CharoniaClientError
from support.e2e import one_torch_thread, scrape, wait_for
from support.gateway import Gateway, running_gateway
from support.prometheus import Prometheus, running_prometheus

pytestmark = pytest.mark.observe

DASHBOARDS = Path(__file__).parents[2] / "docker" / "grafana" / "dashboards"
RATE_INTERVAL = "30s"
LOAD_S = 20.0
TENANTS = {
    "tenants": {
        "search": {"weight": 3, "ttft_target_ms": 60_000, "inter_token_target_ms": 60_000},
        "batch": {"requests_per_s": 2},
    }
}
SHARED = list(range(40, 104))


@pytest.fixture(scope="module")
def server(
    checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    folder = tmp_path_factory.mktemp("observed")
    (folder / "tenants.json").write_text(json.dumps(TENANTS), encoding="utf-8")
    settings = (
        "dtype=float32",
        "cpu_threads=1",
        "max_num_seqs=8",
        "num_gpu_blocks_override=200",
        "tensor_parallel_size=2",
        "scheduling_policy=deadline",
        'speculative_config={"method": "ngram", "num_speculative_tokens": 3, "adaptive": false}',
        f"kv_cache_path={json.dumps(str(folder / 'kv'))}",
        "kv_cache_file_space=0.01",
        "scheduler.fair_share=true",
        f"scheduler.tenants_file={folder / 'tenants.json'}",
        f"scheduler.answer_cache_bytes={2**20}",
    )
    model = checkpoint("LlamaForCausalLM", max_position_embeddings=2048)
    with one_torch_thread(), running_server(model=model, settings=settings) as server:
        yield server


@pytest.fixture(scope="module")
def gateway(server: TritonServer, checkpoint: Callable[..., Path]) -> Iterator[Gateway]:
    model = checkpoint("LlamaForCausalLM", max_position_embeddings=2048)
    with running_gateway([server.grpc_url], model, "--served-model-name", "small") as gateway:
        yield gateway


def load(server: TritonServer, gateway: Gateway, stop: threading.Event, number: int) -> None:
    """Ask for all kinds of things until `stop`."""
    with Client(server.grpc_url) as client:
        for count in range(10_000):
            if stop.is_set():
                return
            tenant = ("search", "batch")[number % 2]
            sampling: dict[str, Any] = {
                "max_tokens": 24,
                "ignore_eos": True,
                "tenant": tenant,
                "deadline_ms": 60_000,
                "temperature": 0.0 if count % 3 else 1.0,
            }
            prompt = SHARED + [5, 6, 7] * 4 + [count % 5]
            with contextlib.suppress(CharoniaClientError):
                client.generate(prompt, sampling)  # type: ignore[arg-type]
            body = {"prompt": [*prompt, number, count % 90], "max_tokens": 8, "stream": True}
            with gateway.http.stream("POST", "/v1/completions", json=body) as reply:
                for _ in reply.iter_lines():
                    pass


@pytest.fixture(scope="module")
def prometheus(
    server: TritonServer, gateway: Gateway, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    """After some traffic, in the midst of which the engine was killed."""
    page = server.metrics_url.removeprefix("http://").removesuffix("/metrics")
    targets = {"charonia": [page], "charonia-gateway": [gateway.url.removeprefix("http://")]}
    stop = threading.Event()
    threads = [
        threading.Thread(target=load, args=(server, gateway, stop, number)) for number in range(4)
    ]
    with running_prometheus(tmp_path_factory.mktemp("prometheus"), targets) as prometheus:
        for thread in threads:
            thread.start()
        try:
            time.sleep(LOAD_S / 2)
            (engine,) = server.pids("engine")
            os.kill(engine, signal.SIGKILL)
            restarted = wait_for(
                lambda: scrape(server)["charonia_engine_restarts_total"], lambda count: count == 1
            )
            assert restarted == 1
            time.sleep(LOAD_S / 2)
            yield prometheus
        finally:
            stop.set()
            for thread in threads:
                thread.join()


def panels() -> Iterator[Any]:
    for path in sorted(DASHBOARDS.glob("*.json")):
        for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]:
            for target in panel.get("targets", ()):
                name = f"{path.stem}: {panel['title']} {target['refId']}"
                yield pytest.param(target["expr"], id=name)


@pytest.mark.parametrize("expr", list(panels()))
def test_a_panel_has_data(prometheus: Prometheus, expr: str) -> None:
    for name, value in {
        "$__rate_interval": RATE_INTERVAL,
        "$instance": ".*",
        "$model": ".*",
    }.items():
        expr = expr.replace(name, value)
    assert "$" not in expr
    values = [value for _, value in prometheus.query(expr)]
    assert values
    assert any(math.isfinite(value) for value in values)
