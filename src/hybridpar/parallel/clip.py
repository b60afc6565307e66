"""Clipping by the true global norm: every element of every gradient counts once, wherever it lives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_ has it, so that one device is clipped the same


def local_tensor(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True)
class Disjoint:
    """Gradients that this rank counts, and the groups over which others hold other parts of the same tensors."""

    gradients: Sequence[Tensor]
    groups: Sequence[dist.ProcessGroup]


@torch.no_grad()
def global_norm(kinds: Sequence[Disjoint], groups: Sequence[dist.ProcessGroup], device: torch.device) -> float:
    """Norm over everything.

    Args:
        kinds: gradients by how they lie over data replicas.
        groups: axes over which all kinds are disjoint (tp, pp).
        device: where sums are made.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for kind in kinds:
        squares = [local_tensor(grad).double().square().sum() for grad in kind.gradients]
        part = torch.stack(squares).sum().to(device) if squares else torch.zeros_like(total)
        for group in kind.groups:
            dist.all_reduce(part, group=group)
        total += part
    for group in groups:
        dist.all_reduce(total, group=group)
    return total.sqrt().item()


@torch.no_grad()
def scale_to_norm(gradients: Sequence[Tensor], norm: float, largest: float) -> None:
    """Scale all gradients, whose global norm is `norm`, so that it is at most `largest` (0: as they are); in place."""
    if largest and norm + _EPSILON > largest and gradients:
        torch._foreach_mul_([local_tensor(grad) for grad in gradients], largest / (norm + _EPSILON))
