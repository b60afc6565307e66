"""Root-mean-square normalisation, plain and gated.

Symbols: T tokens (any leading dims), d width, G groups of a gated norm.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


def statistics_dtype(x: Tensor) -> torch.dtype:
    """Float32 for the short formats, the format itself otherwise."""
    return torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype


class RMSNorm(nn.Module):
    """y = w * x / sqrt(mean(x^2) + eps) over the last dim (Zhang & Sennrich 2019, arXiv 1910.07467, eq. 4)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x (..., d) -> (..., d)."""
        return functional.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
