"""Residual blocks: attention with an MLP (A) or with experts (E), or a Mamba-2 mixer (M)."""

from __future__ import annotations

from torch import Tensor, nn

from hybridpar.models.attention import Attention
from hybridpar.models.cache import KeyValueCache, LayerCache, StateCache
from hybridpar.models.mamba2 import Mamba2
from hybridpar.models.mlp import SwiGLU
from hybridpar.models.moe import MoE
from hybridpar.models.norm import RMSNorm
from hybridpar.specs import ModelSpec


class AttentionBlock(nn.Module):
    """x + attention(norm1(x)), then x + mlp(norm2(x))."""

    def __init__(self, model: ModelSpec, mlp: nn.Module) -> None:
        super().__init__()
        self.norm1 = RMSNorm(model.hidden, model.norm_eps)
        self.attention = Attention(model.hidden, model.heads, model.kv_heads, model.head_dim, model.rope_theta)
        self.norm2 = RMSNorm(model.hidden, model.norm_eps)
        self.mlp = mlp

    def forward(self, x: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """x (b, S, d) -> (b, S, d)."""
        x = x + self.attention(self.norm1(x), cache)
        return x + self.mlp(self.norm2(x))

    def new_cache(self, capacity: int) -> LayerCache:
        """An empty cache for up to `capacity` tokens."""
        return KeyValueCache(capacity)


class MambaBlock(nn.Module):
    """x + mamba(norm(x))."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.norm = RMSNorm(model.hidden, model.norm_eps)
        self.mamba = Mamba2(
            model.hidden,
            model.ssm_heads,
            model.ssm_head_dim,
            model.ssm_groups,
            model.ssm_state,
            model.ssm_conv,
            model.ssm_chunk,
            model.norm_eps,
        )

    def forward(self, x: Tensor, cache: StateCache | None = None) -> Tensor:
        """x (b, S, d) -> (b, S, d)."""
        return x + self.mamba(self.norm(x), cache)

    def new_cache(self, capacity: int) -> LayerCache:
        """An empty cache; its size does not depend on `capacity`."""
        return StateCache(self.mamba.conv_x.weight.shape[-1])


def build_block(kind: str, model: ModelSpec) -> nn.Module:
    """The block of one letter of `model.layer_kinds`."""
    if kind == "M":
        return MambaBlock(model)
    return AttentionBlock(model, MoE(model) if kind == "E" else SwiGLU(model.hidden, model.ffn_hidden))
