"""Forms of microbenchmarks, and their fits: products by shape, collectives by size. No torch here.

    product      seconds = 2*m*n*k/(share*P) * (1 + traffic*P/W * (1/m + 1/n + 1/k)) + launch: arithmetic, and beside it
                 the operands through device memory (2 bytes a number; P peak FLOP/s, W bytes a second of memory)
    collective   seconds = alpha + beta * (wire bytes of `hybridpar.comm.wire`): alpha of a call, beta of a byte that a
                 rank sends

Both are fitted by least squares on the logarithm of time, by Gauss-Newton on the logarithm of the parameters. They are
where the raw values of `hybridpar.cost.coefficients` come from: `matmul_traffic` is the median of `traffic`, `link` of
1/(beta * the data sheet's bandwidth) in a node.
"""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hybridpar.comm.wire import OPERATIONS, wire_bytes
from hybridpar.cost.hardware import HardwareError, accelerators

Vector = npt.NDArray[np.float64]
DATA = Path(__file__).parents[3] / "data" / "published"
LEAST_ROWS = 20


@dataclass(frozen=True)
class MatmulCurve:
    """A product's time on one accelerator; `error` is the mean absolute logarithm of measured over fitted time."""

    share: float
    traffic: float
    launch: float
    peak: float
    memory_rate: float
    rows: int
    error: float

    def seconds(self, m: Vector, n: Vector, k: Vector) -> Vector:
        """Of products of m x k with k x n."""
        return _product_seconds(np.array([self.share, self.traffic, self.launch]), m, n, k, self.peak, self.memory_rate)

    def efficiency(self, m: Vector, n: Vector, k: Vector) -> Vector:
        """Share of the peak that they reach."""
        return 2 * m * n * k / self.seconds(m, n, k) / self.peak


@dataclass(frozen=True)
class CollectiveCurve:
    """A collective's time over one span; `error` as of `MatmulCurve`."""

    alpha: float
    beta: float
    rows: int
    error: float

    def seconds(self, sent: Vector) -> Vector:
        """Of calls in which a rank sends so many bytes."""
        return self.alpha + self.beta * sent


def _product_seconds(p: Vector, m: Vector, n: Vector, k: Vector, peak: float, memory_rate: float) -> Vector:
    share, traffic, launch = p
    return 2 * m * n * k / (share * peak) * (1 + traffic * peak / memory_rate * (1 / m + 1 / n + 1 / k)) + launch


def fit_matmul(m: Vector, n: Vector, k: Vector, seconds: Vector, peak: float, memory_rate: float) -> MatmulCurve:
    """The curve through measured products.

    Raises:
        ValueError: fewer than three products, or a size or time that is not above 0.
    """
    _check(3, m, n, k, seconds)
    start = np.array([0.8, 1.0, 5e-6])
    found, error = _fit(lambda p: _product_seconds(p, m, n, k, peak, memory_rate), start, seconds)
    share, traffic, launch = (float(one) for one in found)
    return MatmulCurve(share, traffic, launch, peak, memory_rate, len(seconds), error)


def fit_collective(sent: Vector, seconds: Vector) -> CollectiveCurve:
    """The curve through measured calls in which a rank sends `sent` bytes.

    Raises:
        ValueError: fewer than two calls, or a size or time that is not above 0.
    """
    _check(2, sent, seconds)
    start = np.array([float(seconds.min()), float((seconds / sent).min())])
    found, error = _fit(lambda p: p[0] + p[1] * sent, start, seconds)
    return CollectiveCurve(float(found[0]), float(found[1]), len(seconds), error)


def _check(least: int, *columns: Vector) -> None:
    if len(columns[-1]) < least:
        raise ValueError(f"{len(columns[-1])} measurements are too few; legal: at least {least}")
    if any(not (np.isfinite(one).all() and (one > 0).all()) for one in columns):
        raise ValueError("a size or a time is not above 0")


def _fit(model: Callable[[Vector], Vector], start: Vector, measured: Vector) -> tuple[Vector, float]:
    vector, target = np.log(start), np.log(measured)

    def off(at: Vector) -> Vector:
        return target - np.log(model(np.exp(at)))

    now, damping = off(vector), 1e-3
    for _ in range(60):
        moved = [vector + np.eye(len(vector))[i] * 1e-5 for i in range(len(vector))]
        slopes = np.stack([(now - off(one)) / 1e-5 for one in moved], axis=1)
        curvature = slopes.T @ slopes
        step = np.linalg.solve(curvature + damping * np.eye(len(vector)), slopes.T @ now)
        trial = vector + np.clip(step, -0.5, 0.5)
        new = off(trial)
        if (new**2).sum() < (now**2).sum():
            vector, now, damping = trial, new, max(damping / 5, 1e-9)
            if np.abs(step).max() < 1e-7:
                break
        else:
            damping *= 5
    return np.exp(vector), float(np.abs(now).mean())


def matmul_curves(path: Path = DATA / "matmul_bench.csv") -> Mapping[tuple[str, str], MatmulCurve]:
    """Plain bf16 and fp16 products by (source, accelerator), where there are at least LEAST_ROWS with a time.

    Raises:
        HardwareError: the table cannot be read.
    """
    rows = defaultdict(list)
    for row in _rows(path):
        known = row["accelerator"] in _NAMES
        if row["op"] == "gemm" and row["dtype"] in ("bf16", "fp16") and row["time_us"] and known:
            rows[row["source_id"], _NAMES[row["accelerator"]]].append(row)
    curves = {}
    for (source, name), found in rows.items():
        if len(found) >= LEAST_ROWS:
            device = accelerators()[name]
            m, n, k, seconds = (_numbers(found, column) for column in ("m", "n", "k", "time_us"))
            curves[source, name] = fit_matmul(m, n, k, seconds * 1e-6, device.peak(), device.memory_rate)
    return curves


# Names of the benchmark table that are no alias: how a card is mounted or clocked is told elsewhere.
_NAMES = {
    **dict.fromkeys(("A100", "A100-80G", "A100-80G SXM"), "A100-80G"),
    **dict.fromkeys(("H100-80G", "H100-80G SXM", "H100 (sm_90)"), "H100-80G"),
    **dict.fromkeys(("B200", "B200-180G SXM"), "B200-180G"),
    "A100 PCIe 80G": "A100-PCIe",
    "H200-141G SXM": "H200-141G",
    "V100": "V100-32G",
}


def collective_curves(
    path: Path = DATA / "collective_bench.csv",
) -> Mapping[tuple[str, str, str, int, int], CollectiveCurve]:
    """By (source, accelerator, operation, ranks, nodes), where several sizes were measured.

    Raises:
        HardwareError: the table cannot be read.
    """
    rows = defaultdict(list)
    for row in _rows(path):
        if row["op"] in OPERATIONS and row["accelerator"] in _NAMES and row["time_us"] and float(row["bytes"] or 0) > 0:
            ranks, nodes = int(float(row["num_devices"])), int(float(row["nodes"]))
            key = (row["source_id"], _NAMES[row["accelerator"]], row["op"], ranks, nodes)
            sent = wire_bytes(row["op"], ranks, int(float(row["bytes"])))
            if sent and math.isfinite(float(row["time_us"])) and float(row["time_us"]) > 0:
                rows[key].append((float(sent), float(row["time_us"]) * 1e-6))
    curves = {}
    for key, found in rows.items():
        if len({size for size, _ in found}) >= 5:
            sizes, seconds = (np.array(column) for column in zip(*found, strict=True))
            curves[key] = fit_collective(sizes, seconds)
    return curves


def _rows(path: Path) -> Sequence[Mapping[str, str]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))
    except OSError as error:
        raise HardwareError(f"{path} cannot be read: {error.strerror}") from None


def _numbers(rows: Sequence[Mapping[str, str]], column: str) -> Vector:
    return np.array([float(row[column]) for row in rows], dtype=np.float64)
