"""Data parallelism with whole replicas: torch DDP, its gradient all-reduce overlapped with the backward or not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn.parallel import DistributedDataParallel


def replicate(module: nn.Module, group: dist.ProcessGroup) -> DistributedDataParallel:
    """DDP over `group`; gradients are means over its ranks."""
    # init_sync: every rank drew the same parameters already.
    return DistributedDataParallel(module, process_group=group, init_sync=False, gradient_as_bucket_view=True)


@torch.no_grad()
def average_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """One all-reduce of all gradients after the backward: data parallelism without overlap."""
    grads = [p.grad for p in parameters if p.grad is not None]
    flat = _flatten_dense_tensors(grads)
    dist.all_reduce(flat, group=group)
    flat /= group.size()
    for grad, mean in zip(grads, _unflatten_dense_tensors(flat, grads), strict=True):
        grad.copy_(mean)


@contextlib.contextmanager
def local_gradients(module: nn.Module, *, local: bool) -> Iterator[None]:
    """Keep DDP from communicating while `local` (all micro-batches but the last)."""
    if local and isinstance(module, DistributedDataParallel):
        with module.no_sync():
            yield
        return
    yield
