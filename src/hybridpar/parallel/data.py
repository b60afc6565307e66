"""Data parallelism with whole replicas: torch DDP, its gradient all-reduce overlapped with the backward or not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hybridpar.parallel.collectives import sum_in_place


def replicate(module: nn.Module, group: dist.ProcessGroup, ignored: Sequence[str]) -> DistributedDataParallel:
    """DDP over `group`; gradients are means over its ranks, but for those of the parameters `ignored`.

    In its second step DDP broadcasts the order in which gradients came, and lays its buckets out anew.
    """
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, list(ignored))
    # init_sync: every rank drew the same parameters already.
    return DistributedDataParallel(module, process_group=group, init_sync=False, gradient_as_bucket_view=True)


def average_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """One all-reduce of all gradients after the backward: data parallelism without overlap."""
    grads = [p.grad for p in parameters if p.grad is not None]
    if grads:
        sum_in_place(grads, group, divide_by=group.size())


@contextlib.contextmanager
def local_gradients(module: nn.Module, *, local: bool) -> Iterator[None]:
    """Keep DDP from communicating while `local` (all micro-batches but the last)."""
    if local and isinstance(module, DistributedDataParallel):
        with module.no_sync():
            yield
        return
    yield
