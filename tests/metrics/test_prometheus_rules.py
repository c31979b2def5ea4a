"""The rules for Prometheus ask for metrics that exist, and do what their own tests say.

What they do is tested by Prometheus' own tool, if it is there: on PATH, or named by PROMTOOL.
"""

import os
import re
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from charonia.metrics.merged_page import SCHEDULERS_S, TRITON_S
from charonia.metrics.metric_table import BY_NAME

FOLDER = Path(__file__).parents[2] / "docker" / "prometheus"
PROMTOOL = os.environ.get("PROMTOOL") or shutil.which("promtool")


def rules(name: str) -> list[dict[str, Any]]:
    groups = yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


RECORDED = {rule["record"] for rule in rules("rules.yml")}


@pytest.mark.parametrize("rule", rules("rules.yml") + rules("alerts.yml"), ids=str)
def test_what_a_rule_asks_for_is_there(rule: dict[str, Any]) -> None:
    names = set(re.findall(r"charonia[\w:]+", rule["expr"]))
    assert names or "up{" in rule["expr"]
    for name in names:
        family = re.sub("_(bucket|count)$", "", name)
        assert name in RECORDED or family in BY_NAME, name
        if name != family:
            assert BY_NAME[family].kind == "histogram"
    for metric, label in re.findall(r"(charonia_\w+)\{(\w+)", rule["expr"]):
        assert BY_NAME[metric].label == label


def test_every_alert_says_what_is_wrong_and_how_urgent_it_is() -> None:
    for alert in rules("alerts.yml"):
        assert alert["labels"]["severity"] in ("page", "ticket")
        assert {"summary", "description"} == alert["annotations"].keys()


def test_the_threshold_of_a_percentile_is_a_bound_of_its_buckets() -> None:
    percentile = re.compile(r"charonia:(\w+):p\d+_5m > ([\d.]+)")
    found = [one for alert in rules("alerts.yml") for one in percentile.findall(alert["expr"])]
    assert found
    for name, threshold in found:
        assert float(threshold) in BY_NAME[f"charonia_{name}"].buckets


def test_the_tests_of_rules_have_the_buckets_that_servers_have() -> None:
    """One after the other; those above or below may be left out."""
    bucket = re.compile(r"'(\w+)_bucket\{(.*), le=\"([\d.]+)\"\}'")
    found = defaultdict(list)
    for name, labels, bound in bucket.findall((FOLDER / "alerts_test.yml").read_text("utf-8")):
        found[name, labels].append(float(bound))
    assert found
    for (name, _), bounds in found.items():
        real = BY_NAME[name].buckets
        first = real.index(bounds[0])
        assert tuple(bounds) == real[first : first + len(bounds)]


def test_every_alert_is_tested() -> None:
    tested = (FOLDER / "alerts_test.yml").read_text(encoding="utf-8")
    assert [a["alert"] for a in rules("alerts.yml") if a["alert"] not in tested] == []


def test_a_page_comes_before_prometheus_gives_it_up() -> None:
    """Otherwise a scheduler that hangs is taken for a server that is down."""
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text(encoding="utf-8"))
    timeout = config["global"]["scrape_timeout"]
    assert float(timeout.removesuffix("s")) > SCHEDULERS_S + TRITON_S


@pytest.mark.skipif(PROMTOOL is None, reason="needs promtool, on PATH or named by PROMTOOL")
def test_prometheus_own_tool_agrees() -> None:
    assert PROMTOOL is not None
    for command in (
        ["check", "config", "prometheus.yml"],
        ["check", "rules", "rules.yml", "alerts.yml"],
        ["test", "rules", "alerts_test.yml"],
    ):
        run = subprocess.run(
            [PROMTOOL, *command], cwd=FOLDER, capture_output=True, text=True, check=False
        )
        assert run.returncode == 0, run.stdout + run.stderr
