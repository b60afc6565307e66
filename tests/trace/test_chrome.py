"""Traces as files for chrome://tracing and Perfetto."""

from __future__ import annotations

import json

from hybridpar.parity_layouts import parity_run
from hybridpar.trace.chrome import chrome_events
from hybridpar.trace.tracer import trace_step


def test_every_call_and_every_point_of_the_timeline_is_an_event() -> None:
    trace = trace_step(parity_run("transformer", {"tp": 2}, precision="fp32"), 0)
    told = json.loads(json.dumps(chrome_events(trace)))["traceEvents"]
    calls = [event for event in told if event["ph"] == "X"]
    assert sum(event["args"]["bytes"] for event in calls) == sum(row.bytes for row in trace.comm)
    assert len([event for event in told if event["ph"] == "C"]) == len(trace.timeline)
    assert all(event["dur"] > 0 and 0 <= event["ts"] <= trace.operators for event in calls)
