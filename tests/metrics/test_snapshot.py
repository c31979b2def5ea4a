"""What is read off two pages: sums, rates, quantiles, and counters that began again."""

import contextlib
import socket
from collections.abc import Callable, Iterator

import pytest

from charonia.metrics.page_server import NoPageError, PageServer
from charonia.metrics.snapshot import NoMetricsError, Snapshot, Span, read_metrics

BEFORE = """# TYPE done counter
done_total{model="a",why="stop"} 10
done_total{model="a",why="length"} 5
done_total{model="b",why="stop"} 100
# TYPE seconds histogram
seconds_bucket{model="a",le="1"} 3
seconds_bucket{model="a",le="2"} 3
seconds_bucket{model="a",le="+Inf"} 3
seconds_sum{model="a"} 3
seconds_count{model="a"} 3
"""
AFTER = """# TYPE done counter
done_total{model="a",why="stop"} 14
done_total{model="a",why="length"} 5
done_total{model="b",why="stop"} 2
done_total{model="b",why="new"} 6
# TYPE rows gauge
rows{model="a"} 7
rows{model="b"} 1
# TYPE seconds histogram
seconds_bucket{model="a",le="1"} 5
seconds_bucket{model="a",le="2"} 11
seconds_bucket{model="a",le="+Inf"} 13
seconds_sum{model="a"} 99
seconds_count{model="a"} 13
"""


@pytest.fixture
def span() -> Span:
    return Span(Snapshot.of(BEFORE, 100.0), Snapshot.of(AFTER, 102.0))


def test_series_are_summed_over_what_is_not_named(span: Span) -> None:
    assert span.after.total("rows") == 8
    assert span.after.total("rows", model="b") == 1
    assert span.after.total("rows", model="c") is None
    assert span.after.total("columns") is None
    assert (span.after.least("rows"), span.after.most("rows")) == (1, 7)
    assert (span.after.least("columns"), span.after.most("columns")) == (None, None)
    assert span.after.by("done_total", "why") == {"stop": 16, "length": 5, "new": 6}
    assert span.after.by("rows", "why") == {}


def test_the_greatest_values_are_those_of_all_series(span: Span) -> None:
    assert span.after.greatest("rows", 5) == [7, 1]
    assert span.after.greatest("rows", 1) == [7]
    assert span.after.greatest("done", 1) is None


def test_a_counter_that_fell_began_again(span: Span) -> None:
    assert span.rise("done_total", model="a") == 4
    assert span.rise("done_total", model="b") == 2 + 6
    assert span.rate("done_total") == 6
    assert span.rates_by("done_total", "why") == {"stop": 3, "length": 0, "new": 3}
    assert span.rise("nothing_total") is None
    assert span.rate("nothing_total") is None


def test_what_the_earlier_page_lacked_did_not_happen_in_between(span: Span) -> None:
    later = Span(Snapshot(0.0, {}), span.after)
    assert later.rise("done_total") is None
    assert later.quantile("seconds", 0.5) is None


def test_shares_are_of_what_rose(span: Span) -> None:
    assert span.share("seconds_count", "done_total") == pytest.approx(10 / 12)
    assert span.share("done_total", "nothing_total") is None
    assert span.share("nothing_total", "done_total") is None


def test_quantiles_are_those_of_the_time_between(span: Span) -> None:
    """Between the pages two took up to 1 s, six from 1 to 2 s, two longer."""
    assert span.quantile("seconds", 0.1) == pytest.approx(0.5)
    assert span.quantile("seconds", 0.5) == pytest.approx(1.5)
    assert span.quantile("seconds", 0.99) == 2
    assert span.quantile("nothing", 0.5) is None
    assert Span(span.after, span.after).quantile("seconds", 0.5) is None


@pytest.mark.parametrize("page", ["<html></html>", "name{", "name one"])
def test_what_is_no_page_of_metrics_is_refused(page: str) -> None:
    with pytest.raises(NoMetricsError, match="not in Prometheus' text format"):
        Snapshot.of(page, 0.0)


def test_a_servers_page_is_read_as_totals_by_name() -> None:
    assert read_metrics("http://127.0.0.1:1/metrics") is None
    with served(AFTER.encode) as url:
        found = read_metrics(url)
        assert found is not None
        assert (found["rows"], found["done_total"], found["seconds_count"]) == (8, 27, 13)


def test_a_server_without_a_page_has_no_totals() -> None:
    def read() -> bytes:
        raise NoPageError("tritonserver does not run")

    with served(read) as url:
        assert read_metrics(url) == {}


@contextlib.contextmanager
def served(read: Callable[[], bytes]) -> Iterator[str]:
    """Serve a page, at the URL that this yields."""
    listener = socket.create_server(("127.0.0.1", 0))
    with contextlib.closing(PageServer(listener, read, print)):
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/metrics"
