"""The dashboards ask for metrics that exist, by labels that they have.

A real Prometheus runs their queries in `make observe-test`.
"""

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from charonia.gateway.observing import Metrics
from charonia.metrics.metric_table import BY_NAME

FOLDER = Path(__file__).parents[2] / "docker" / "grafana"
DASHBOARDS = sorted((FOLDER / "dashboards").glob("*.json"))


def labels_of_gateway() -> dict[str, set[str]]:
    """The labels of the gateway's metrics, by name."""
    found = {}
    for collector in Metrics().registry._collector_to_names:
        (family,) = collector.describe()  # type: ignore[attr-defined]
        found[family.name] = set(collector._labelnames)  # type: ignore[attr-defined]
    return found


GATEWAY = labels_of_gateway()


def panels(path: Path) -> Iterator[dict[str, Any]]:
    for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]:
        if panel["type"] != "row":
            yield panel


def queries(path: Path) -> Iterator[str]:
    for panel in panels(path):
        for target in panel["targets"]:
            yield target["expr"]


def labels(name: str) -> set[str]:
    """The labels of a metric's series. Raises KeyError: there is none of the name."""
    if name.startswith("charonia_gateway_"):
        stem = name.removesuffix("_bucket").removesuffix("_total")
        return GATEWAY[stem] | {"instance", "le"}
    metric = BY_NAME[name.removesuffix("_bucket")]
    return {"instance", "model", "le", metric.label}


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: str(path.stem))
def test_what_a_dashboard_asks_for_is_there(path: Path) -> None:
    found = list(queries(path))
    assert found
    for query in found:
        names = re.findall(r"(charonia_\w+)\{([^}]*)\}", query)
        assert len(names) == query.count("charonia_"), query
        grouped = {label for by in re.findall(r"by \(([^)]*)\)", query) for label in by.split(", ")}
        for name, selector in names:
            assert grouped | set(re.findall(r"(\w+)=~?", selector)) <= labels(name), query


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: str(path.stem))
def test_a_share_does_not_grow_with_the_number_of_servers(path: Path) -> None:
    for panel in panels(path):
        if panel["fieldConfig"]["defaults"]["unit"] == "percentunit":
            for target in panel["targets"]:
                assert " / " in target["expr"] or target["expr"].startswith("avg"), panel["title"]


def test_there_is_one_for_each_part() -> None:
    assert {path.stem for path in DASHBOARDS} == {
        "overview",
        "scheduling",
        "cache",
        "speculation",
        "engine",
        "faults",
        "gateway",
    }


@pytest.mark.skipif(
    importlib.util.find_spec("grafana_foundation_sdk") is None,
    reason="needs the package grafana-foundation-sdk",
)
def test_the_files_are_those_that_are_written() -> None:
    command = [sys.executable, FOLDER / "dashboards.py", "--check"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
