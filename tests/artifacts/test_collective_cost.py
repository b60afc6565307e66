"""Latency and bandwidth are recovered from times made of them; ring factors are the textbook's."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridpar.artifacts.collective_cost import RING_FACTORS, fit, fits, wire_factors

_SIZES = np.array([1e3, 1e4, 1e5, 1e6, 1e7])


@given(alpha=st.floats(1e-6, 1e-2), rate=st.floats(1e7, 1e10))
def test_a_fit_recovers_what_made_the_times(alpha: float, rate: float) -> None:
    found = fit(_SIZES, alpha + _SIZES / rate)

    assert found.alpha_s == pytest.approx(alpha, rel=1e-4, abs=1e-9)
    assert found.bytes_per_s == pytest.approx(rate, rel=1e-4)
    assert found.median_relative_error < 1e-6


def test_latency_is_never_negative() -> None:
    found = fit(_SIZES, (_SIZES / 1e9) ** 1.2)

    assert found.alpha_s == 0
    assert found.bytes_per_s > 0


def test_times_that_do_not_grow_bound_no_bandwidth() -> None:
    assert fit(_SIZES, np.array([5.0, 4.0, 3.0, 2.0, 1.0]) * 1e-3).bytes_per_s == np.inf


def test_one_size_cannot_be_fitted() -> None:
    with pytest.raises(ValueError, match="at least two message sizes"):
        fit(np.array([8.0, 8.0]), np.array([1.0, 2.0]))


@pytest.mark.parametrize(
    ("operation", "ranks", "factor"),
    [("all_reduce", 2, 1.0), ("all_reduce", 4, 1.5), ("all_gather", 4, 0.75), ("reduce_scatter", 8, 0.875)],
)
def test_ring_factors(operation: str, ranks: int, factor: float) -> None:
    assert RING_FACTORS[operation](ranks) == factor


def test_measured_factors_stand_beside_the_ring() -> None:
    bench = pd.DataFrame(
        {"op": "all_reduce", "world": 4, "bytes": [100, 1000], "wire_bytes": [150, 1600], "seconds": [1.0, 2.0]}
    )
    (row,) = wire_factors(bench).to_dict("records")

    assert (row["factor_low"], row["factor_high"], row["ring"]) == (1.5, 1.6, 1.5)
    assert list(fits(bench)["n"]) == [2]
