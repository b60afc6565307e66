"""The alpha-beta model of a transfer, fitted: t = alpha + beta * w. No torch here.

Source: Hockney 1994, "The communication challenge for MPP"; for collectives Thakur, Rabenseifner & Gropp 2005,
section 4. Symbols: t seconds of one call, w bytes one rank sends, alpha latency in seconds, beta seconds a byte.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class AlphaBeta:
    """The fit of one operation over one number of ranks; `r2` is the share of the times' variance it explains."""

    op: str
    world: int
    alpha_s: float
    beta_s_per_byte: float
    r2: float
    samples: int


def fit_alpha_beta(rows: Iterable[Mapping[str, Any]]) -> list[AlphaBeta]:
    """Least squares for each (op, world) of benchmark rows with the keys op, world, wire_bytes and seconds.

    Raises:
        ValueError: an operation was measured at fewer than two sizes, which fix no line.
    """
    samples: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        samples[row["op"], row["world"]].append((row["wire_bytes"], row["seconds"]))
    return [_fit(op, world, np.asarray(points, dtype=np.float64)) for (op, world), points in sorted(samples.items())]


def _fit(op: str, world: int, points: np.ndarray) -> AlphaBeta:
    wire, seconds = points.T
    if np.unique(wire).size < 2:
        raise ValueError(f"op={op} over {world} ranks was measured at one size only; a line needs at least two")
    beta, alpha = np.polyfit(wire, seconds, 1)
    unexplained = float(((seconds - alpha - beta * wire) ** 2).sum())
    spread = float(((seconds - seconds.mean()) ** 2).sum())
    r2 = 1.0 - unexplained / spread if spread > 0 else 1.0
    return AlphaBeta(op, world, float(alpha), float(beta), r2, len(points))
