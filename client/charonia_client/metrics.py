"""A snapshot of the server's metrics.

Owns reading Prometheus' text format with prometheus_client. Must not know which
metrics there are.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from charonia_client.errors import ServerError


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    """All metric families of one scrape, by name (of counters: without `_total`)."""

    families: Mapping[str, Metric]

    def value(self, sample: str, **labels: str) -> float:
        """The sum of a sample's values over all label sets that contain `labels`.

        Args:
            sample: its name as on the page, such as "charonia_preemptions_total".

        Raises:
            KeyError: there is no such sample.
        """
        # The parser names the samples of a counter `…_total`, even if the page does not.
        values = [
            each.value
            for family in self.families.values()
            for each in family.samples
            if each.name in (sample, f"{sample}_total") and labels.items() <= each.labels.items()
        ]
        if not values:
            raise KeyError(f"no sample {sample} with labels {labels}")
        return sum(values)


def parse_metrics(text: str) -> MetricsSnapshot:
    """Read a metrics page.

    Raises:
        ServerError: it is not in Prometheus' text format.
    """
    try:
        families = {each.name: each for each in text_string_to_metric_families(text)}
    except ValueError as error:
        raise ServerError(f"the metrics page cannot be read: {error}") from None
    return MetricsSnapshot(families)
