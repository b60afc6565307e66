"""A process group that sees everything that passes through it, whoever sends: DDP, FSDP2, pipelines, DeepSpeed.

It is registered as a backend of torch.distributed and hands every call to gloo (or NCCL). Of each call it keeps the
operation, the axes of the group, logical and wire bytes, and times:

    seconds   from the call to its completion, as far as somebody waited for it
    exposed   the part of that during which the caller did nothing but wait

A caller that waits inside C++ (DDP's reducer waits on futures) is not seen waiting; there, exposed is the time from
the last such call of a step to the last completion, since nothing is left to compute after the last bucket.

gloo's own reduce-scatter sends what an all-reduce sends, so here it is an all-to-all of the chunks and a local sum,
which sends what the ring sends.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
    Store,
    Work,
)

from hybridpar.comm.wire import wire_bytes
from hybridpar.mesh import AXES, RankGrid


@dataclass(frozen=True)
class CommRow:
    """All calls of one operation over one kind of group, on this rank. Sizes in bytes, times in seconds."""

    op: str
    group: str
    group_size: int
    calls: int
    bytes: int
    wire_bytes: int
    seconds: float
    exposed_seconds: float


@dataclass
class _Call:
    op: str
    group: str
    ranks: int
    size: int
    start: float
    end: float | None = None
    exposed: float | None = None

    def completed(self) -> None:
        self.end = self.end or time.perf_counter()


@dataclass
class Meter:
    """Collects calls of all metered groups of this process until they are drained."""

    _calls: list[_Call] = field(default_factory=list)
    _paused: int = 0
    _grid: RankGrid | None = None
    _rank: int = 0
    _labels: dict[tuple[int, ...], str] = field(default_factory=dict)

    def place(self, grid: RankGrid, rank: int) -> None:
        """Tell the meter where it stands, so that groups get the names of axes."""
        self._grid, self._rank = grid, rank
        self._labels.clear()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out traffic that is no part of the strategy (loss logging, gathering for checks)."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def begin(self, op: str, ranks: tuple[int, ...], size: int) -> _Call | None:
        """A call starts; None while paused, and in groups of one rank, where nothing is sent."""
        if self._paused or len(ranks) < 2:
            return None
        call = _Call(op, self._label(ranks), len(ranks), size, time.perf_counter())
        self._calls.append(call)
        return call

    def drain(self) -> list[CommRow]:
        """Rows of the calls since the last drain, and forget them."""
        calls, self._calls = self._calls, []
        kinds: dict[tuple[str, str, int], list[_Call]] = defaultdict(list)
        for call in calls:
            kinds[call.op, call.group, call.ranks].append(call)
        return [_row(*kind, members) for kind, members in sorted(kinds.items())]

    def _label(self, ranks: tuple[int, ...]) -> str:
        if ranks not in self._labels:
            self._labels[ranks] = axis_label(self._grid, self._rank, ranks)
        return self._labels[ranks]


def axis_label(grid: RankGrid | None, rank: int, ranks: tuple[int, ...]) -> str:
    """The fewest axes whose group around `rank` is `ranks`, e.g. "tp" or "dp+tp"; "world" without a grid."""
    if grid is None:
        return "world"
    wide = [axis for axis in AXES if getattr(grid, axis) > 1]
    subsets = sorted(range(1, 1 << len(wide)), key=int.bit_count)
    for subset in subsets:
        axes = [axis for i, axis in enumerate(wide) if subset >> i & 1]
        if grid.group_of(rank, *axes) == tuple(sorted(ranks)):
            return "+".join(axes)
    return "other"


def _row(op: str, group: str, ranks: int, calls: Sequence[_Call]) -> CommRow:
    return CommRow(
        op=op,
        group=group,
        group_size=ranks,
        calls=len(calls),
        bytes=sum(call.size for call in calls),
        wire_bytes=sum(wire_bytes(op, ranks, call.size) for call in calls),
        seconds=sum(call.end - call.start for call in calls if call.end is not None),
        exposed_seconds=sum(call.exposed for call in calls if call.exposed is not None) + _exposed_unseen(calls),
    )


def _exposed_unseen(calls: Sequence[_Call]) -> float:
    """Exposed time of calls that nobody was seen waiting for: from the last of them to the last completion."""
    unseen = [call for call in calls if call.exposed is None and call.end is not None]
    if not unseen:
        return 0.0
    return max(0.0, max(call.end for call in unseen if call.end) - max(call.start for call in unseen))


_METER = Meter()


def meter() -> Meter:
    """The meter of this process."""
    return _METER


class _MeteredWork(Work):
    """The work of the inner group, with its times taken, and a last local step (`finish`) before it is complete."""

    def __init__(self, inner: Work, call: _Call | None, finish: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._inner, self._call, self._finish = inner, call, finish
        self._future: Any = None
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        start = time.perf_counter()
        done = self._inner.wait() if timeout == timedelta(0) else self._inner.wait(timeout)
        self._complete()
        if self._call is not None:
            self._call.exposed = (self._call.exposed or 0.0) + time.perf_counter() - start
        return done

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._inner.is_completed()

    def is_success(self) -> bool:
        return self._inner.is_success()

    def exception(self) -> Any:
        return self._inner.exception()

    def get_future(self) -> Any:
        if self._future is None:
            self._future = self._inner.get_future().then(self._completed_value)
        return self._future

    def result(self) -> list[Tensor]:
        return self._inner.result()

    def _completed_value(self, future: Any) -> Any:
        self._complete()
        return future.value()

    def _complete(self) -> None:
        with self._lock:
            if self._finish is not None:
                self._finish()
                self._finish = None
            if self._call is not None:
                self._call.completed()


class MeteredGroup(dist.ProcessGroup):
    """Hands every call to `inner` and tells the meter."""

    def __init__(self, inner: Any, rank: int, size: int, *, honest_reduce_scatter: bool) -> None:
        super().__init__(rank, size)
        self._inner = inner
        self._honest = honest_reduce_scatter
        self._ranks: tuple[int, ...] | None = None

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return "metered"

    @property
    def group_name(self) -> str:
        """The name under which torch.distributed registered this group (the base class asks an inner backend)."""
        return str(dist.distributed_c10d._world.pg_names[self])

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        return self._run("all-reduce", tensors, lambda: self._inner.allreduce(tensors, opts or AllreduceOptions()))

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Work:
        options = opts or AllreduceCoalescedOptions()
        return self._run("all-reduce", tensors, lambda: self._inner.allreduce_coalesced(tensors, options))

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Work:
        return self._run("broadcast", tensors, lambda: self._inner.broadcast(tensors, opts or BroadcastOptions()))

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        return self._run("reduce", tensors, lambda: self._inner.reduce(tensors, opts or ReduceOptions()))

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:
        options = opts or AllgatherOptions()
        return self._run("all-gather", outputs[0], lambda: self._inner.allgather(outputs, inputs, options))

    def all_gather_single(self, output: Tensor, input_: Tensor, opts: Any = None) -> Work:
        options = opts or AllgatherOptions()
        return self._run("all-gather", [output], lambda: self._inner._allgather_base(output, input_, options))

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        return _Together([self.all_gather_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)])

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Work:
        options = opts or ReduceScatterOptions()
        if not self._honest:
            return self._run("reduce-scatter", inputs[0], lambda: self._inner.reduce_scatter(outputs, inputs, options))
        sizes = {part.numel() for part in inputs[0]}
        if len(sizes) > 1:
            return self._run("reduce-scatter", inputs[0], lambda: self._inner.reduce_scatter(outputs, inputs, options))
        return self.reduce_scatter_single(outputs[0], torch.cat([part.reshape(-1) for part in inputs[0]]), options)

    def reduce_scatter_single(self, output: Tensor, input_: Tensor, opts: Any = None) -> Work:
        options = opts or ReduceScatterOptions()
        operation = options.reduceOp
        if not self._honest or operation not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            return self._run(
                "reduce-scatter", [input_], lambda: self._inner._reduce_scatter_base(output, input_, options)
            )
        chunks = input_.contiguous().view(-1)
        received = torch.empty_like(chunks)
        ranks = self.size()

        def sum_chunks() -> None:
            total = received.view(ranks, -1).sum(0)
            output.copy_((total / ranks if operation == dist.ReduceOp.AVG else total).view_as(output))

        return self._run(
            "reduce-scatter",
            [input_],
            lambda: self._inner.alltoall_base(received, chunks, [], [], AllToAllOptions()),
            sum_chunks,
        )

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        return _Together([self.reduce_scatter_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)])

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def all_to_all_single(
        self, output: Tensor, input_: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> Work:
        options = opts or AllToAllOptions()
        return self._run(
            "all-to-all",
            [input_],
            lambda: self._inner.alltoall_base(output, input_, output_splits, input_splits, options),
        )

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        """As one all-to-all of concatenated tensors: gloo has no other."""
        sent = torch.cat([part.reshape(-1) for part in inputs])
        received = sent.new_empty(sum(part.numel() for part in outputs))
        output_splits, input_splits = [part.numel() for part in outputs], [part.numel() for part in inputs]

        def unpack() -> None:
            for part, values in zip(outputs, received.split(output_splits), strict=True):
                part.copy_(values.view_as(part))

        return self._run(
            "all-to-all",
            [sent],
            lambda: self._inner.alltoall_base(received, sent, output_splits, input_splits, AllToAllOptions()),
            unpack,
        )

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:
        return self._run(
            "gather", inputs * self.size(), lambda: self._inner.gather(outputs, inputs, opts or GatherOptions())
        )

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Work:
        return self._run(
            "scatter", outputs * self.size(), lambda: self._inner.scatter(outputs, inputs, opts or ScatterOptions())
        )

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> Work:
        return self._run("send", tensors, lambda: self._inner.send(tensors, dst, tag))

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> Work:
        return self._run("recv", tensors, lambda: self._inner.recv(tensors, src, tag))

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Work:
        return self._run("recv", tensors, lambda: self._inner.recv_anysource(tensors, tag))

    def barrier(self, opts: Any = None) -> Work:
        return self._run("barrier", [], lambda: self._inner.barrier(opts or BarrierOptions()))

    def _run(
        self, op: str, tensors: Sequence[Tensor], start: Callable[[], Work], finish: Callable[[], None] | None = None
    ) -> Work:
        if self._ranks is None:
            self._ranks = tuple(dist.get_process_group_ranks(self))
        call = meter().begin(op, self._ranks, sum(t.numel() * t.element_size() for t in tensors))
        return _MeteredWork(start(), call, finish)


class _Together(Work):
    """Several works as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        done = [work.wait(timeout) for work in self._works]  # all of them, whatever the first says
        return all(done)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> Any:
        return torch.futures.collect_all([work.get_future() for work in self._works])


def _metered_gloo(store: Store, rank: int, size: int, timeout: timedelta) -> MeteredGroup:
    return MeteredGroup(dist.ProcessGroupGloo(store, rank, size, timeout), rank, size, honest_reduce_scatter=True)


def _metered_nccl(store: Store, rank: int, size: int, timeout: timedelta) -> MeteredGroup:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return MeteredGroup(dist.ProcessGroupNCCL(store, rank, size, options), rank, size, honest_reduce_scatter=False)


GLOO, NCCL = "metered-gloo", "metered-nccl"


def register() -> None:
    """Make the metered backends known to torch.distributed; once is enough."""
    if not hasattr(dist.Backend, GLOO.upper()):
        dist.Backend.register_backend(GLOO, _metered_gloo, devices=["cpu"])
        dist.Backend.register_backend(NCCL, _metered_nccl, devices=["cuda"])
