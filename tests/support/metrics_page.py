"""A metrics page as tests read it: kinds, labels, and by how much each metric rises."""

import math
import re
from collections import defaultdict

from prometheus_client.parser import text_string_to_metric_families

from charonia.launch.server.tritonserver import TritonServer
from support.e2e import wait_idle, whole_page

REQUEST_HISTOGRAMS = ("queue_seconds", "time_to_first_token_seconds", "request_seconds")
BLOCKS = "nv_trt_llm_kv_cache_block_metrics"
REQUESTS = "nv_trt_llm_request_metrics"


def kinds(page: str) -> dict[str, str]:
    """The kind of every family, as the page says."""
    return dict(re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE))


def labels(server: TritonServer, prefix: str) -> dict[str, list[dict[str, str]]]:
    """The labels of every series whose name begins so, by name."""
    found = defaultdict(list)
    for family in text_string_to_metric_families(whole_page(server.metrics_url)):
        for sample in family.samples:
            if sample.name.startswith(prefix):
                found[sample.name].append(sample.labels)
    return found


class Watched:
    """By how much each metric rises while requests run."""

    def __init__(self, server: TritonServer) -> None:
        self._server = server
        self._before = wait_idle(server)
        self.after: dict[str, float] = {}

    def settle(self) -> None:
        """Wait until all that was asked of the server is on the page."""
        self.after = wait_idle(self._server)

    def rise(self, name: str) -> float:
        """Of one metric; a series that was not there counts as zero."""
        return self.after[name] - self._before.get(name, 0.0)


def check_histogram(samples: dict[str, float], name: str) -> None:
    """Assert that buckets rise up to the count, and that the sum is possible."""
    buckets = sorted(
        (float(bound.replace("+Inf", "inf")), value)
        for key, value in samples.items()
        for bound in re.findall(rf'^{re.escape(name)}_bucket{{le="(.+)"}}$', key)
    )
    bounds = [bound for bound, _ in buckets]
    counts = [count for _, count in buckets]
    assert bounds[-1] == math.inf
    assert len(bounds) >= 5
    assert counts == sorted(counts)
    assert counts[-1] == samples[f"{name}_count"] > 0
    assert 0 <= samples[f"{name}_sum"] < math.inf
    in_bucket = [count - before for count, before in zip(counts, [0, *counts], strict=False)]
    least = sum(n * bound for n, bound in zip(in_bucket[1:], bounds, strict=False))
    assert samples[f"{name}_sum"] >= least * 0.999
