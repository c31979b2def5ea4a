"""Every panel of every dashboard has data, in front of a server that does everything at once."""

import contextlib
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.observed import client, kill_engine, observed_server, targets_of
from support.prometheus import Prometheus, running_prometheus

pytestmark = pytest.mark.observe

DASHBOARDS = Path(__file__).parents[2] / "docker" / "grafana" / "dashboards"
RATE_INTERVAL = "30s"
LOAD_S = 20.0
NUM_CLIENTS = 4
THEIRS = 'model_name="scheduler", engine=~"0"'
"""How vLLM's own dashboards select."""


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """After some traffic, in the midst of which the engine was killed."""
    with contextlib.ExitStack() as stack:
        folder = tmp_path_factory.mktemp("observed")
        server, gateway = stack.enter_context(observed_server(folder))
        targets = targets_of(server, gateway)
        folder = tmp_path_factory.mktemp("prometheus")
        prometheus = stack.enter_context(running_prometheus(folder, targets))
        for number in range(NUM_CLIENTS):
            stack.enter_context(client(server, gateway, number))
        time.sleep(LOAD_S / 2)
        kill_engine(server)
        time.sleep(LOAD_S / 2)
        yield prometheus


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
    check_data(prometheus, expr)


@pytest.mark.parametrize(
    "expr",
    [
        "vllm:num_requests_running{@}",
        "vllm:num_requests_waiting{@}",
        "vllm:kv_cache_usage_perc{@}",
        "vllm:cache_config_info{@}",
        "rate(vllm:prompt_tokens_total{@}[30s])",
        "rate(vllm:generation_tokens_total{@}[30s])",
        "sum by (finished_reason) (increase(vllm:request_success_total{@}[30s]))",
        "sum by (le) (increase(vllm:request_prompt_tokens_bucket{@}[30s]))",
        "sum by (le) (increase(vllm:request_generation_tokens_bucket{@}[30s]))",
        "rate(vllm:request_queue_time_seconds_sum{@}[30s])",
        *(
            f"histogram_quantile(0.99, sum by (le) (rate(vllm:{name}_bucket{{@}}[30s])))"
            for name in (
                "e2e_request_latency_seconds",
                "inter_token_latency_seconds",
                "time_to_first_token_seconds",
            )
        ),
    ],
)
def test_what_vllms_dashboards_ask_for_is_there(prometheus: Prometheus, expr: str) -> None:
    check_data(prometheus, expr.replace("@", THEIRS))


def test_a_dashboard_can_be_drawn(prometheus: Prometheus, tmp_path: Path) -> None:
    script, path = DASHBOARDS.parent / "picture.py", tmp_path / "overview.png"
    command = [script, "overview", path, "--url", prometheus.url, "--minutes", "1"]
    subprocess.run([sys.executable, *map(str, command)], check=True)
    assert path.read_bytes().startswith(b"\x89PNG")


def check_data(prometheus: Prometheus, expr: str) -> None:
    """Assert that an expression has at least one number."""
    values = [value for _, value in prometheus.query(expr)]
    assert values
    assert any(math.isfinite(value) for value in values)
