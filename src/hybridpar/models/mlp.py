"""SwiGLU feed-forward block (Shazeer 2020, arXiv 2002.05202, eq. 6).

Symbols: T tokens, d hidden, f ffn_hidden.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return functional.silu(gate) * up


class SwiGLU(nn.Module):
    """y = W_down (silu(W_gate x) * W_up x), without biases."""

    def __init__(self, hidden: int, ffn_hidden: int) -> None:
        super().__init__()
        self.w_gate = nn.Linear(hidden, ffn_hidden, bias=False)
        self.w_up = nn.Linear(hidden, ffn_hidden, bias=False)
        self.w_down = nn.Linear(ffn_hidden, hidden, bias=False)
        self.product: Callable[[Tensor, Tensor], Tensor] = gated

    def forward(self, x: Tensor) -> Tensor:
        """x (..., d) -> (..., d)."""
        return self.w_down(self.product(self.w_gate(x), self.w_up(x)))
