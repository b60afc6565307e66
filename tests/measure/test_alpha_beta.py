"""The line of latency and bandwidth through measured transfers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridpar.measure.alpha_beta import fit_alpha_beta

SIZES = (0, 1_000, 10_000, 100_000)


def _rows(op: str, world: int, alpha: float, beta: float, noise: float = 0.0) -> list[dict[str, object]]:
    generator = np.random.default_rng(0)
    return [
        {"op": op, "world": world, "wire_bytes": w, "seconds": (alpha + beta * w) * (1 + noise * generator.normal())}
        for w in SIZES
        for _ in range(5)
    ]


@given(alpha=st.floats(1e-6, 1e-2), beta=st.floats(1e-11, 1e-7))
def test_a_line_is_found_again(alpha: float, beta: float) -> None:
    (fit,) = fit_alpha_beta(_rows("p2p", 2, alpha, beta))
    assert fit.alpha_s == pytest.approx(alpha, rel=1e-6, abs=1e-12)
    assert fit.beta_s_per_byte == pytest.approx(beta, rel=1e-3)
    assert fit.samples == 20


def test_each_operation_and_world_has_its_own_line() -> None:
    fits = fit_alpha_beta(_rows("p2p", 2, 1e-4, 1e-9) + _rows("all_reduce", 4, 2e-4, 3e-9))
    assert [(fit.op, fit.world) for fit in fits] == [("all_reduce", 4), ("p2p", 2)]
    assert fits[0].alpha_s == pytest.approx(2e-4)


def test_noise_lowers_the_share_explained() -> None:
    (clean,) = fit_alpha_beta(_rows("p2p", 2, 1e-4, 1e-9))
    (noisy,) = fit_alpha_beta(_rows("p2p", 2, 1e-4, 1e-9, noise=0.3))
    assert clean.r2 == pytest.approx(1.0)
    assert noisy.r2 < 0.9


def test_one_size_fixes_no_line() -> None:
    rows = [{"op": "p2p", "world": 2, "wire_bytes": 8, "seconds": 1.0}] * 3
    with pytest.raises(ValueError, match="op=p2p over 2 ranks was measured at one size only"):
        fit_alpha_beta(rows)
