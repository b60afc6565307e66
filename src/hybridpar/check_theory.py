"""Closed form against trace against real ranks: every quantity of a step, number by number.

Each comparison is a row: what the form predicts, what the program did, and a verdict.

    exact       the two are the same number
    explained   they differ for a reason that is named, within the bound that goes with it
    deviates    they differ
    uncovered   there is no form for it yet; `note` says of what
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from hybridpar.specs import RunSpec
from hybridpar.theory.activations import peak_activations
from hybridpar.theory.coverage import NotCoveredError
from hybridpar.theory.rank_flops import PHASES, flops_of_step
from hybridpar.theory.serving import served
from hybridpar.theory.state import state_of_rank
from hybridpar.theory.traffic import Traffic, traffic_of_step

if TYPE_CHECKING:
    from hybridpar.comm.metered import CommRow
    from hybridpar.trace.tracer import Trace

Verdict = Literal["exact", "explained", "deviates", "uncovered"]


@dataclass(frozen=True)
class Comparison:
    """One number of one rank: `predicted` by a closed form, `seen` in a program that was `tier` (traced, measured)."""

    run: RunSpec
    rank: int
    quantity: str
    item: str
    tier: str
    predicted: int | None
    seen: int | None
    note: str = ""

    @property
    def verdict(self) -> Verdict:
        """See the module."""
        if self.predicted is None:
            return "uncovered"
        if self.predicted == self.seen:
            return "exact"
        return "explained" if self.note else "deviates"

    def row(self) -> dict[str, Any]:
        """Plain data for a table."""
        return {
            "run_id": self.run.run_id,
            "family": self.run.model.family,
            "model": self.run.model.name,
            "layout": self.run.strategy.label,
            "devices": self.run.strategy.devices,
            "phase": self.run.workload.phase,
            "precision": self.run.workload.precision,
            "rank": self.rank,
            "quantity": self.quantity,
            "item": self.item,
            "tier": self.tier,
            "predicted": self.predicted,
            "seen": self.seen,
            "verdict": self.verdict,
            "note": self.note,
        }


_MEASURED_DEADLINE_S = 120.0
_STEPS = 3  # DDP lays its buckets out anew in the second


def compare_traced(run: RunSpec, ranks: Iterable[int] = ()) -> list[Comparison]:
    """Forms against traces of `ranks`, or of the first, the middle and the last one."""
    from hybridpar.trace.tracer import trace_step

    last = run.strategy.devices - 1
    chosen = sorted(set(ranks) or {0, last // 2 + last % 2, last})
    return [row for rank in chosen for row in compare(run, trace_step(run, rank), "traced")]


def compare_measured(run: RunSpec) -> list[Comparison]:
    """Forms against every rank of a real run in forked processes.

    Raises:
        RuntimeError: a rank failed; the message holds the end of its log.
    """
    from hybridpar.launch.forked import fork_ranks, preload, values

    preload()
    folder = Path(tempfile.mkdtemp(prefix="hybridpar-theory-"))
    try:
        exits = fork_ranks(
            run.strategy.devices,
            lambda rank: _measured(run, rank, folder),
            deadline_s=_MEASURED_DEADLINE_S,
            log_dir=folder,
        )
        return [row for seen in values(exits) for row in compare(run, seen, "measured")]
    finally:
        shutil.rmtree(folder)


def _measured(run: RunSpec, rank: int, folder: Path) -> Trace:
    import torch

    from hybridpar.comm.process_group import ProcessMesh, start, stop
    from hybridpar.trace.tracer import measure_step

    torch.set_num_threads(1)
    start(rank, run.strategy.devices, folder / "store", "cpu", _MEASURED_DEADLINE_S)
    mesh = ProcessMesh.build(run.strategy)
    generator = torch.Generator().manual_seed(run.seed)
    shape = (_STEPS, run.workload.global_batch, run.workload.seq_len + 1)
    steps = torch.randint(0, run.model.vocab, shape, generator=generator)
    mine = (step.chunk(run.strategy.dp)[mesh.coordinate.dp] for step in steps)
    seen = measure_step(run, mesh, [(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in mine])
    stop()
    return seen


def compare(run: RunSpec, seen: Trace, tier: str) -> list[Comparison]:
    """All closed forms of a rank against what it did."""
    found = _trained(run, seen) if run.workload.phase == "train" else _served(run, seen)
    routed = _ROUTED if tier == "measured" and run.strategy.ep > 1 else ""
    return [
        Comparison(run, seen.rank, quantity, item, tier, predicted, number, note or routed * (quantity != "state"))
        for quantity, item, predicted, number, note in found
    ]


_AT_ONCE = (
    "the form adds the categories' own peaks, which need not coincide, and leaves out what a trace counts besides: "
    "temporaries of operators, buffers of communication, and gradients that FSDP2 has not scattered yet"
)
_ROUTED = "the form is of an even load of experts; here a router decides"


_Row = tuple[str, str, int | None, int | None, str]


def _trained(run: RunSpec, seen: Trace) -> Iterator[_Row]:
    rank = seen.rank
    flops, reason = _covered(lambda: flops_of_step(run, rank))
    yield from _flops(flops, reason, seen)
    traffic, reason = _covered(lambda: traffic_of_step(run, rank))
    yield from _traffic(traffic, reason, seen)
    state = state_of_rank(run, rank)
    yield "state", "parameters", state.parameters + state.gathered, seen.held.parameters, ""
    for item in ("gradients", "optimizer", "host"):
        yield "state", item, getattr(state, item), getattr(seen.held, item), ""
    activations, reason = _covered(lambda: peak_activations(run, rank))
    yield "activations", "peak", activations, seen.held.activations, reason
    held = state.parameters + state.gathered + state.gradients + state.optimizer
    whole = None if activations is None else held + activations
    yield "peak", "everything at once", whole, sum(seen.peak.values()), reason or _AT_ONCE


def _served(run: RunSpec, seen: Trace) -> Iterator[_Row]:
    """Of decoded tokens the last one."""
    form = served(run, seen.rank, run.workload.steps - 1)
    yield from _flops(form.flops, "", seen)
    yield from _traffic(form.traffic, "", seen)
    yield "state", "parameters", form.parameters, seen.held.parameters, ""
    yield "state", "cache", form.cache, seen.held.cache, ""


def _flops(predicted: Mapping[str, int] | None, reason: str, seen: Trace) -> Iterator[_Row]:
    for phase in PHASES:
        form = None if predicted is None else predicted.get(phase, 0)
        if form or seen.flops.get(phase):
            yield "flops", phase, form, seen.flops.get(phase, 0), reason


def _traffic(rows: Iterable[Traffic] | None, reason: str, seen: Trace) -> Iterator[_Row]:
    found = {_key(row): (row.calls, row.bytes) for row in seen.comm}
    predicted = None if rows is None else {_key(row): (row.calls, row.bytes) for row in rows}
    for key in sorted(found.keys() | (predicted or {}).keys()):
        for place, quantity in enumerate(("calls", "bytes")):
            form = None if predicted is None else predicted.get(key, (0, 0))[place]
            yield quantity, key, form, found.get(key, (0, 0))[place], reason


def _key(row: CommRow | Traffic) -> str:
    return f"{row.op} over {row.group} of {row.group_size}"


_Form = TypeVar("_Form")


def _covered(form: Callable[[], _Form]) -> tuple[_Form | None, str]:
    """What a form says, or why there is none."""
    try:
        return form(), ""
    except NotCoveredError as reason:
        return None, str(reason)
