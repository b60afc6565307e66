"""The measured matmul ceiling."""

from __future__ import annotations

import time

import pytest

from hybridpar.measure.ceiling import matmul_flops_per_s


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_a_core_does_billions_of_operations_a_second_and_is_asked_briefly(precision: str) -> None:
    start = time.monotonic()
    rate = matmul_flops_per_s(1, precision, "cpu")
    assert 1e8 < rate < 1e13
    assert time.monotonic() - start < 10  # on a busy machine; a quarter of a second otherwise


def test_fp32_is_not_slower_than_fp64() -> None:
    fast, exact = (max(matmul_flops_per_s(1, precision, "cpu") for _ in range(2)) for precision in ("fp32", "fp64"))
    assert fast > 0.8 * exact
