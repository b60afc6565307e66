"""A trace as a file that chrome://tracing and ui.perfetto.dev show: memory by category, and every call.

Its clock counts operators, one a microsecond: a trace without a device takes no time that means anything.
Format: "Trace Event Format" (Google), complete events (X), counters (C) and metadata (M).
"""

from __future__ import annotations

from typing import Any

from hybridpar.trace.tracer import Trace, TracedCall


def chrome_events(trace: Trace) -> dict[str, Any]:
    """The whole file as plain data."""
    groups = sorted({call.group for call in trace.calls})
    lines = {group: number for number, group in enumerate(groups, start=1)}
    names = [_named(trace.rank, number, f"over {group}") for group, number in lines.items()]
    calls = [_call(trace.rank, lines[call.group], call) for call in trace.calls]
    memory = [
        {"ph": "C", "pid": trace.rank, "name": "bytes held", "ts": time, "args": dict(held)}
        for time, held in trace.timeline
    ]
    return {
        "traceEvents": [*names, *memory, *calls],
        "otherData": {"run_id": trace.run_id, "rank": trace.rank, "clock": "operators so far, not time"},
    }


def _named(rank: int, number: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": number, "name": "thread_name", "args": {"name": name}}


def _call(rank: int, line: int, call: TracedCall) -> dict[str, Any]:
    lasts = 1 if call.end is None else max(1, call.end - call.start)
    told = {"ranks": call.group_size, "dtype": call.dtype, "bytes": call.bytes, "blocking": call.is_blocking}
    return {"ph": "X", "pid": rank, "tid": line, "name": call.op, "ts": call.start, "dur": lasts, "args": told}
