"""Every panel of every dashboard has data, in front of a server that does everything at once."""

import contextlib
import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
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
LABEL_VALUES = re.compile(r"label_values\((?P<series>.*), (?P<label>\w+)\)")
SPECIAL = re.compile(r"[$^*{}\[\]'+?.()|\\]")
GONE = "10.0.0.1:8002"
"""A value of which there is nothing any more."""
TARGETS: dict[str, list[str]] = {}
"""What is scraped, by job."""


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """After some traffic, in the midst of which the engine was killed."""
    with contextlib.ExitStack() as stack:
        folder = tmp_path_factory.mktemp("observed")
        server, gateway = stack.enter_context(observed_server(folder))
        TARGETS.update(targets_of(server, gateway))
        folder = tmp_path_factory.mktemp("prometheus")
        prometheus = stack.enter_context(running_prometheus(folder, TARGETS))
        for number in range(NUM_CLIENTS):
            stack.enter_context(client(server, gateway, number))
        time.sleep(LOAD_S / 2)
        kill_engine(server)
        time.sleep(LOAD_S / 2)
        yield prometheus


def boards() -> Iterator[tuple[str, Any]]:
    for path in sorted(DASHBOARDS.glob("*.json")):
        yield path.stem, json.loads(path.read_text(encoding="utf-8"))


def variables_of(dashboard: Any) -> list[Any]:
    """Those that a query fills, in the order in which they use each other."""
    return [one for one in dashboard["templating"]["list"] if one["type"] == "query"]


def panels() -> Iterator[Any]:
    for name, dashboard in boards():
        for panel in dashboard["panels"]:
            for target in panel.get("targets", ()):
                case = f"{name}: {panel['title']} {target['refId']}"
                yield pytest.param(dashboard, target["expr"], id=case)


def filled(query: str, chosen: Mapping[str, list[str]]) -> str:
    """A query with the values of variables, escaped as Grafana does it in front of Prometheus."""
    for name, values in chosen.items():
        escaped = [SPECIAL.sub(r"\\\\\g<0>", value) for value in values]
        text = escaped[0] if len(escaped) == 1 else f"({'|'.join(escaped)})"
        query = query.replace(f"${name}", text)
    return query


def values_of(prometheus: Prometheus, dashboard: Any) -> dict[str, list[str]]:
    """What each variable offers, by its own query."""
    chosen: dict[str, list[str]] = {}
    for variable in variables_of(dashboard):
        found = LABEL_VALUES.fullmatch(filled(variable["query"], chosen))
        assert found is not None
        chosen[variable["name"]] = prometheus.label_values(found["label"], found["series"])
    return chosen


@pytest.mark.parametrize(
    "dashboard", [pytest.param(dashboard, id=name) for name, dashboard in boards()]
)
def test_the_variables_offer_what_is_scraped(prometheus: Prometheus, dashboard: Any) -> None:
    is_gateway = dashboard["uid"].endswith("gateway")
    expected = {"instance": TARGETS["charonia-gateway" if is_gateway else "charonia"]}
    if not is_gateway:
        expected["model"] = ["scheduler"]
    assert values_of(prometheus, dashboard) == expected


@pytest.mark.parametrize(("dashboard", "expr"), list(panels()))
def test_a_panel_has_data(prometheus: Prometheus, dashboard: Any, expr: str) -> None:
    """With the values that are offered, with several, and for those who choose all."""
    every = {variable["name"]: variable["allValue"] for variable in variables_of(dashboard)}
    expr = expr.replace("$__rate_interval", RATE_INTERVAL)
    offered = values_of(prometheus, dashboard)
    for others in ([], [GONE]):
        chosen = filled(expr, {name: [*values, *others] for name, values in offered.items()})
        assert "$" not in chosen
        check_data(prometheus, chosen)
    for name, value in every.items():
        expr = expr.replace(f"${name}", value)
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
