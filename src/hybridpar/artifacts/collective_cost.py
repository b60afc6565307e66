"""What a collective costs: the bytes its ring moves, and time as latency plus bytes over bandwidth.

Glossary: p ranks of the group; n bytes of the message (the full tensor: an all-gather's output, a reduce-scatter's
input); w bytes that one rank sends; alpha latency of the whole operation in s; beta seconds a byte. The model is
t = alpha + beta * w (Hockney 1994; rings as in Thakur, Rabenseifner and Gropp 2005, section 4).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from hybridpar.artifacts.comparison import Floats, Spread

# Bytes one rank sends over the message's bytes, by operation, as a function of p.
RING_FACTORS: Mapping[str, Callable[[int], float]] = {
    "all_reduce": lambda p: 2 * (p - 1) / p,
    "all_gather": lambda p: (p - 1) / p,
    "reduce_scatter": lambda p: (p - 1) / p,
    "all_to_all": lambda p: (p - 1) / p,
}


@dataclass(frozen=True)
class Fit:
    """t = alpha_s + wire bytes / bytes_per_s, and how far the measured times are from it."""

    alpha_s: float
    bytes_per_s: float
    median_relative_error: float
    sizes: int
    n: int


def fit(wire_bytes: Floats, seconds: Floats) -> Fit:
    """Fit alpha and beta to the relative error, so that small messages weigh as much as large ones.

    Both are kept from going below zero: where the free fit would, the other alone is fitted. A bandwidth that the
    data does not bound (time does not grow with size) is infinite.

    Raises:
        ValueError: fewer than two different sizes.
    """
    if np.unique(wire_bytes).size < 2:
        raise ValueError("a fit needs at least two message sizes")
    weights = 1.0 / seconds
    design = np.stack([weights, wire_bytes * weights], axis=1)
    alpha, beta = (float(value) for value in np.linalg.lstsq(design, np.ones_like(seconds), rcond=None)[0])
    if alpha < 0:
        alpha, beta = 0.0, float(_through_zero(wire_bytes * weights))
    if beta < 0:
        alpha, beta = float(_through_zero(weights)), 0.0
    error = np.abs(alpha + beta * wire_bytes - seconds) / seconds
    rate = 1.0 / beta if beta > 0 else float("inf")
    return Fit(alpha, rate, float(np.median(error)), int(np.unique(wire_bytes).size), int(seconds.size))


def _through_zero(column: Floats) -> float:
    return float(column.sum() / (column @ column))


def fits(bench: pd.DataFrame) -> pd.DataFrame:
    """One row an operation and number of ranks: alpha in µs, bandwidth in MB/s, median relative error, counts."""
    rows = []
    for (op, world), group in bench.groupby(["op", "world"]):
        if group["wire_bytes"].nunique() < 2:
            continue
        found = fit(group["wire_bytes"].to_numpy(np.float64), group["seconds"].to_numpy(np.float64))
        rows.append(
            {
                "op": op,
                "world": world,
                "alpha_us": found.alpha_s * 1e6,
                "mb_per_s": found.bytes_per_s / 1e6,
                "error": found.median_relative_error,
                "sizes": found.sizes,
                "n": found.n,
            }
        )
    return pd.DataFrame(rows, columns=["op", "world", "alpha_us", "mb_per_s", "error", "sizes", "n"])


def wire_factors(bench: pd.DataFrame) -> pd.DataFrame:
    """Measured wire bytes over message bytes beside the ring's formula, one row an operation and number of ranks.

    `factor` is the median over sizes with `factor_low` and `factor_high`; `ring` is nan where no formula is given.
    """
    rows = []
    for (op, world), group in bench.groupby(["op", "world"]):
        spread = Spread.of(group["wire_bytes"] / group["bytes"])
        formula = RING_FACTORS.get(str(op))
        rows.append(
            {
                "op": op,
                "world": world,
                "factor": spread.median,
                "factor_low": spread.low,
                "factor_high": spread.high,
                "ring": formula(int(str(world))) if formula else float("nan"),
            }
        )
    return pd.DataFrame(rows, columns=["op", "world", "factor", "factor_low", "factor_high", "ring"])


def by_size(bench: pd.DataFrame) -> pd.DataFrame:
    """Median, smallest and largest time of each operation, number of ranks and message size."""
    return (
        bench.groupby(["op", "world", "bytes"])
        .agg(seconds=("seconds", "median"), low=("seconds", "min"), high=("seconds", "max"), wire=("wire_bytes", "max"))
        .reset_index()
    )
