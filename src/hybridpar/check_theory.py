"""Closed form against trace against real ranks: every quantity of a step, number by number.

Each comparison is a row: what the form predicts, what the program did, and a verdict.

    exact       the two are the same number
    explained   they differ for a reason that is named, within the bound that goes with it
    deviates    they differ
    uncovered   there is no form for it yet; `note` says of what
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from hybridpar.specs import RunSpec
from hybridpar.theory.activations import peak_activations
from hybridpar.theory.coverage import NotCoveredError
from hybridpar.theory.rank_flops import PHASES, flops_of_step
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


def compare(run: RunSpec, seen: Trace, tier: str) -> list[Comparison]:
    """All closed forms of a rank against what it did."""
    found = [
        *_flops(run, seen),
        *_traffic(run, seen),
        *_state(run, seen),
        *_activations(run, seen),
    ]
    return [Comparison(run, seen.rank, quantity, item, tier, *rest) for quantity, item, *rest in found]


_Row = tuple[str, str, int | None, int | None, str]


def _flops(run: RunSpec, seen: Trace) -> Iterator[_Row]:
    predicted, reason = _covered(lambda: flops_of_step(run, seen.rank))
    for phase in PHASES:
        form = None if predicted is None else predicted.get(phase, 0)
        if form or seen.flops.get(phase):
            yield "flops", phase, form, seen.flops.get(phase, 0), reason


def _traffic(run: RunSpec, seen: Trace) -> Iterator[_Row]:
    found = {_key(row): (row.calls, row.bytes) for row in seen.comm}
    rows, reason = _covered(lambda: traffic_of_step(run, seen.rank))
    predicted = None if rows is None else {_key(row): (row.calls, row.bytes) for row in rows}
    for key in sorted(found.keys() | (predicted or {}).keys()):
        for place, quantity in enumerate(("calls", "bytes")):
            form = None if predicted is None else predicted.get(key, (0, 0))[place]
            yield quantity, key, form, found.get(key, (0, 0))[place], reason


def _key(row: CommRow | Traffic) -> str:
    return f"{row.op} over {row.group} of {row.group_size}"


def _state(run: RunSpec, seen: Trace) -> Iterator[_Row]:
    predicted = state_of_rank(run, seen.rank)
    yield "state", "parameters", predicted.parameters + predicted.gathered, seen.held.parameters, ""
    for item in ("gradients", "optimizer", "host"):
        yield "state", item, getattr(predicted, item), getattr(seen.held, item), ""


def _activations(run: RunSpec, seen: Trace) -> Iterator[_Row]:
    predicted, reason = _covered(lambda: peak_activations(run, seen.rank))
    yield "activations", "peak", predicted, seen.held.activations, reason


_Form = TypeVar("_Form")


def _covered(form: Callable[[], _Form]) -> tuple[_Form | None, str]:
    """What a form says, or why there is none."""
    try:
        return form(), ""
    except NotCoveredError as reason:
        return None, str(reason)
