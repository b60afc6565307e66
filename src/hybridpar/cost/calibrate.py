"""Fits the free parameters of the cost model to measured steps. No torch here.

Least squares on the logarithm of time, by Gauss-Newton with a trust region. Every row counts by the inverse square root
of how many its source has, so that no large sweep drowns the others; residuals far beyond `TYPICAL` count ever less
(Cauchy's distribution in place of the normal one), so that runs in which something broke do not pull. A source may be
faster or slower as a whole than all others (its cluster, its program): what its rows have in common is taken out before
they count, and counts once, with the width of `SOURCE`. It is not kept: no prediction knows of sources. What is known
beforehand (`RAW`: microbenchmarks and data sheets) enters as one more residual for each parameter, with the width of
`PRIOR`: parameters that the fitted runs say nothing about stay where they were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from hybridpar.cost.coefficients import NAMES, RAW, Coefficients, from_vector, to_vector

Vector = npt.NDArray[np.float64]
Model = Callable[[Coefficients], Vector]
TYPICAL = 0.12
PRIOR = 0.5  # natural logarithm: a factor of 1.65 either way
# Narrower where microbenchmarks say more, wider where nothing is known beforehand.
PRIORS = {
    "matmul": 0.1,
    "matmul_traffic": 0.3,
    "link": 0.15,
    "nic": 0.15,
    "throttle": 1.5,
    "contention": 3.0,
    "turn": 1.0,
    "slow_latency": 0.7,
    "stragglers": 1.0,
}
SOURCE = 0.1
_STEPS = 40


@dataclass(frozen=True)
class Fit:
    """Parameters, and how far the fitted rows are from them: measured over predicted at the 10th and 90th percentile,
    every source counting the same, and the median absolute logarithm."""

    coefficients: Coefficients
    names: tuple[str, ...]
    rows: int
    sources: tuple[str, ...]
    low: float
    high: float
    median: float


def source_weights(sources: Sequence[str]) -> Vector:
    """n^-1/2 for each row of a source with n of them."""
    names, where, counts = np.unique(np.asarray(sources), return_inverse=True, return_counts=True)
    return np.asarray(counts[where] ** -0.5, dtype=np.float64) if len(names) else np.zeros(0)


def fit(
    model: Model,
    measured: Vector,
    sources: Sequence[str],
    *,
    start: Coefficients = RAW,
    names: tuple[str, ...] = NAMES,
    prior: float = PRIOR,
) -> Fit:
    """The parameters `names` that make `model(coefficients)` close to `measured` seconds; others stay as in `start`.

    Raises:
        ValueError: no rows, lengths that differ, or a time that is not above 0.
    """
    measured = np.asarray(measured, dtype=np.float64)
    if len(measured) == 0 or len(measured) != len(sources):
        raise ValueError(f"{len(measured)} measured times of {len(sources)} sources; there must be as many, and some")
    if not (np.isfinite(measured).all() and (measured > 0).all()):
        raise ValueError("a measured time is not above 0")
    weights = source_weights(sources)
    target, centre = np.log(measured), to_vector(start, names)
    widths = np.array([PRIORS.get(name, PRIOR) for name in names])
    groups = np.unique(np.asarray(sources), return_inverse=True)[1]

    def raw(vector: Vector) -> Vector:
        return target - np.log(model(from_vector(vector, start, names)))

    def residuals(vector: Vector) -> Vector:
        """Of rows without what their source has in common; then what it has in common, against its own width."""
        off = raw(vector)
        common = _common(off, groups, weights)
        return np.concatenate([off - common[groups], common * (TYPICAL / SOURCE)])

    every = np.concatenate([weights, np.ones(groups.max() + 1)])

    def loss(vector: Vector, off: Vector) -> float:
        robust = 0.5 * TYPICAL**2 * np.log1p((off / TYPICAL) ** 2)
        return float((every * robust).sum() + 0.5 * (((vector - centre) * TYPICAL / widths) ** 2).sum())

    vector = centre.copy()
    off = residuals(vector)
    best, damping, gain = loss(vector, off), 1e-2, 0.0
    for _ in range(_STEPS):
        slopes = _slopes(residuals, vector, off)
        weighted = every / (1 + (off / TYPICAL) ** 2)
        curvature = slopes.T @ (slopes * weighted[:, None]) + np.diag((TYPICAL / widths) ** 2)
        gradient = slopes.T @ (off * weighted) + (TYPICAL / widths) ** 2 * (vector - centre)
        improved = False
        while damping < 1e8:
            scaled = curvature + damping * np.diag(np.diag(curvature))
            trial = vector - np.clip(np.linalg.solve(scaled, gradient), -0.7, 0.7)
            trial_off = residuals(trial)
            trial_loss = loss(trial, trial_off)
            if trial_loss < best:
                gain = best - trial_loss
                vector, off, best, damping, improved = trial, trial_off, trial_loss, max(damping / 5, 1e-6), True
                break
            damping *= 5
        if not improved or gain < 1e-5 * best:
            break
    return _told(from_vector(vector, start, names), names, raw(vector), sources, weights)


def _common(off: Vector, groups: npt.NDArray[np.intp], weights: Vector) -> Vector:
    """What the rows of each source have in common: a mean that outliers do not pull, shrunk towards 0."""
    count = int(groups.max()) + 1
    common = np.zeros(count)
    for _ in range(4):
        trusted = weights / (1 + ((off - common[groups]) / TYPICAL) ** 2)
        total = np.bincount(groups, trusted, count)
        common = np.bincount(groups, trusted * off, count) / (total + (TYPICAL / SOURCE) ** 2)
    return common


def _slopes(residuals: Callable[[Vector], Vector], vector: Vector, off: Vector) -> npt.NDArray[np.float64]:
    columns = []
    for index in range(len(vector)):
        moved = vector.copy()
        moved[index] -= 1e-3  # downwards: shares are cut at 1
        columns.append((off - residuals(moved)) / 1e-3)
    return np.stack(columns, axis=1)


def _told(found: Coefficients, names: tuple[str, ...], off: Vector, sources: Sequence[str], weights: Vector) -> Fit:
    order = np.argsort(off)
    share = np.cumsum(weights[order] ** 2) / np.sum(weights**2)
    low, high = (float(np.exp(off[order][np.searchsorted(share, level)])) for level in (0.1, 0.9))
    return Fit(found, names, len(off), tuple(sorted(set(sources))), low, high, float(np.median(np.abs(off))))


def one_scale(predicted: Vector, measured: Vector, base: Coefficients = RAW) -> tuple[Coefficients, float]:
    """From one or a few ordinary runs: everything slower or faster by one factor, the geometric mean of what was
    measured over what was predicted. Returns the coefficients and the factor.

    Raises:
        ValueError: no runs, lengths that differ, or times that are not above 0.
    """
    if len(measured) == 0 or len(predicted) != len(measured):
        raise ValueError(
            f"{len(measured)} measured and {len(predicted)} predicted times; there must be as many, and some"
        )
    if not (np.isfinite(measured).all() and (measured > 0).all() and (predicted > 0).all()):
        raise ValueError("a time is not above 0")
    factor = float(np.exp(np.mean(np.log(measured) - np.log(predicted))))
    rates = {name: getattr(base, name) / factor for name in ("matmul", "attention", "scan", "memory", "link", "nic")}
    waits = ("link_latency", "nic_latency", "slow_latency", "kernel", "step")
    return replace(base, **rates, **{name: getattr(base, name) * factor for name in waits}), factor
