"""Collectives with gradients, on plain tensors: the f and g of Megatron-LM and their sequence-parallel kin.

Sources: Shoeybi et al. 2019, arXiv 1909.08053, section 3 (f: identity forward, all-reduce backward; g: its
conjugate); Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2 (all-gather and reduce-scatter along the
sequence). Symbols: b batch, S tokens, t ranks of the group. The sequence is dim 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass
class PendingSum:
    """Tensors on their way to being replaced by their sums over a group; one all-reduce for all of them."""

    _tensors: Sequence[Tensor]
    _flat: Tensor
    _work: dist.Work | None

    @classmethod
    @torch.no_grad()
    def start(cls, tensors: Sequence[Tensor], group: dist.ProcessGroup) -> PendingSum:
        """Send them off."""
        flat = _flatten_dense_tensors(tensors)
        return cls(tensors, flat, dist.all_reduce(flat, group=group, async_op=True))

    @torch.no_grad()
    def finish(self, *, divide_by: int = 1) -> None:
        """Wait, and put the sums (over `divide_by`) where the tensors were."""
        if self._work is not None:
            self._work.wait()
        self._flat.div_(divide_by)
        for tensor, total in zip(self._tensors, _unflatten_dense_tensors(self._flat, self._tensors), strict=True):
            tensor.copy_(total)


def sum_in_place(tensors: Sequence[Tensor], group: dist.ProcessGroup, *, divide_by: int = 1) -> None:
    """Replace each tensor by its sum over the group, divided; one all-reduce for all of them."""
    PendingSum.start(tensors, group).finish(divide_by=divide_by)


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


def gathered_without_gradient(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """x of each rank, (n, ...)."""
    everywhere = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
    dist.all_gather_into_tensor(everywhere, x.contiguous(), group=group)
    return everywhere.view(group.size(), *x.shape)


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return gathered_without_gradient(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].new_empty(grads[0].shape[1:])
        dist.reduce_scatter_tensor(total, grads[0].contiguous().flatten(0, 1), group=ctx.group)
        return total, None


def gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """x of each rank, (n, ...); every rank's use of it counts in the gradient."""
    return _Gather.apply(x, group)


class _Exchange(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: dist.ProcessGroup, sent: Sequence[int] | None, received: Sequence[int] | None
    ) -> Tensor:
        ctx.group, ctx.sent, ctx.received = group, sent, received
        return _all_to_all(x, group, sent, received)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(grads[0], ctx.group, ctx.received, ctx.sent), None, None, None


def _all_to_all(
    x: Tensor, group: dist.ProcessGroup, sent: Sequence[int] | None, received: Sequence[int] | None
) -> Tensor:
    rows = x.shape[0] if received is None else sum(received)
    out = x.new_empty((rows, *x.shape[1:]))
    arriving, leaving = (None if sizes is None else list(sizes) for sizes in (received, sent))
    dist.all_to_all_single(out, x.contiguous(), arriving, leaving, group=group)
    return out


def exchanged(
    x: Tensor, group: dist.ProcessGroup, sent: Sequence[int] | None = None, received: Sequence[int] | None = None
) -> Tensor:
    """All-to-all along dim 0: the first `sent[0]` rows go to rank 0; `received[i]` rows come from rank i. Left out,
    both are even, and x is (n * rows, ...)."""
    return _Exchange.apply(x, group, sent, received)


class _Mean(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return all_reduced(x, group) / group.size()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def mean_of_contributions(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The mean of x over the group, in a loss that every rank computes and whose gradients are averaged over the
    group: x then gets the whole gradient, as the average brings in the 1/n."""
    return _Mean.apply(x, group)


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
