"""Collectives with gradients, on plain tensors: the f and g of Megatron-LM and their sequence-parallel kin.

Sources: Shoeybi et al. 2019, arXiv 1909.08053, section 3 (f: identity forward, all-reduce backward; g: its
conjugate); Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2 (all-gather and reduce-scatter along the
sequence). Symbols: b batch, S tokens, t ranks of the group. The sequence is dim 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.autograd import Function

SEQUENCE_DIM = 1


def all_reduced(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of x over the group, in a new tensor."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


@torch.no_grad()
def sum_in_place(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Replace each tensor by its sum over the group; one all-reduce for all of them."""
    flat = _flatten_dense_tensors(tensors)
    dist.all_reduce(flat, group=group)
    for tensor, total in zip(tensors, _unflatten_dense_tensors(flat, tensors), strict=True):
        tensor.copy_(total)


def gathered_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(b, S/t, ...) of each rank -> (b, S, ...), in rank order."""
    ranks = group.size()
    parts = x.new_empty((ranks * x.shape[0], *x.shape[1:]))
    dist.all_gather_into_tensor(parts, x.contiguous(), group=group)
    return torch.cat(parts.chunk(ranks), dim=SEQUENCE_DIM)


def scattered_sequence_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(b, S, ...) of each rank -> this rank's (b, S/t, ...) of the sum."""
    parts = torch.cat(x.chunk(group.size(), dim=SEQUENCE_DIM))
    out = parts.new_empty((x.shape[0], *parts.shape[1:]))
    dist.reduce_scatter_tensor(out, parts, group=group)
    return out


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_reduced(grads[0], ctx.group), None


class _Reduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return all_reduced(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _GatherSequence(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return gathered_sequence(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return scattered_sequence_sum(grads[0], ctx.group), None


class _ScatterSequence(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return scattered_sequence_sum(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return gathered_sequence(grads[0], ctx.group), None


class TensorRegion:
    """The two borders of a tensor-parallel region: what enters is whole on every rank, what leaves is a partial sum."""

    def __init__(self, group: dist.ProcessGroup, *, sequence_parallel: bool) -> None:
        self.group = group
        self.sequence_parallel = sequence_parallel

    def enter(self, x: Tensor) -> Tensor:
        """(b, S, d) -> (b, S, d); with sequence parallelism (b, S/t, d) -> (b, S, d)."""
        return (_GatherSequence if self.sequence_parallel else _Copy).apply(x, self.group)

    def leave(self, partial: Tensor) -> Tensor:
        """Sum over the group: (b, S, d) -> (b, S, d); with sequence parallelism -> (b, S/t, d)."""
        return (_ScatterSequence if self.sequence_parallel else _Reduce).apply(partial, self.group)
