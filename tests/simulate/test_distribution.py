"""Quantiles from buckets, and the difference in service of tenants."""

import random

import numpy as np
import pytest

from charonia.simulate.distribution import Distribution
from charonia.simulate.service import MAX_TENANTS, ServiceDifference


def test_quantiles_are_within_a_percent():
    drawn = random.Random(0)
    values = [drawn.lognormvariate(-3, 2) for _ in range(20_000)]
    found = Distribution()
    for value in values:
        found.observe(value)
    for share in (0.01, 0.5, 0.99):
        assert found.quantile(share) == pytest.approx(np.quantile(values, share), rel=0.02)
    assert found.mean == pytest.approx(np.mean(values))


def test_parts_are_merged():
    one, other = Distribution(), Distribution()
    one.observe(1.0, 3)
    other.observe(8.0)
    one.merge(other)
    assert one.count == 4
    assert one.mean == pytest.approx(2.75)
    assert one.quantile(1.0) == pytest.approx(8.0, rel=0.01)
    assert one.quantile(0.5) == pytest.approx(1.0, rel=0.01)


def test_nothing_has_no_quantile():
    assert Distribution().quantile(0.5) is None
    assert Distribution().mean is None


def service(weights=None) -> ServiceDifference:
    return ServiceDifference(lambda tenant: (weights or {}).get(tenant, 1.0))


def test_the_difference_counts_while_both_wait():
    found = service()
    found.note_arrival("a")
    found.note_input("a", 100)  # nobody else waits
    found.look()
    assert found.greatest == 0
    found.note_arrival("b")
    found.look()
    found.note_output("a", 10)  # twice as dear
    found.look()
    assert found.greatest == 20
    found.note_input("b", 50)
    found.look()
    assert found.greatest == 50  # from 20 for the one to 30 for the other
    found.note_start("b")
    found.look()
    found.note_input("a", 1000)
    found.look()
    assert found.greatest == 50
    assert found.service == {"a": 1120.0, "b": 50.0}


def test_weights_count():
    found = service({"a": 4.0})
    found.note_arrival("a")
    found.note_arrival("b")
    found.look()
    found.note_input("a", 400)
    found.note_input("b", 100)
    found.look()
    assert found.greatest == 0
    assert found.lightest == 1.0
    assert found.bound(1000, 300) == 2000
    assert found.bound(100, 300, 0.5) == 2400


def test_more_tenants_than_are_looked_at_do_no_harm():
    found = service()
    for number in range(MAX_TENANTS + 5):
        found.note_arrival(str(number))
        found.note_output(str(number), number)
    found.look()
    assert len(found.service) == MAX_TENANTS
