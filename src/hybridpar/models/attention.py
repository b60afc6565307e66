"""Causal grouped-query attention with rotary positions.

Symbols: b batch, S tokens, d hidden, H query heads, K key/value heads, h head_dim.
Sources: GQA, Ainslie et al. 2023, arXiv 2305.13245; RoPE, Su et al. 2021, arXiv 2104.09864, eq. 34, with the
pairing (i, i + h/2) that public Llama checkpoints use.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from hybridpar.models.cache import KeyValueCache

Core = Callable[[Tensor, Tensor, Tensor], Tensor]


def rotary_angles(positions: Tensor, head_dim: int, theta: float) -> Tensor:
    """Angles m * theta^(-2i/h) of the positions m (S,), as (S, h/2), in float32 as in Llama."""
    exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    return torch.outer(positions.to(torch.float32), theta**-exponent)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate pairs (i, i + h/2) of x (b, heads, S, h) by angles (S, h/2)."""
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    swapped = torch.cat((second, first), dim=-1)
    return torch.addcmul(x * torch.cat((cos, cos), dim=-1), swapped, torch.cat((-sin, sin), dim=-1))


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(h) + causal mask) v: q (b, H, S, h), k and v (b, K, S, h) -> (b, H, S, h)."""
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] != q.shape[1])


def successive_positions(first: int, length: int, device: torch.device) -> Tensor:
    """Positions first..first+length-1 of tokens that follow one another."""
    return torch.arange(first, first + length, device=device)


class Attention(nn.Module):
    """W_o softmax(q k^T / sqrt(h) + causal mask) v, with H/K query heads sharing each key/value head.

    `core` (what mixes tokens) and `positions` (where the tokens of an input stand) are attributes, because the
    tokens of one sequence may lie in several places.
    """

    def __init__(self, hidden: int, heads: int, kv_heads: int, head_dim: int, rope_theta: float) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim, self.rope_theta = heads, kv_heads, head_dim, rope_theta
        self.wq = nn.Linear(hidden, heads * head_dim, bias=False)
        self.wk = nn.Linear(hidden, kv_heads * head_dim, bias=False)
        self.wv = nn.Linear(hidden, kv_heads * head_dim, bias=False)
        self.wo = nn.Linear(heads * head_dim, hidden, bias=False)
        self.core: Core = causal_attention
        self.positions: Callable[[int, int, torch.device], Tensor] = successive_positions

    def forward(self, x: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """x (b, S, d) -> (b, S, d); with a cache x follows the tokens in it, and joins them."""
        batch, length, _ = x.shape
        seen = 0 if cache is None else cache.length
        angles = rotary_angles(self.positions(seen, length, x.device), self.head_dim, self.rope_theta)
        q = rotate(self.wq(x).view(batch, length, self.heads, self.head_dim).transpose(1, 2), angles)
        k = rotate(self.wk(x).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2), angles)
        v = self.wv(x).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        out = self.core(q, k, v) if cache is None else cache.attend(q, k, v, self.core)
        return self.wo(out.transpose(1, 2).reshape(batch, length, self.heads * self.head_dim))
