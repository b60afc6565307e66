"""From how the ranks ended and what they wrote to one outcome and one result: pure functions. No torch here.

Who failed first decides the outcome; ranks that the launcher killed, or that lost a peer, are victims.
"""

from __future__ import annotations

import signal
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridpar.events import Event
from hybridpar.launch.forked import RankExit
from hybridpar.outcome import OUTCOMES, Outcome
from hybridpar.specs import RunSpec
from hybridpar.theory.model_flops import FLOP_CONVENTION, model_flops_per_step

SCHEMA = 2
MEMORY_CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "buffers", "host", "cache")
_COMM_TOTALS = ("calls", "bytes", "wire_bytes", "seconds", "exposed_seconds")
# Signals by which a process is ended from outside or by a fault of its own. SIGABRT is not among them: runtimes
# raise it when they lose a peer.
_FATAL = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE})
_MEMORY_ERRORS = frozenset({"OutOfMemoryError", "MemoryError"})
_MEMORY_PHRASES = ("can't allocate memory", "not enough memory", "out of memory", "cannot allocate memory")
_EVIDENCE_LINES = 12


@dataclass(frozen=True)
class Circumstances:
    """What the launcher knows of one try, beside the ranks' exits and events."""

    testbed: str
    peak_flops_per_s: float
    started_at: float
    total_s: float
    attempt: int
    earlier: tuple[str, ...] = ()
    kernel_oom_kills: int = 0


def outcome_of(run: RunSpec, exits: Sequence[RankExit], events: Sequence[Sequence[Event]], oom_kills: int) -> Outcome:
    """How the run ended.

    Args:
        run: what was asked.
        exits: one for each rank.
        events: of each rank.
        oom_kills: processes that the kernel's out-of-memory killer ended meanwhile.
    """
    failed = [end for end in exits if not end.ok and not end.killed_by_launcher]
    if failed:
        return _failure(min(failed, key=lambda end: _failed_at(end, events)), events, oom_kills)
    if any(end.killed_by_launcher for end in exits):
        return _timeout(run, exits, events)
    unfinished = [end.rank for end in exits if not _finished(run, events[end.rank])]
    if unfinished:
        evidence = tuple(_last_sign(rank, events) for rank in unfinished)
        return Outcome(
            kind="crash", reason=f"ranks {_listed(unfinished)} left before their work was done", evidence=evidence
        )
    return Outcome(kind="ok")


def _finished(run: RunSpec, events: Sequence[Event]) -> bool:
    steps = sum(event["kind"] == "step" for event in events)
    return steps == run.workload.steps and any(event["kind"] == "end" for event in events)


def _failed_at(end: RankExit, events: Sequence[Sequence[Event]]) -> tuple[int, float]:
    """Order of failures: memory first, then ranks ended by a signal, then by the time of the error."""
    error = _error(events[end.rank])
    if error and _is_memory(error):
        return (0, error["t"])
    if end.signal in _FATAL:
        return (1, end.ended_at)
    return (2, error["t"] if error else end.ended_at)


def _error(events: Sequence[Event]) -> Event | None:
    return next((event for event in events if event["kind"] == "error"), None)


def _is_memory(error: Event) -> bool:
    message = str(error["message"]).lower()
    return error["type"] in _MEMORY_ERRORS or any(phrase in message for phrase in _MEMORY_PHRASES)


def _failure(end: RankExit, events: Sequence[Sequence[Event]], oom_kills: int) -> Outcome:
    error = _error(events[end.rank])
    sign = _last_sign(end.rank, events)
    if error:
        return Outcome(
            kind="oom" if _is_memory(error) else "crash",
            reason=f"rank {end.rank}: {error['type']}: {_first_line(str(error['message']))}",
            evidence=(sign, _last_lines(str(error["traceback"]))),
        )
    if end.signal is None:
        return Outcome(
            kind="crash",
            reason=f"rank {end.rank} left with exit code {end.exit_code}: {_last_words(end.log_tail)}",
            evidence=(sign, _last_lines(end.log_tail)),
        )
    name = signal.Signals(end.signal).name
    if end.signal == signal.SIGKILL and oom_kills:
        return Outcome(
            kind="oom",
            reason=f"the kernel ended rank {end.rank} for want of memory",
            evidence=(f"{name}; kernel out-of-memory kills during the run: {oom_kills}", sign),
        )
    return Outcome(
        kind="crash",
        reason=f"rank {end.rank} was ended by signal {end.signal} ({name})",
        evidence=(sign, _last_lines(end.log_tail)),
    )


def _timeout(run: RunSpec, exits: Sequence[RankExit], events: Sequence[Sequence[Event]]) -> Outcome:
    hung = [end for end in exits if end.killed_by_launcher]
    signs = tuple(_last_sign(end.rank, events) for end in hung)
    stacks = tuple(f"stacks of rank {end.rank}:\n{end.stacks.strip()}" for end in hung if end.stacks.strip())
    return Outcome(
        kind="timeout",
        reason=f"not done after cluster.deadline_s={run.cluster.deadline_s:g} s; ended by the launcher: "
        f"ranks {_listed([end.rank for end in hung])}",
        evidence=signs + stacks,
    )


def _last_sign(rank: int, events: Sequence[Sequence[Event]]) -> str:
    """What a rank last told before it fell silent."""
    phases = [event["name"] for event in events[rank] if event["kind"] == "phase"]
    steps = sum(event["kind"] == "step" for event in events[rank])
    if not events[rank]:
        return f"rank {rank} wrote no event"
    return f"last sign of rank {rank}: phase {phases[-1] if phases else 'start'}, steps done: {steps}"


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "(no message)")


def _last_words(text: str) -> str:
    return _first_line("\n".join(reversed(text.splitlines())))


def _last_lines(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-_EVIDENCE_LINES:]) or "the rank printed nothing"


def assemble(
    run: RunSpec, exits: Sequence[RankExit], events: Sequence[Sequence[Event]], circumstances: Circumstances
) -> dict[str, Any]:
    """The content of result.json of a run whose ranks were started."""
    outcome = outcome_of(run, exits, events, circumstances.kernel_oom_kills)
    measured = _measurements(run, events, circumstances.peak_flops_per_s) if outcome.kind == "ok" else {}
    return {
        **_frame(run, outcome, circumstances.testbed, circumstances.attempt),
        "evidence": [*outcome.evidence, *circumstances.earlier],
        "peak_flops_per_s": circumstances.peak_flops_per_s,
        "wall_s": _wall(events, circumstances),
        "started_at": circumstances.started_at,
        **measured,
    }


def without_launch(run: RunSpec, outcome: Outcome, testbed: str, attempt: int) -> dict[str, Any]:
    """The content of result.json of a run that was never started: illegal, or its data cannot be had."""
    return _frame(run, outcome, testbed, attempt)


def is_result(content: Any, run_id: str) -> bool:
    """Whether `content` is a whole result of the run `run_id`."""
    return (
        isinstance(content, dict)
        and content.get("schema") == SCHEMA
        and content.get("run_id") == run_id
        and content.get("outcome") in OUTCOMES
        and content.keys() >= _KEYS
    )


def _frame(run: RunSpec, outcome: Outcome, testbed: str, attempt: int) -> dict[str, Any]:
    """Every key of a result; what only a finished training has is None."""
    infeasible = outcome.kind == "infeasible"
    return {
        "schema": SCHEMA,
        "run_id": run.run_id,
        "outcome": outcome.kind,
        "reason": outcome.reason,
        "evidence": list(outcome.evidence),
        "testbed": testbed,
        "tier": "measured",
        "model": run.model.name,
        "family": run.model.family,
        "strategy": run.strategy.label,
        "engine": run.strategy.engine,
        "world": run.strategy.devices,
        "loss": None,
        "grad_norm": None,
        "step_time_s": None,
        "ttft_s": None,
        "tpot_s": None,
        "tokens_per_s": None,
        "mfu": None,
        "model_flops_per_step": None if infeasible else model_flops_per_step(run),
        "flop_convention": FLOP_CONVENTION,
        "peak_flops_per_s": None,
        "parameters": None,
        "peak_bytes": None,
        "comm": None,
        "wall_s": None,
        "started_at": None,
        "attempt": attempt,
        "repeat": run.repeat,
        "seed": run.seed,
    }


def _measurements(run: RunSpec, events: Sequence[Sequence[Event]], peak_flops_per_s: float) -> dict[str, Any]:
    first = [event for event in events[0] if event["kind"] == "step"]
    times = _step_times(events)
    median = statistics.median(times)
    phase, spread = run.workload.phase, _spread(times)
    training = phase == "train"
    return {
        "loss": [event["loss"] for event in first] if training else None,
        "grad_norm": [event["grad_norm"] for event in first] if training else None,
        "step_time_s": spread,
        "ttft_s": _time_to_first_token(phase, spread, events),
        "tpot_s": spread if phase == "decode" else None,
        "tokens_per_s": run.tokens_per_step / median,
        "mfu": model_flops_per_step(run) / (median * peak_flops_per_s),
        "parameters": next(event["parameters"] for event in events[0] if event["kind"] == "model"),
        "peak_bytes": _peak_bytes(events),
        "comm": _comm(events, len(times)),
    }


def _spread(times: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(times), "min": min(times), "max": max(times), "n": len(times)}


def _time_to_first_token(
    phase: str, step: Mapping[str, float], events: Sequence[Sequence[Event]]
) -> Mapping[str, float] | None:
    """Of the slowest rank: every step of a prefill, the one prefill before decoding."""
    if phase == "decode":
        return _spread([max(event["seconds"] for event in _of_kind("prefill", events))])
    return step if phase == "prefill" else None


def _step_times(events: Sequence[Sequence[Event]]) -> list[float]:
    """Seconds of each timed step: of the rank that took longest."""
    by_step: dict[int, list[float]] = defaultdict(list)
    for event in _of_kind("step", events):
        if not event["warmup"]:
            by_step[event["step"]].append(event["seconds"])
    return [max(by_step[step]) for step in sorted(by_step)]


def _peak_bytes(events: Sequence[Sequence[Event]]) -> dict[str, int] | None:
    """Largest rank's bytes in each category; `total` is the largest rank's sum on its device. None if none was seen."""
    seen = list(_of_kind("memory", events))
    if not seen:
        return None
    by_category = {name: max(event[name] for event in seen) for name in MEMORY_CATEGORIES}
    on_device = [name for name in MEMORY_CATEGORIES if name != "host"]
    return {**by_category, "total": max(sum(event[name] for name in on_device) for event in seen)}


def _comm(events: Sequence[Sequence[Event]], timed_steps: int) -> list[dict[str, Any]]:
    """Rows by op, group and its size: totals per timed step, mean over ranks (a rank without the row counts as 0)."""
    totals: dict[tuple[str, str, int], dict[str, float]] = defaultdict(lambda: dict.fromkeys(_COMM_TOTALS, 0))
    for event in _of_kind("comm", events):
        row = totals[event["op"], event["group"], event["group_size"]]
        for name in _COMM_TOTALS:
            row[name] += event[name]
    share = timed_steps * len(events)
    return [
        {"op": op, "group": group, "group_size": size, **{name: row[name] / share for name in _COMM_TOTALS}}
        for (op, group, size), row in sorted(totals.items())
    ]


def _wall(events: Sequence[Sequence[Event]], circumstances: Circumstances) -> dict[str, float | None]:
    """start_up: launch until every rank has joined the others; training: from there to the last event."""
    joined = [event["t"] for event in _of_kind("phase", events) if event["name"] == "build"]
    all_joined = len(joined) == len(events)
    last = max((event["t"] for rank in events for event in rank), default=None)
    return {
        "start_up": max(joined) - circumstances.started_at if all_joined else None,
        "training": last - max(joined) if all_joined and last is not None else None,
        "total": circumstances.total_s,
    }


def _of_kind(kind: str, events: Sequence[Sequence[Event]]) -> Iterable[Event]:
    return (event for rank in events for event in rank if event["kind"] == kind)


_KEYS: frozenset[str] = frozenset(
    {
        *("schema", "run_id", "outcome", "reason", "evidence", "testbed", "tier", "model", "family", "strategy"),
        *(
            "engine",
            "world",
            "loss",
            "grad_norm",
            "step_time_s",
            "ttft_s",
            "tpot_s",
            "tokens_per_s",
            "mfu",
            "model_flops_per_step",
        ),
        *("model_flops_per_step", "flop_convention", "peak_flops_per_s", "parameters", "peak_bytes", "comm"),
        *("wall_s", "started_at", "attempt", "repeat", "seed"),
    }
)


def line_of(result: Mapping[str, Any]) -> str:
    """A result in a few words."""
    if result["outcome"] == "ok":
        return f"ok, {result['step_time_s']['median']:.4g} s a step"
    return f"{result['outcome']}: {result['reason']}"
