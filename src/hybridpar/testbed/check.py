"""What a testbed gives, beside what was asked of it: rates of links and devices, and latencies, over real ranks.

Bandwidths are of one direction of the slowest link involved [bit/s]: all that a rank sends (Patarasuk & Yuan 2009, see
`hybridpar.comm.wire`) over the time of the slowest rank, medians of repeats. Ranks are under their CPU quota meanwhile.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hybridpar.comm import process_group
from hybridpar.comm.metered import meter
from hybridpar.comm.wire import wire_bytes
from hybridpar.launch.forked import fork_ranks, values
from hybridpar.testbed.network import PlainTestbed, ScaledTestbed, Testbed

_DEADLINE_S = 120.0
_REPEATS = 5
_MESSAGE_S = 0.1  # a message is as long as the link needs this long for
_SMALLEST_MESSAGE, _LARGEST_MESSAGE, _UNSHAPED_MESSAGE = 1 << 18, 1 << 26, 1 << 24
_PING_BYTES = 8
_PINGS = 100
_SIDE = 512
_WORK_S = 1.0
_FLOAT_BYTES = 4
_T = TypeVar("_T")


@dataclass(frozen=True)
class Reading:
    """One quantity: `asked` None where nothing was, `measured` the median, and the least and the largest sample."""

    name: str
    unit: str
    asked: float | None
    measured: float
    least: float
    largest: float
    samples: int

    @property
    def ratio(self) -> float | None:
        """Measured over asked."""
        return None if self.asked is None else self.measured / self.asked


@dataclass(frozen=True)
class Check:
    """Readings of one testbed. `load` is the machine's load average of the last minute before the check: other work
    slows the ranks where cores are short."""

    testbed: str
    readings: tuple[Reading, ...]
    load: float
    cores: int


@dataclass(frozen=True)
class _Shape:
    """What the ranks are told: how many, on how many nodes, and what their links should do [bit/s]."""

    nodes: int
    devices_per_node: int
    intra_bit_s: int | None
    inter_bit_s: int | None
    share: float | None

    @property
    def world(self) -> int:
        return self.nodes * self.devices_per_node


_Samples = dict[str, list[float]]


def check_scaled(testbed: ScaledTestbed) -> Check:
    """Measure a testbed that is up; takes some ten seconds.

    Raises:
        RuntimeError: a rank failed.
    """
    plan = testbed.plan
    shape = _Shape(plan.nodes, plan.devices_per_node, plan.intra_bit_s, plan.inter_bit_s, plan.device_share)
    return _check(testbed, shape)


def check_plain(world: int) -> Check:
    """The same of `world` ranks on unshaped loopback, of which nothing is asked.

    Raises:
        ValueError: fewer than two ranks.
        RuntimeError: a rank failed.
    """
    if world < 2:
        raise ValueError(f"world={world} is not legal; legal: 2 or more, so that there is a link")
    return _check(PlainTestbed(), _Shape(1, world, None, None, None))


def core_flops_per_s() -> float:
    """What one core does without a quota [FLOP/s], float32 products, in seconds of its CPU time: other work on the
    machine takes turns with it, but does not make the core slower.

    Raises:
        RuntimeError: the measuring process failed.
    """
    return _on_one_rank(lambda: _products_per_s(_SIDE, _WORK_S, time.process_time)) * 2 * _SIDE**3


def efficiency_by_side(sides: Sequence[int]) -> dict[int, float]:
    """The rate of square products of these sides over the rate at side 512: what small kernels lose.

    Raises:
        ValueError: a side below 1.
        RuntimeError: the measuring process failed.
    """
    for side in sides:
        if side < 1:
            raise ValueError(f"side={side} is not legal; legal: 1 or more")
    rates = _on_one_rank(
        lambda: [_products_per_s(side, _WORK_S / 4, time.process_time) * side**3 for side in (_SIDE, *sides)]
    )
    return dict(zip(sides, (rate / rates[0] for rate in rates[1:]), strict=True))


def _on_one_rank(work: Callable[[], _T]) -> _T:
    with tempfile.TemporaryDirectory(prefix="hybridpar-check-") as folder:
        return values(fork_ranks(1, lambda _: work(), deadline_s=_DEADLINE_S, log_dir=Path(folder)))[0]


def _check(testbed: Testbed, shape: _Shape) -> Check:
    load = os.getloadavg()[0]
    core = core_flops_per_s()
    with tempfile.TemporaryDirectory(prefix="hybridpar-check-") as folder:
        store = Path(folder) / "store"
        exits = fork_ranks(
            shape.world,
            lambda rank: _measure(rank, shape, store),
            deadline_s=_DEADLINE_S,
            log_dir=Path(folder) / "logs",
            enter=testbed.enter,
        )
        by_rank: list[_Samples] = values(exits)
    return Check(testbed.label, tuple(_readings(shape, core, by_rank)), load, len(os.sched_getaffinity(0)))


# In the ranks


def _measure(rank: int, shape: _Shape, store: Path) -> _Samples:
    """Seconds of this rank for each name of a communication, and its FLOP/s."""
    torch.set_num_threads(1)
    process_group.start(rank, shape.world, store, "cpu", _DEADLINE_S)
    node, place = divmod(rank, shape.devices_per_node)
    samples: _Samples = {}
    with meter().paused():
        if shape.devices_per_node > 1:
            samples |= _pair("inside a node", 0, 1, rank, _message(shape.intra_bit_s))
            group = _my_group([[n * shape.devices_per_node + d for d in range(shape.devices_per_node)]
                               for n in range(shape.nodes)], node)  # fmt: skip
            samples["all-reduce inside nodes"] = _reductions(group, _message(shape.intra_bit_s))
        if shape.nodes > 1:
            samples |= _pair("across nodes", 0, shape.devices_per_node, rank, _message(shape.inter_bit_s))
            group = _my_group([[n * shape.devices_per_node + d for n in range(shape.nodes)]
                               for d in range(shape.devices_per_node)], place)  # fmt: skip
            samples["all-reduce across nodes, all at once"] = _reductions(group, _message(shape.inter_bit_s))
            samples["all-reduce of all"] = _reductions(None, _message(shape.inter_bit_s))
        samples["latency of an all-reduce of all"] = _reductions(None, _PING_BYTES)
        dist.barrier()
        cpu, wall = time.process_time(), time.perf_counter()
        samples["device"] = [_products_per_s(_SIDE, _WORK_S, time.perf_counter) * 2 * _SIDE**3]
        samples["share"] = [(time.process_time() - cpu) / (time.perf_counter() - wall)]
    process_group.stop()
    return samples


def _message(bit_s: int | None) -> int:
    """Bytes that take about a tenth of a second."""
    if bit_s is None:
        return _UNSHAPED_MESSAGE
    size = min(_LARGEST_MESSAGE, max(_SMALLEST_MESSAGE, round(bit_s / 8 * _MESSAGE_S)))
    return size // _FLOAT_BYTES * _FLOAT_BYTES


def _my_group(partition: Sequence[Sequence[int]], mine: int) -> dist.ProcessGroup:
    """All ranks make all groups, as torch demands."""
    groups = [dist.new_group(list(ranks)) for ranks in partition]
    return groups[mine]


def _pair(name: str, sender: int, receiver: int, rank: int, size: int) -> _Samples:
    """Seconds of a message from sender to receiver with its acknowledgement, and half a ping-pong's."""
    whole, ping = torch.ones(size // _FLOAT_BYTES), torch.ones(_PING_BYTES // _FLOAT_BYTES)
    found: _Samples = {}
    for label, there, times, repeats in (
        (f"message {name}", whole, 1, _REPEATS),
        (f"latency {name}", ping, 2, _PINGS),
    ):
        dist.barrier()
        if rank in (sender, receiver):
            _exchange(there, ping, sender, receiver, rank)  # connections are made
            found[label] = [_timed(lambda t=there: _exchange(t, ping, sender, receiver, rank)) / times  # type: ignore[misc]
                            for _ in range(repeats)]  # fmt: skip
    dist.barrier()
    return found


def _exchange(there: Tensor, back: Tensor, sender: int, receiver: int, rank: int) -> None:
    if rank == sender:
        dist.send(there, receiver)
        dist.recv(back, receiver)
    else:
        dist.recv(there, sender)
        dist.send(back, sender)


def _reductions(group: dist.ProcessGroup | None, size: int) -> list[float]:
    whole = torch.ones(size // _FLOAT_BYTES)
    dist.all_reduce(whole, group=group)
    samples = []
    for _ in range(_REPEATS if size > _PING_BYTES else _PINGS):
        whole.fill_(1.0)
        dist.barrier()
        samples.append(_timed(lambda: dist.all_reduce(whole, group=group)))
    return samples


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _products_per_s(side: int, seconds: float, clock: Callable[[], float]) -> float:
    """Matrix products a second by a clock, over all of the time: on the wall's, a quota's pauses count."""
    torch.set_num_threads(1)
    a, b = torch.randn(side, side), torch.randn(side, side)
    out = torch.empty_like(a)
    torch.mm(a, b, out=out)
    start, done = clock(), 0
    while (elapsed := clock() - start) < seconds:
        torch.mm(a, b, out=out)
        done += 1
    return done / elapsed


# From samples to readings


def _readings(shape: _Shape, core: float, by_rank: Sequence[_Samples]) -> list[Reading]:
    found = []
    across = None if shape.inter_bit_s is None else shape.inter_bit_s / shape.devices_per_node
    for name, asked, sent in (
        ("message inside a node", shape.intra_bit_s, _message(shape.intra_bit_s)),
        ("message across nodes", shape.inter_bit_s, _message(shape.inter_bit_s)),
        ("all-reduce inside nodes", shape.intra_bit_s, _sent(shape.devices_per_node, shape.intra_bit_s)),
        ("all-reduce across nodes, all at once", across, _sent(shape.nodes, shape.inter_bit_s)),
        ("all-reduce of all", _slower(shape), _sent(shape.world, shape.inter_bit_s)),
    ):
        seconds = _slowest(name, by_rank)
        if seconds:
            found.append(_reading(name, "bit/s", asked, [8 * sent / s for s in seconds]))
    for name in ("latency inside a node", "latency across nodes", "latency of an all-reduce of all"):
        seconds = _slowest(name, by_rank)
        if seconds:
            found.append(_reading(name, "s", None, seconds))
    rates, shares = ([samples[name][0] for samples in by_rank] for name in ("device", "share"))
    found.append(_reading("share of a core", "", shape.share, shares))
    found.append(_reading("one core", "FLOP/s", None, [core]))
    found.append(_reading("device", "FLOP/s", None if shape.share is None else shape.share * core, rates))
    return found


def _sent(ranks: int, bit_s: int | None) -> int:
    return wire_bytes("all_reduce", ranks, _message(bit_s))


def _slower(shape: _Shape) -> float | None:
    """A ring over all ranks crosses each uplink once in each direction."""
    if shape.intra_bit_s is None or shape.inter_bit_s is None:
        return None
    return min(shape.intra_bit_s, shape.inter_bit_s)


def _slowest(name: str, by_rank: Sequence[_Samples]) -> list[float]:
    """Of each repeat the slowest rank's time."""
    return [max(times) for times in zip(*(s[name] for s in by_rank if name in s), strict=True)]


def _reading(name: str, unit: str, asked: float | None, samples: Sequence[float]) -> Reading:
    return Reading(name, unit, asked, statistics.median(samples), min(samples), max(samples), len(samples))
