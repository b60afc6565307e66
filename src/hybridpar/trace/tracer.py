"""What one rank of a run computes, sends and holds in a step, traced: a training step, a prefill, a decoded token."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hybridpar.comm.metered import Call, meter, summed
from hybridpar.comm.process_group import ProcessMesh
from hybridpar.measure.memory import HeldBytes, MemoryAccountant, storage_bytes
from hybridpar.parallel.apply import build_engine, build_generator
from hybridpar.parallel.engine import Parts
from hybridpar.parallel.torch_engine import TorchEngine
from hybridpar.specs import RunSpec
from hybridpar.theory.traffic import Traffic
from hybridpar.trace.alone import alone
from hybridpar.trace.watch import Change, Watch

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "cache", "other")


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
    """Trace one step of `rank`: a training step, with the optimizer's state there from the start, as after a first
    one; a prefill; or the last decoded token.

    Raises:
        NotTracedError: DeepSpeed's engine, or a rank that is not there.
    """
    _check(run, rank)
    start = time.perf_counter()
    batch = torch.zeros(run.workload.global_batch // run.strategy.dp, run.workload.seq_len, dtype=torch.int64)
    with alone(run.strategy, rank) as mesh:
        if run.workload.phase != "train":
            return _served(run, mesh, batch.clone(), start, scalars=True)
        engine = build_engine(run, mesh)
        assert isinstance(engine, TorchEngine)
        engine.prepare()
        return _trained(run, mesh, engine, (batch.clone(), batch.clone()), start, scalars=True)


Batch = tuple[Tensor, Tensor]


def measure_step(run: RunSpec, mesh: ProcessMesh, batches: Sequence[Batch]) -> Trace:
    """The same of a real rank, in the last of some steps on tokens and targets of its replica (a serving run takes the
    last tokens as its prompts). Collective."""
    start = time.perf_counter()
    if run.workload.phase != "train":
        return _served(run, mesh, batches[-1][0], start, scalars=False)
    engine = build_engine(run, mesh)
    assert isinstance(engine, TorchEngine)
    for tokens, targets in batches[:-1]:
        engine.step(tokens, targets)
    return _trained(run, mesh, engine, batches[-1], start, scalars=False)


def _trained(
    run: RunSpec, mesh: ProcessMesh, engine: TorchEngine, batch: Batch, start: float, *, scalars: bool
) -> Trace:
    engine.forget_gradients()
    watch = Watch(scalars=scalars)
    return _watched(run, mesh, watch, _Work(lambda: engine.step(*batch), engine.parts, inputs=batch), start)


def _served(run: RunSpec, mesh: ProcessMesh, prompts: Tensor, start: float, *, scalars: bool) -> Trace:
    generator = build_generator(run, mesh)

    def fill() -> None:
        generator.prefill(prompts)
        generator.wait()

    step = fill
    if run.workload.phase == "decode":
        fill()
        for _ in range(run.workload.steps - 1):
            generator.decode()
        step = generator.decode
    parts = Parts(generator.parameter_tensors(), (), (), ())
    work = _Work(step, lambda: parts, generator.cache_tensors, (prompts,))
    seen = _watched(run, mesh, Watch(scalars=scalars), work, start)
    generator.wait()
    meter().drain()
    return seen


@dataclass(frozen=True)
class _Work:
    """What is looked at: `step`, what the rank holds before and after it, and what it is given."""

    step: Callable[[], object]
    parts: Callable[[], Parts]
    cache: Callable[[], Sequence[Tensor]] = tuple
    inputs: Sequence[Tensor] = ()


def _watched(run: RunSpec, mesh: ProcessMesh, watch: Watch, work: _Work, start: float) -> Trace:
    meter().drain()
    before = _names(watch, work)
    for tensor in work.inputs:
        watch.see(tensor)
    accountant = MemoryAccountant(work.parts, watch.note_saved)
    with meter().clocked(lambda: watch.time), watch, accountant:
        work.step()
    calls = meter().drain_calls()
    after = _names(watch, work)
    names = {category: keys | after[category] for category, keys in before.items()}
    names["gradients"] = {watch.see(t) for t in work.parts().gradients if t.numel()}
    steps = _timeline(watch.changes, names)
    peak_time, peak = max(steps, key=lambda step: sum(step[1].values()))
    return Trace(
        run_id=run.run_id,
        rank=mesh.rank,
        flops=dict(watch.flops),
        comm=tuple(Traffic(row.op, row.group, row.group_size, row.calls, row.bytes) for row in summed(calls)),
        calls=tuple(_traced(call) for call in calls),
        held=replace(accountant.peak(), cache=storage_bytes(work.cache())),
        peak=peak,
        peak_phase=watch.phase_at(peak_time),
        timeline=tuple(_thinned(steps)),
        operators=watch.time,
        seconds=time.perf_counter() - start,
    )


def _check(run: RunSpec, rank: int) -> None:
    if run.strategy.engine != "torch":
        raise NotTracedError(f"strategy.engine={run.strategy.engine} cannot be traced; legal: torch")
    if not 0 <= rank < run.strategy.devices:
        raise NotTracedError(f"rank={rank} is not in the grid; legal: 0 to {run.strategy.devices - 1}")


def _traced(call: Call) -> TracedCall:
    end = None if call.end is None else int(call.end)
    return TracedCall(
        call.op, call.group, call.group_size, call.dtype, call.bytes, call.is_blocking, int(call.start), end
    )


def _names(watch: Watch, work: _Work) -> dict[str, set[int]]:
    def seen(tensors: Iterable[Tensor]) -> set[int]:
        return {watch.see(t) for t in tensors if t.numel()}

    parts = work.parts()
    return {"parameters": seen(parts.parameters), "optimizer": seen(parts.optimizer), "cache": seen(work.cache())}


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
