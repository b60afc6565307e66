"""The best this machine does: FLOP/s of a large matrix product, the denominator of every utilisation."""

from __future__ import annotations

import statistics
import time

import torch

from hybridpar.models.precision import DTYPES

_LARGEST_SIDE = {"cpu": 768, "cuda": 8192}
_HALVINGS = 3
_BUDGET_S = 0.3
_LEAST_SAMPLES = 5


def matmul_flops_per_s(threads: int, precision: str, device: str) -> float:
    """Median FLOP/s of square products in `precision` on `threads` CPU threads (or one GPU), for about 0.3 s.

    Call it in a process of its own: it starts torch's thread pool, after which forking is unsafe.
    """
    torch.set_num_threads(threads)
    side = _LARGEST_SIDE[device] >> _HALVINGS
    seconds = _seconds(side, precision, device)
    # as large as the budget allows: some processors have no fast product in some formats
    while side < _LARGEST_SIDE[device] and seconds * 8 * _LEAST_SAMPLES < _BUDGET_S:
        side *= 2
        seconds = _seconds(side, precision, device)
    return 2 * side**3 / seconds


def _seconds(side: int, precision: str, device: str) -> float:
    """Median time of a product of two (side, side) matrices."""
    a, b = (torch.randn(side, side, device=device).to(DTYPES[precision]) for _ in range(2))
    out = torch.empty_like(a)
    seconds: list[float] = []
    _product(a, b, out)
    while sum(seconds) < _BUDGET_S / _HALVINGS or len(seconds) < _LEAST_SAMPLES:
        start = time.perf_counter()
        _product(a, b, out)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    torch.mm(a, b, out=out)
    if a.is_cuda:
        torch.cuda.synchronize(a.device)
