"""What one rank of a run computes, sends and holds in a training step, traced."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from hybridpar.comm.metered import Call, meter, summed
from hybridpar.comm.process_group import ProcessMesh
from hybridpar.measure.memory import HeldBytes, MemoryAccountant
from hybridpar.parallel.apply import build_engine
from hybridpar.parallel.engine import Parts
from hybridpar.parallel.torch_engine import TorchEngine
from hybridpar.specs import RunSpec
from hybridpar.theory.traffic import Traffic
from hybridpar.trace.alone import alone
from hybridpar.trace.watch import Change, Watch

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "other")


class NotTracedError(ValueError):
    """What cannot be traced; the message names it."""


@dataclass(frozen=True)
class TracedCall:
    """One call of `hybridpar.comm.metered`, its times counted in operators: `end` None where nobody waited for it."""

    op: str
    group: str
    group_size: int
    dtype: str
    bytes: int
    is_blocking: bool
    start: int
    end: int | None


@dataclass(frozen=True)
class Trace:
    """A step of one rank. FLOPs are those of matrix products (see `hybridpar.trace.watch`), by phase of the step.

    `held` are the peaks of each category alone; `peak` is the largest sum of all at one time, and what it is made of
    (`other`: gathered parameters, gradients of one operator, buffers of communication, temporaries). `timeline` tells
    the bytes of each category whenever a new largest or smallest sum of a stretch of the step is reached; its times,
    like those of `calls`, count operators.
    """

    run_id: str
    rank: int
    flops: Mapping[str, int]
    comm: tuple[Traffic, ...]
    calls: tuple[TracedCall, ...]
    held: HeldBytes
    peak: Mapping[str, int]
    peak_phase: str
    timeline: tuple[tuple[int, Mapping[str, int]], ...]
    operators: int
    seconds: float

    def row(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def trace_step(run: RunSpec, rank: int) -> Trace:
    """Trace one training step of `rank`; the optimizer's state is there from the start, as after a first step.

    Raises:
        NotTracedError: DeepSpeed's engine, inference, or a rank that is not there.
    """
    _check(run, rank)
    start = time.perf_counter()
    with alone(run.strategy, rank) as mesh:
        engine = build_engine(run, mesh)
        assert isinstance(engine, TorchEngine)
        engine.prepare()
        tokens = torch.zeros(run.workload.global_batch // run.strategy.dp, run.workload.seq_len, dtype=torch.int64)
        return _watched(run, mesh, engine, (tokens, tokens.clone()), start, scalars=True)


Batch = tuple[Tensor, Tensor]


def measure_step(run: RunSpec, mesh: ProcessMesh, batches: Sequence[Batch]) -> Trace:
    """The same of a real rank, in the last of some steps on tokens and targets of its replica. Collective."""
    start = time.perf_counter()
    engine = build_engine(run, mesh)
    assert isinstance(engine, TorchEngine)
    for tokens, targets in batches[:-1]:
        engine.step(tokens, targets)
    return _watched(run, mesh, engine, batches[-1], start, scalars=False)


def _watched(
    run: RunSpec, mesh: ProcessMesh, engine: TorchEngine, batch: Batch, start: float, *, scalars: bool
) -> Trace:
    engine.forget_gradients()
    meter().drain()
    watch = Watch(scalars=scalars)
    before = _names(watch, engine.parts())
    for tensor in batch:
        watch.see(tensor)
    accountant = MemoryAccountant(engine.parts, watch.note_saved)
    with meter().clocked(lambda: watch.time), watch, accountant:
        engine.step(*batch)
    calls = meter().drain_calls()
    after = engine.parts()
    names = {category: keys | _names(watch, after)[category] for category, keys in before.items()}
    names["gradients"] = {watch.see(t) for t in after.gradients if t.numel()}
    steps = _timeline(watch.changes, names)
    peak_time, peak = max(steps, key=lambda step: sum(step[1].values()))
    return Trace(
        run_id=run.run_id,
        rank=mesh.rank,
        flops=dict(watch.flops),
        comm=tuple(Traffic(row.op, row.group, row.group_size, row.calls, row.bytes) for row in summed(calls)),
        calls=tuple(_traced(call) for call in calls),
        held=accountant.peak(),
        peak=peak,
        peak_phase=watch.phase_at(peak_time),
        timeline=tuple(_thinned(steps)),
        operators=watch.time,
        seconds=time.perf_counter() - start,
    )


def _check(run: RunSpec, rank: int) -> None:
    if run.strategy.engine != "torch":
        raise NotTracedError(f"strategy.engine={run.strategy.engine} cannot be traced; legal: torch")
    if run.workload.phase != "train":
        raise NotTracedError(f"workload.phase={run.workload.phase} cannot be traced; legal: train")
    if not 0 <= rank < run.strategy.devices:
        raise NotTracedError(f"rank={rank} is not in the grid; legal: 0 to {run.strategy.devices - 1}")


def _traced(call: Call) -> TracedCall:
    end = None if call.end is None else int(call.end)
    return TracedCall(
        call.op, call.group, call.group_size, call.dtype, call.bytes, call.is_blocking, int(call.start), end
    )


def _names(watch: Watch, parts: Parts) -> dict[str, set[int]]:
    def seen(tensors: Iterable[Tensor]) -> set[int]:
        return {watch.see(t) for t in tensors if t.numel()}

    return {"parameters": seen(parts.parameters), "optimizer": seen(parts.optimizer)}


def _timeline(changes: Sequence[Change], names: Mapping[str, set[int]]) -> list[tuple[int, dict[str, int]]]:
    """Bytes by category after each change."""
    fixed = {key: category for category, keys in names.items() for key in keys}
    sizes: dict[int, int] = {}
    saved: set[int] = set()
    totals = dict.fromkeys(CATEGORIES, 0)
    found = []
    for change in changes:
        key = change.key
        totals[_category(key, fixed, saved)] -= sizes.get(key, 0)
        if change.size is not None:
            sizes[key] = change.size
        if change.saved is not None:
            (saved.add if change.saved else saved.discard)(key)
        totals[_category(key, fixed, saved)] += sizes.get(key, 0)
        found.append((change.time, dict(totals)))
    return found


def _category(key: int, fixed: Mapping[int, str], saved: set[int]) -> str:
    return fixed.get(key) or ("activations" if key in saved else "other")


def _thinned(steps: Sequence[tuple[int, dict[str, int]]], stretches: int = 500) -> list[tuple[int, dict[str, int]]]:
    """Of each stretch of a long timeline the points with the largest and the smallest sum."""
    size = max(1, len(steps) // stretches)
    kept = []
    for first in range(0, len(steps), size):
        part = range(first, min(first + size, len(steps)))
        ends = {choose(part, key=lambda i: sum(steps[i][1].values())) for choose in (max, min)}
        kept += [steps[i] for i in sorted(ends)]
    return kept
