"""What a collective costs on this machine: every operation timed over forked ranks, by message size.

A repeat is timed from a barrier to the last rank's end (the largest of the ranks' times), and is the mean over as many
calls in a row as make it long enough to be told from the clock's and the barrier's noise.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridpar.comm import process_group
from hybridpar.comm.metered import meter
from hybridpar.comm.wire import wire_bytes
from hybridpar.launch.forked import fork_ranks, values

_FLOAT_BYTES = 4
_CALLS = 4
_DEADLINE_S = 300.0

Row = dict[str, Any]


def _p2p(whole: Tensor, part: Tensor) -> None:
    """Even ranks send to the next rank, which answers nothing: one message on each pair."""
    rank = dist.get_rank()
    if rank % 2 == 0 and rank + 1 < dist.get_world_size():
        dist.send(whole, rank + 1)
    elif rank % 2 == 1:
        dist.recv(whole, rank - 1)


# Each takes the whole tensor and one rank's part of it.
_BODIES: Mapping[str, Callable[[Tensor, Tensor], Any]] = {
    "p2p": _p2p,
    "all_reduce": lambda whole, part: dist.all_reduce(whole),
    "all_gather": lambda whole, part: dist.all_gather_into_tensor(whole, part),
    "reduce_scatter": lambda whole, part: dist.reduce_scatter_tensor(part, whole),
    "all_to_all": lambda whole, part: dist.all_to_all_single(torch.empty_like(whole), whole),
    "broadcast": lambda whole, part: dist.broadcast(whole, 0),
}
OPERATIONS = tuple(_BODIES)


def bench(
    world: int, sizes: Sequence[int], ops: Sequence[str] = OPERATIONS, repeats: int = 5, *, device: str = "cpu"
) -> list[Row]:
    """Time each operation over `world` forked ranks.

    Args:
        world: number of ranks, at least 2.
        sizes: bytes of the whole tensor (the input of a reduction, the output of a gather, the message); rounded up
            to whole float32 elements on every rank.
        ops: names out of OPERATIONS.
        repeats: samples of each operation and size.
        device: "cpu" (gloo) or "cuda" (NCCL).

    Returns:
        Rows with op, world, bytes, repeat, seconds, wire_bytes (sent by one rank), bus_bandwidth (wire bytes a
        second) and tier.

    Raises:
        ValueError: an unknown operation, fewer than two ranks, or a size below one byte.
        RuntimeError: a rank failed.
    """
    _check(world, sizes, ops, repeats)
    with tempfile.TemporaryDirectory(prefix="hybridpar-bench-") as folder:
        store = Path(folder) / "store"
        exits = fork_ranks(
            world,
            lambda rank: bench_rank(rank, world, store, sizes, ops, repeats, device),
            deadline_s=_DEADLINE_S,
            log_dir=Path(folder) / "logs",
        )
        seconds_by_rank = values(exits)
    slowest = [max(ranks) for ranks in zip(*seconds_by_rank, strict=True)]
    cells = [(op, _rounded(size, world), repeat) for op in ops for size in sizes for repeat in range(repeats)]
    return [_row(op, world, size, repeat, s) for (op, size, repeat), s in zip(cells, slowest, strict=True)]


def _check(world: int, sizes: Sequence[int], ops: Sequence[str], repeats: int) -> None:
    for op in ops:
        if op not in _BODIES:
            raise ValueError(f"op={op!r} is unknown; legal: {', '.join(_BODIES)}")
    for name, value, least in (("world", world, 2), ("repeats", repeats, 1), *(("size", size, 1) for size in sizes)):
        if value < least:
            raise ValueError(f"{name}={value} is not legal; it must be at least {least}")


def bench_rank(
    rank: int, world: int, store: Path, sizes: Sequence[int], ops: Sequence[str], repeats: int, device: str
) -> list[float]:
    """One rank's share of `bench`: its seconds a call, by operation, size and repeat in this order."""
    torch.set_num_threads(1)
    process_group.start(rank, world, store, device, _DEADLINE_S)
    seconds = [s for op in ops for size in sizes for s in _samples(op, _rounded(size, world), world, repeats, device)]
    process_group.stop()
    return seconds


def _samples(op: str, size: int, world: int, repeats: int, device: str) -> list[float]:
    whole = torch.ones(size // _FLOAT_BYTES, device=device)
    part = torch.ones(size // _FLOAT_BYTES // world, device=device)
    call = _BODIES[op]
    with meter().paused():
        call(whole, part)  # connections are made, caches filled
        return [_seconds_a_call(lambda: call(whole, part), device) for _ in range(repeats)]


def _seconds_a_call(call: Callable[[], None], device: str) -> float:
    dist.barrier()
    start = time.perf_counter()
    for _ in range(_CALLS):
        call()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / _CALLS


def _rounded(size: int, world: int) -> int:
    """The next size that divides into whole float32 elements on every rank."""
    unit = _FLOAT_BYTES * world
    return -(-size // unit) * unit


def _row(op: str, world: int, size: int, repeat: int, seconds: float) -> Row:
    wire = wire_bytes("send" if op == "p2p" else op, world, size)
    return {
        "op": op,
        "world": world,
        "bytes": size,
        "repeat": repeat,
        "seconds": seconds,
        "wire_bytes": wire,
        "bus_bandwidth": wire / seconds,
        "tier": "measured",
    }
