"""A process group that sees everything that passes through it, whoever sends: DDP, FSDP2, pipelines, DeepSpeed.

It is registered as a backend of torch.distributed and hands every call to gloo (or NCCL). Of each call it keeps the
operation, the axes of the group, logical and wire bytes, and times:

    seconds   from the call to its completion (of point-to-point messages: to the end of the wait for them)
    exposed   the part of that during which the caller did nothing but wait

A caller that waits inside C++ (DDP's reducer waits on futures) is not seen waiting; there, exposed is the time from
the last such call of a step to the last completion, since nothing is left to compute after the last bucket.
These are times of the host: of NCCL, whose work goes on after `wait` returns, they tell the launch and not the
transfer, while calls and bytes are as exact as with gloo.

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
from functools import cached_property
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
    FakeProcessGroup,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
    Store,
    Work,
)

from hybridpar.comm.wire import wire_bytes
from hybridpar.mesh import RankGrid


@dataclass(frozen=True)
class CommRow:
    """All calls of one operation over one kind of group, on this rank. Sizes in bytes, times in seconds.

    `group` names the axes on which the ranks of a call differ, `group_size` tells how many take part (two ends of a
    message). `bytes` is the whole tensor: the input of a reduction, the output of a gather. Times are sums over calls,
    and calls may overlap each other.
    """

    op: str
    group: str
    group_size: int
    calls: int
    bytes: int
    wire_bytes: int
    seconds: float
    exposed_seconds: float


Clock = Callable[[], float]


@dataclass
class Call:
    """One call as it happened. `group` and `bytes` as in `CommRow`; `dtype` of the numbers sent; `is_blocking` where
    the caller asked not to go on before the end. Times of the meter's clock: `end` None where nobody learnt it,
    `exposed` the part spent waiting, None where nobody was seen waiting."""

    op: str
    group: str
    group_size: int
    dtype: str
    bytes: int
    is_blocking: bool
    clock: Clock = field(repr=False)
    start: float
    end: float | None = None
    exposed: float | None = None

    def completed(self) -> None:
        """The call is over; told a second time, the first counts."""
        if self.end is None:
            self.end = self.clock()

    def waited(self, seconds: float) -> None:
        """The caller did nothing else for so long."""
        self.exposed = (self.exposed or 0.0) + seconds


@dataclass
class Meter:
    """Collects calls of all metered groups of this process, from any thread, until they are drained."""

    _lock: threading.Lock = field(default_factory=threading.Lock)
    _calls: list[Call] = field(default_factory=list)
    _clock: Clock = time.perf_counter
    _paused: int = 0
    _grid: RankGrid | None = None
    _labels: dict[tuple[int, ...], tuple[str, int]] = field(default_factory=dict)

    def place(self, grid: RankGrid | None) -> None:
        """Tell the meter how ranks are laid out, so that groups get the names of axes; None: nobody knows yet."""
        self._grid = grid
        self._labels.clear()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out traffic that is no part of the strategy (loss logging, gathering for checks)."""
        with self._lock:
            self._paused += 1
        try:
            yield
        finally:
            with self._lock:
                self._paused -= 1

    @contextlib.contextmanager
    def clocked(self, clock: Clock) -> Iterator[None]:
        """Take times from another clock, such as a count of operators where nothing takes its time."""
        before, self._clock = self._clock, clock
        try:
            yield
        finally:
            self._clock = before

    def begin(
        self, op: str, ranks: tuple[int, ...], tensors: Sequence[Tensor], *, is_blocking: bool = False
    ) -> Call | None:
        """A call starts; None while paused, and in groups of one rank, where nothing is sent."""
        if self._paused or len(ranks) < 2:
            return None
        dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
        with self._lock:
            label, size = self._labelled(ranks)
            call = Call(op, label, size, dtype, _size(tensors), is_blocking, self._clock, self._clock())
            self._calls.append(call)
        return call

    def drain_calls(self) -> list[Call]:
        """The calls since the last drain, in order, and forget them."""
        with self._lock:
            calls, self._calls = self._calls, []
        return calls

    def drain(self) -> list[CommRow]:
        """The same, summed by operation and group."""
        return summed(self.drain_calls())

    def _labelled(self, ranks: tuple[int, ...]) -> tuple[str, int]:
        if ranks not in self._labels:
            self._labels[ranks] = ("world" if self._grid is None else self._grid.label(ranks), len(ranks))
        return self._labels[ranks]


def summed(calls: Sequence[Call]) -> list[CommRow]:
    """One row for each operation and kind of group, sorted."""
    kinds: dict[tuple[str, str, int], list[Call]] = defaultdict(list)
    for call in calls:
        kinds[call.op, call.group, call.group_size].append(call)
    return [_row(*kind, members) for kind, members in sorted(kinds.items())]


def _row(op: str, group: str, ranks: int, calls: Sequence[Call]) -> CommRow:
    return CommRow(
        op=op,
        group=group,
        group_size=ranks,
        calls=len(calls),
        bytes=sum(call.bytes for call in calls),
        wire_bytes=sum(wire_bytes(op, ranks, call.bytes) for call in calls),
        seconds=sum(call.end - call.start for call in calls if call.end is not None),
        exposed_seconds=sum(call.exposed for call in calls if call.exposed is not None) + _exposed_unseen(calls),
    )


def _exposed_unseen(calls: Sequence[Call]) -> float:
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

    def __init__(self, inner: Work, call: Call | None, finish: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._inner, self._call, self._finish = inner, call, finish
        self._future: Any = None
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        start = self._call.clock() if self._call is not None else 0.0
        done = self._inner.wait() if timeout == timedelta(0) else self._inner.wait(timeout)
        self._complete()
        if self._call is not None:
            self._call.waited(self._call.clock() - start)
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

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return "metered"

    @property
    def group_name(self) -> str:
        """The name under which torch.distributed registered this group (the base class asks an inner backend)."""
        return str(dist.distributed_c10d._world.pg_names[self])

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        options = opts or AllreduceOptions()
        return self._run("all_reduce", tensors, options, lambda: self._inner.allreduce(tensors, options))

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Work:
        options = opts or AllreduceCoalescedOptions()
        return self._run("all_reduce", tensors, options, lambda: self._inner.allreduce_coalesced(tensors, options))

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Work:
        options = opts or BroadcastOptions()
        return self._run("broadcast", tensors, options, lambda: self._inner.broadcast(tensors, options))

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        options = opts or ReduceOptions()
        return self._run("reduce", tensors, options, lambda: self._inner.reduce(tensors, options))

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:
        options = opts or AllgatherOptions()
        return self._run("all_gather", outputs[0], options, lambda: self._inner.allgather(outputs, inputs, options))

    def all_gather_single(self, output: Tensor, input_: Tensor, opts: Any = None) -> Work:
        options = opts or AllgatherOptions()
        return self._run("all_gather", [output], options, lambda: self._inner._allgather_base(output, input_, options))

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        return _Together([self.all_gather_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)])

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Work:
        options = opts or ReduceScatterOptions()
        if self._honest:
            chunks = torch.cat([part.reshape(-1) for part in inputs[0]])
            return self._scattered_sum(outputs[0], chunks, [part.numel() for part in inputs[0]], options)
        return self._run(
            "reduce_scatter", inputs[0], options, lambda: self._inner.reduce_scatter(outputs, inputs, options)
        )

    def reduce_scatter_single(self, output: Tensor, input_: Tensor, opts: Any = None) -> Work:
        options = opts or ReduceScatterOptions()
        if self._honest:
            chunks = input_.contiguous().view(-1)
            return self._scattered_sum(output, chunks, [output.numel()] * self.size(), options)
        return self._run(
            "reduce_scatter", [input_], options, lambda: self._inner._reduce_scatter_base(output, input_, options)
        )

    _reduce_scatter_base = reduce_scatter_single

    def _scattered_sum(self, output: Tensor, chunks: Tensor, sizes: list[int], options: Any) -> Work:
        """Send chunk r (`sizes[r]` elements, equal on all ranks) to rank r, and reduce what arrives into `output`."""
        ranks, own = self.size(), output.numel()
        received = chunks.new_empty(ranks * own)
        reduce = _reduction(options.reduceOp)

        def reduce_received() -> None:
            output.copy_(reduce(received.view(ranks, own)).view_as(output))

        return self._run(
            "reduce_scatter",
            [chunks],
            options,
            lambda: self._inner.alltoall_base(received, chunks, [own] * ranks, sizes, AllToAllOptions()),
            reduce_received,
        )

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        return _Together([self.reduce_scatter_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)])

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def all_to_all_single(
        self, output: Tensor, input_: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> Work:
        options = opts or AllToAllOptions()
        return self._run(
            "all_to_all",
            [input_],
            options,
            lambda: self._inner.alltoall_base(output, input_, output_splits, input_splits, options),
        )

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        """As one all-to-all of concatenated tensors: gloo has no other."""
        options = opts or AllToAllOptions()
        sent = torch.cat([part.reshape(-1) for part in inputs])
        received = sent.new_empty(sum(part.numel() for part in outputs))
        output_splits, input_splits = [part.numel() for part in outputs], [part.numel() for part in inputs]

        def unpack() -> None:
            for part, values in zip(outputs, received.split(output_splits), strict=True):
                part.copy_(values.view_as(part))

        return self._run(
            "all_to_all",
            [sent],
            options,
            lambda: self._inner.alltoall_base(received, sent, output_splits, input_splits, options),
            unpack,
        )

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:
        options, whole = opts or GatherOptions(), inputs * self.size()
        return self._run("gather", whole, options, lambda: self._inner.gather(outputs, inputs, options))

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Work:
        options, whole = opts or ScatterOptions(), outputs * self.size()
        return self._run("scatter", whole, options, lambda: self._inner.scatter(outputs, inputs, options))

    def barrier(self, opts: Any = None) -> Work:
        options = opts or BarrierOptions()
        return self._run("barrier", [], options, lambda: self._inner.barrier(options))

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> Work:
        return self._message("send", tensors, dst, lambda: self._inner.send(tensors, dst, tag))

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> Work:
        return self._message("recv", tensors, src, lambda: self._inner.recv(tensors, src, tag))

    def _run(
        self,
        op: str,
        tensors: Sequence[Tensor],
        options: Any,
        start: Callable[[], Work],
        finish: Callable[[], None] | None = None,
    ) -> Work:
        call = meter().begin(op, self._members, tensors, is_blocking=not getattr(options, "asyncOp", False))
        work = start()
        if call is not None and finish is None and options.asyncOp:  # a caller that waits at once learns the end so
            work.get_future().add_done_callback(lambda _done: call.completed())
        return _MeteredWork(work, call, finish)

    def _message(self, op: str, tensors: Sequence[Tensor], peer: int, start: Callable[[], Work]) -> Work:
        """A message belongs to the axis on which its two ends differ, whatever group it is sent in."""
        ends = (self._members[self.rank()], self._members[peer])
        call = meter().begin(op, ends, tensors)
        return _MeteredWork(start(), call)

    @cached_property
    def _members(self) -> tuple[int, ...]:
        """Global ranks of the group, known once torch.distributed has registered it."""
        return tuple(dist.get_process_group_ranks(self))


def _size(tensors: Sequence[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _reduction(operation: Any) -> Callable[[Tensor], Tensor]:
    """How to reduce dim 0 of (ranks, elements).

    Raises:
        NotImplementedError: for bitwise and scaled reductions.
    """
    if operation == dist.ReduceOp.SUM:
        return lambda received: received.sum(0)
    if operation == dist.ReduceOp.AVG:
        return lambda received: received.sum(0) / len(received)
    if operation == dist.ReduceOp.MAX:
        return lambda received: received.amax(0)
    if operation == dist.ReduceOp.MIN:
        return lambda received: received.amin(0)
    raise NotImplementedError(f"reduce-scatter on CPU reduces by SUM, AVG, MAX or MIN, not {operation}")


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


def _metered_fake(_store: Store, rank: int, size: int, _timeout: timedelta) -> MeteredGroup:
    """Nobody is at the other end: every call is complete at once, and its result is whatever was there."""
    inner = FakeProcessGroup._create_internal(rank, size, FakeProcessGroup.Options())
    return MeteredGroup(inner, rank, size, honest_reduce_scatter=False)


GLOO, NCCL, FAKE = "metered-gloo", "metered-nccl", "metered-fake"


def register() -> None:
    """Make the metered backends known to torch.distributed; once is enough."""
    if not hasattr(dist.Backend, GLOO.upper()):
        dist.Backend.register_backend(GLOO, _metered_gloo, devices=["cpu"])
        dist.Backend.register_backend(NCCL, _metered_nccl, devices=["cuda"])
        dist.Backend.register_backend(FAKE, _metered_fake, devices=["cpu"])
