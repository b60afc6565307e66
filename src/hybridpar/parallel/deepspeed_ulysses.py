"""Ulysses by DeepSpeed: tokens of a sequence lie on several ranks, and attention exchanges them for heads.

Source: Jacobs et al. 2023, arXiv 2309.14509. Every rank takes the mean of the loss over its own tokens. What DeepSpeed
then makes of the gradients of the ranks differs by ZeRO stage: see `loss_scale`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType

import torch
import torch.distributed as dist
from deepspeed.sequence.layer import DistributedAttention
from torch import Tensor, nn

from hybridpar.models.attention import Attention, causal_attention
from hybridpar.models.lm import LanguageModel

_BATCH, _TOKENS, _HEADS = 0, 1, 2  # how DeepSpeed's exchange has its dims


class _Local(nn.Module):
    """Causal attention between two exchanges: (b, S, H/cp, h) and (b, S, K/cp, h) twice -> (b, S, H/cp, h)."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return causal_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)


def split_sequences(lm: LanguageModel, group: dist.ProcessGroup) -> None:
    """Let attention of `lm` cross the ranks of `group`, each of which holds the next S/cp tokens; in place."""
    for module in lm.modules():
        if isinstance(module, Attention):
            exchange = DistributedAttention(_Local(), group, scatter_idx=_HEADS, gather_idx=_TOKENS)
            module.core = partial(_cross, exchange)
            module.positions = _positions_after(dist.get_rank(group))


def sequence_groups(cp: int) -> ModuleType:
    """DeepSpeed's groups of cp neighbours, and of all ranks, over which gradients are averaged. Collective.

    DeepSpeed can also be given the degrees (`mesh_param`, or `sequence_parallel_size` in its configuration); at ZeRO-0
    to 2 it then averages gradients over the replicas alone.
    """
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    parallel_state_sp.initialize_sequence_parallel(cp)
    return parallel_state_sp


def _cross(exchange: DistributedAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q (b, H, S/cp, h), k and v (b, K, S/cp, h) -> (b, H, S/cp, h)."""
    swapped = (t.transpose(1, 2).contiguous() for t in (q, k, v))
    return exchange(*swapped, _BATCH).transpose(1, 2)


def _positions_after(rank: int) -> Callable[[int, int, torch.device], Tensor]:
    def positions(first: int, length: int, device: torch.device) -> Tensor:
        return torch.arange(rank * length + first, rank * length + first + length, device=device)

    return positions


def loss_scale(zero: int, cp: int) -> float:
    """What the mean over a rank's own tokens is multiplied with before its backward pass.

    At ZeRO-0 to 2 DeepSpeed divides the sum of gradients over all dp*cp ranks by dp, so that cp ranks add up; the
    scattering reduction of ZeRO-3 divides by dp*cp.
    """
    return 1.0 if zero == 3 else 1.0 / cp
