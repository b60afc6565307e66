"""A world in which one rank runs the real engine and nobody else exists.

Tensors are fake (shapes without numbers), collectives return at once. Four things cannot be so, and are replaced while
a trace lasts, each by what does the same as far as sizes go:

    numbers read from the device   are one: the norm, the loss, AdamW's count of steps
    what a router decides          an even load: every expert gets R/E of R choices, the first R mod E one more
    DDP, whose reducer is C++      the same buckets, each reduced once its last gradient is there
    the vote before a pipeline's first step, whether all shapes are known: they are, and no later step has it
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining._utils import InferenceMode
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.nn.parallel import DistributedDataParallel

from hybridpar.comm.metered import meter
from hybridpar.comm.process_group import ProcessMesh, start_alone
from hybridpar.models import moe
from hybridpar.parallel import apply, experts
from hybridpar.specs import Strategy
from hybridpar.theory.routing import even_load
from hybridpar.theory.traffic import ddp_buckets


@contextlib.contextmanager
def alone(strategy: Strategy, rank: int) -> Iterator[ProcessMesh]:
    """Be `rank` of the strategy's grid; tensors made inside are fake."""
    start_alone(rank, strategy.devices)
    try:
        mesh = ProcessMesh.build(strategy)
        meter().drain()
        with FakeTensorMode(allow_non_fake_inputs=True), _replaced():
            yield mesh
    finally:
        meter().drain()
        dist.destroy_process_group()


@contextlib.contextmanager
def _replaced() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(moe, "tally", _even_load))
        stack.enter_context(mock.patch.object(experts, "read_counts", _as_sent))
        stack.enter_context(mock.patch.object(apply, "replicate", BucketedReplica))
        stack.enter_context(mock.patch.object(_PipelineSchedule, "_warmup_p2p", _agreed))
        yield


def _even_load(expert: Tensor, number: int) -> list[int]:
    return even_load(expert.numel(), number)


def _as_sent(arriving: Tensor, counts: Sequence[int], owned: Sequence[int], rank: int) -> list[list[int]]:
    """Every rank sends to this one's experts what this one sends them itself."""
    first = sum(owned[:rank])
    return [list(counts[first : first + owned[rank]])] * len(owned)


def _agreed(_schedule: _PipelineSchedule, stages: Sequence[Any], *_: Any) -> None:
    """The vote of a pipeline's ranks, before their first step, on whether all were told their shapes: they were."""
    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC


class BucketedReplica(DistributedDataParallel):
    """DistributedDataParallel as far as sizes and order go; see `hybridpar.parallel.data.replicate`.

    Gradients are summed over micro-batches in their places in a bucket; in the last backward pass a bucket that is full
    is reduced.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, ignored: Sequence[str]) -> None:
        nn.Module.__init__(self)
        self.module, self._group = module, group
        self.reducer: Any = _NoReducer()
        averaged = [p for name, p in module.named_parameters() if name not in set(ignored)][::-1]
        self._buckets = [_Bucket.of(bucket) for bucket in _filled(averaged)]
        for bucket in self._buckets:
            for view, parameter in zip(bucket.views, bucket.parameters, strict=True):
                parameter.grad = view  # as after a first step
                parameter.register_post_accumulate_grad_hook(partial(self._arrived, bucket))
        self._syncs = True

    def forward(self, x: Tensor) -> Tensor:
        """What the module does."""
        return self.module(x)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """See DistributedDataParallel."""
        self._syncs = False
        try:
            yield
        finally:
            self._syncs = True

    @torch.no_grad()
    def _arrived(self, bucket: _Bucket, _: Tensor) -> None:
        if not self._syncs:
            return
        bucket.waiting -= 1
        if not bucket.waiting:
            bucket.work = dist.all_reduce(bucket.flat, group=self._group, async_op=True)
        if not any(other.waiting for other in self._buckets):
            for other in self._buckets:
                other.finish(self._group.size())


class _NoReducer:
    def prepare_for_backward(self, _outputs: Any) -> None:
        """Pipelines tell it of the last backward pass, which hooks see for themselves."""


@dataclass
class _Bucket:
    parameters: Sequence[nn.Parameter]
    flat: Tensor
    views: Sequence[Tensor]
    waiting: int
    work: dist.Work | None = None

    @classmethod
    def of(cls, parameters: Sequence[nn.Parameter]) -> _Bucket:
        flat = parameters[0].new_zeros(sum(p.numel() for p in parameters))
        parts = flat.split([p.numel() for p in parameters])
        views = [part.view_as(p) for part, p in zip(parts, parameters, strict=True)]
        return cls(parameters, flat, views, len(parameters))

    def finish(self, ranks: int) -> None:
        if self.work is not None:
            self.work.wait()
        self.flat.div_(ranks)
        self.waiting = len(self.parameters)


def _filled(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    remaining, found = iter(parameters), []
    for size in ddp_buckets([_bytes(p) for p in parameters]):
        bucket: list[nn.Parameter] = []
        while sum(map(_bytes, bucket)) < size:
            bucket.append(next(remaining))
        found.append(bucket)
    return found


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
