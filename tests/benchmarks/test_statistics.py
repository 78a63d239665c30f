"""The statistics of timings, and the clocks that they come from."""

from __future__ import annotations

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusegrad.benchmarks.clocks import DryClock
from fusegrad.benchmarks.statistics import geometric_mean, noise, quantile, spread

positive = st.floats(min_value=1e-3, max_value=1e3)


@given(st.lists(positive, min_size=1, max_size=30), st.floats(0, 1))
def test_quantiles_are_numpys(samples: list[float], q: float) -> None:
    assert quantile(sorted(samples), q) == pytest.approx(numpy.quantile(samples, q))


@given(st.lists(positive, min_size=1, max_size=30))
def test_a_spread_is_ordered_and_knows_no_order(samples: list[float]) -> None:
    found = spread(samples)
    assert found == spread(samples[::-1])
    assert found.least <= found.lower <= found.median <= found.upper
    assert found.range == pytest.approx(found.upper - found.lower)


def test_one_slow_sample_moves_neither_least_nor_median() -> None:
    quiet, disturbed = spread([1.0, 1.1, 1.2, 1.3, 1.4]), spread([1.0, 1.1, 1.2, 1.3, 900.0])
    assert (quiet.least, quiet.median) == (disturbed.least, disturbed.median)
    with pytest.raises(ValueError):
        spread([])


@given(st.lists(positive, min_size=1, max_size=10))
def test_geometric_means_of_ratios_and_of_their_inverses(ratios: list[float]) -> None:
    assert geometric_mean(ratios) * geometric_mean(1 / r for r in ratios) == pytest.approx(1)
    assert geometric_mean([]) == 1


def test_noise_has_no_direction() -> None:
    assert noise(1.0, 1.02) == noise(1.02, 1.0) == pytest.approx(0.02)


def test_a_clock_calls_each_once() -> None:
    called: list[int] = []
    clock = DryClock()
    assert clock.wall([lambda i=i: called.append(i) for i in range(3)]) > 0  # type: ignore[misc]
    assert clock.device([lambda: called.append(3)])[0] > 0
    assert called == [0, 1, 2, 3]
