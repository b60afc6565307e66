"""A plan told to people: in a terminal, as plain data, as a page. No torch here."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hybridpar.cost.step import ADDED
from hybridpar.plan.search import Change, Choice, Objective, Rival, Task, rivals, search, sensitivity

TIER = "predicted"
_GIB = 2**30


@dataclass(frozen=True)
class Plan:
    """Everything about one search. `best` is None where nothing fits, and `least` then tells what would need least."""

    task: Task
    objective: Objective
    candidates: int
    fitting: int
    best: Choice | None
    least: Choice
    pareto: Sequence[Choice]
    rivals: Sequence[Rival]
    changes: Sequence[Change]

    def row(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "tier": TIER,
            "model": self.task.model.model_dump(),
            "workload": self.task.workload.model_dump(),
            "accelerator": self.task.hardware.name,
            "devices": self.task.devices,
            "objective": self.objective,
            "most_risk": self.task.most_risk,
            "coefficients": asdict(self.task.coefficients),
            "candidates": self.candidates,
            "fitting": self.fitting,
            "best": _choice(self.best),
            "least_memory": _choice(self.least),
            "pareto": [_choice(one) for one in self.pareto],
            "rivals": [
                {
                    "name": one.name, "ratio": None if one.choice is None else one.ratio, "best": _choice(one.choice),
                    "more_seconds": dict(one.more), "reason": one.reason,
                }
                for one in self.rivals
            ],
            "sensitivity": [
                {"what": one.what, "factor": one.factor, "regret": one.regret, "best": _choice(one.best)}
                for one in self.changes
            ],
        }  # fmt: skip


def plan(task: Task, objective: Objective = "time", *, changes: bool = True) -> Plan:
    """Search, compare and ask what would change the choice.

    Raises:
        SpaceError, HardwareError: see `hybridpar.plan.search.search`.
    """
    searched = search(task)
    best = searched.best(objective)
    least = searched.choice(int(searched.prediction.bytes.argmin()))
    chosen = None if best is None else searched.choice(best)
    return Plan(
        task=task,
        objective=objective,
        candidates=len(searched.candidates),
        fitting=int(searched.fits.sum()),
        best=chosen,
        least=least,
        pareto=[searched.choice(place) for place in searched.pareto()],
        rivals=[] if best is None else rivals(searched, best, objective),
        changes=[] if chosen is None or not changes else sensitivity(task, chosen, objective),
    )


def _choice(choice: Choice | None) -> dict[str, Any] | None:
    return None if choice is None else choice.row()


# In a terminal


def lines(told: Plan) -> Iterator[str]:
    """The whole plan as text."""
    task, workload = told.task, told.task.workload
    yield (
        f"{task.model.name} on {task.devices} {task.hardware.name}: batch {workload.global_batch} x {workload.seq_len} "
        f"tokens, {workload.precision}, objective: {told.objective} (tier: {TIER})"
    )
    risk = f"{100 * task.most_risk:.0f} % risk of running out allowed"
    yield f"{told.candidates:,} legal strategies computed, {told.fitting:,} fit ({risk})"
    if told.best is None:
        yield "nothing fits; what needs least memory:"
        yield from choice_lines(told.least, task)
        return
    yield ""
    yield from choice_lines(told.best, task)
    yield f"  what binds: {binds(told.best, task)}"
    yield "\nwhy not otherwise"
    yield from (f"  {line}" for line in map(rival_line, told.rivals))
    yield "\nfaster or smaller (time and memory, none beaten in both)"
    yield from (f"  {_short(one)}" for one in told.pareto[:_SHOWN])
    if len(told.pareto) > _SHOWN:
        yield f"  and {len(told.pareto) - _SHOWN} more"
    if told.changes:
        yield "\nwhat would change the choice"
        yield from (f"  {line}" for line in map(change_line, told.changes))


_SHOWN = 8


def choice_lines(choice: Choice, task: Task) -> Iterator[str]:
    """One strategy with what is predicted of it."""
    yield f"  {choice.label}"
    yield (
        f"  step {choice.seconds:.3f} s ({choice.low:.3f} to {choice.high:.3f}), {choice.tokens_per_s:,.0f} tokens/s, "
        f"MFU {100 * choice.mfu:.1f} %"
    )
    yield (
        f"  memory {choice.bytes / _GIB:.1f} of {task.hardware.memory_bytes / _GIB:.0f} GiB: "
        f"{_listed_bytes(choice.held)}; chance of running out {100 * choice.p_oom:.1f} %"
    )
    yield f"  time: {_listed_seconds(choice)}"


def _listed_bytes(held: Mapping[str, float]) -> str:
    parts = sorted(((size, name) for name, size in held.items() if size >= 0.01 * _GIB), reverse=True)
    return ", ".join(f"{name} {size / _GIB:.1f}" for size, name in parts)


def _listed_seconds(choice: Choice) -> str:
    parts = sorted(((choice.parts[name], name) for name in ADDED), reverse=True)
    shown = [
        f"{name} {100 * seconds / choice.seconds:.0f} %" for seconds, name in parts if seconds > 0.01 * choice.seconds
    ]
    hidden = sum(seconds for name, seconds in choice.parts.items() if name.endswith("_hidden"))
    return ", ".join(shown) + (f"; communication hidden behind it {hidden:.3f} s" if hidden else "")


def binds(choice: Choice, task: Task) -> str:
    """What keeps the best strategy from being better: memory, communication, the bubble, or computing itself."""
    waiting = {
        "communication": sum(
            choice.parts[name] for name in ("tensor", "context", "exchange", "pipe", "gradients", "gathers")
        ),
        "the pipeline's bubble": choice.parts["bubble"],
        "launching kernels": choice.parts["launch"],
    }
    largest = max(waiting, key=lambda name: waiting[name])
    share = waiting[largest] / choice.seconds
    first = f"{largest} takes {100 * share:.0f} % of the step" if share > 0.05 else "computing itself"
    full = choice.bytes / task.hardware.memory_bytes
    return first + (f"; memory is {100 * full:.0f} % full" if full > 0.75 else "")


def rival_line(rival: Rival) -> str:
    """One sentence."""
    if rival.choice is None:
        return f"{rival.name}: {rival.reason}"
    slower = f"{100 * (rival.ratio - 1):.1f} % worse" if rival.ratio > 1.0005 else "as good"
    why = ", ".join(f"{name} +{seconds:.3f} s" for name, seconds in rival.more.items())
    return f"{rival.name}: {slower} ({rival.choice.label}{'; ' + why if why else ''})"


def change_line(change: Change) -> str:
    """One sentence."""
    head = f"{change.what} x {change.factor:g}: "
    if change.best is None:
        return head + "nothing fits, or nothing is legal"
    if change.regret is not None and change.regret < 5e-4:
        return head + f"the same choice, {change.best.seconds:.3f} s"
    lost = (
        "which no longer fits or is legal" if change.regret is None else f"{100 * change.regret:.1f} % faster than it"
    )
    return head + f"{change.best.label} instead, {lost}"


def _short(choice: Choice) -> str:
    return f"{choice.seconds:9.3f} s {choice.bytes / _GIB:7.1f} GiB  {choice.label}"


# As a page


def page(told: Plan) -> str:
    """One HTML page that needs nothing else."""
    title = html.escape(f"{told.task.model.name} on {told.task.devices} {told.task.hardware.name}")
    body = html.escape("\n".join(lines(told)))
    bars = "" if told.best is None else _bars(told.best)
    return (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{title}</title>"
        "<style>body{font:15px/1.5 system-ui;max-width:70em;margin:2em auto;padding:0 1em}"
        "pre{white-space:pre-wrap}.bar{display:flex;height:2em}.bar span{overflow:hidden;color:#fff;font-size:11px;"
        "padding:.4em .2em}</style>"
        f"<h1>{title}</h1><p>Tier: {TIER}.</p>{bars}<pre>{body}</pre></html>\n"
    )


_COLOURS = (
    "#1b6ca8",
    "#2a9d8f",
    "#8ab17d",
    "#e9c46a",
    "#f4a261",
    "#e76f51",
    "#9b5de5",
    "#577590",
    "#6d597a",
    "#355070",
)


def _bars(choice: Choice) -> str:
    parts = [(name, choice.parts[name] / choice.seconds) for name in ADDED]
    shown = sorted((part for part in parts if part[1] > 0.005), key=lambda part: -part[1])
    spans = "".join(
        f"<span style='flex:{share:.4f};background:{_COLOURS[n % len(_COLOURS)]}' title='{name} {100 * share:.1f} %'>"
        f"{name}</span>"
        for n, (name, share) in enumerate(shown)
    )
    return f"<h2>Where a step's time goes</h2><div class='bar'>{spans}</div>"
