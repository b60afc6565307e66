"""Causal grouped-query attention with rotary positions.

Symbols: b batch, S tokens, d hidden, H query heads, K key/value heads, h head_dim.
Sources: GQA, Ainslie et al. 2023, arXiv 2305.13245; RoPE, Su et al. 2021, arXiv 2104.09864, eq. 34, with the
pairing (i, i + h/2) that public Llama checkpoints use.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


def rotary_angles(length: int, head_dim: int, theta: float, device: torch.device, first: int = 0) -> Tensor:
    """Angles m * theta^(-2i/h) of positions m = first..first+length-1, (S, h/2), in float32 as in Llama."""
    exponent = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    position = torch.arange(first, first + length, device=device, dtype=torch.float32)
    return torch.outer(position, theta**-exponent)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate pairs (i, i + h/2) of x (b, heads, S, h) by angles (S, h/2)."""
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    swapped = torch.cat((second, first), dim=-1)
    return torch.addcmul(x * torch.cat((cos, cos), dim=-1), swapped, torch.cat((-sin, sin), dim=-1))


class Attention(nn.Module):
    """W_o softmax(q k^T / sqrt(h) + causal mask) v, with H/K query heads sharing each key/value head."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, head_dim: int, rope_theta: float) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim, self.rope_theta = heads, kv_heads, head_dim, rope_theta
        self.wq = nn.Linear(hidden, heads * head_dim, bias=False)
        self.wk = nn.Linear(hidden, kv_heads * head_dim, bias=False)
        self.wv = nn.Linear(hidden, kv_heads * head_dim, bias=False)
        self.wo = nn.Linear(heads * head_dim, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x (b, S, d) -> (b, S, d)."""
        batch, length, _ = x.shape
        angles = rotary_angles(length, self.head_dim, self.rope_theta, x.device)
        q = rotate(self.wq(x).view(batch, length, self.heads, self.head_dim).transpose(1, 2), angles)
        k = rotate(self.wk(x).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2), angles)
        v = self.wv(x).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.kv_heads != self.heads)
        return self.wo(out.transpose(1, 2).reshape(batch, length, self.heads * self.head_dim))
