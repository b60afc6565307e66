"""Clipping by the true global norm: every element of every gradient counts once, wherever it lives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_ has it, so that one device is clipped the same


def local_tensor(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def clip_gradients(
    parameters: Mapping[str, nn.Parameter],
    counted_elsewhere: frozenset[str],
    groups: Sequence[dist.ProcessGroup],
    largest: float,
) -> float:
    """Scale all gradients so that their global norm is at most `largest`.

    Args:
        parameters: this rank's, by name.
        counted_elsewhere: names whose gradient another rank of `groups` also holds and counts.
        groups: axes over which the counted gradients are disjoint (tp, pp, and dp where parameters are sharded).
        largest: 0 switches clipping off.

    Returns:
        The norm before clipping.
    """
    grads = [(name, local_tensor(p.grad)) for name, p in parameters.items() if p.grad is not None]
    counted = [grad.double().square().sum() for name, grad in grads if name not in counted_elsewhere]
    device = grads[0][1].device if grads else torch.device("cpu")
    total = torch.stack(counted).sum() if counted else torch.zeros((), dtype=torch.float64, device=device)
    for group in groups:
        dist.all_reduce(total, group=group)
    norm = total.sqrt().item()
    if largest and norm + _EPSILON > largest:
        torch._foreach_mul_([grad for _, grad in grads], largest / (norm + _EPSILON))
    return norm
