"""A traced rank sees what a real one sees; sizes that no machine here could hold are traced all the same."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from hybridpar.comm.process_group import ProcessMesh
from hybridpar.launch.forked import preload
from hybridpar.parity_layouts import parity_run
from hybridpar.specs import parse_run_spec
from hybridpar.trace.tracer import NotTracedError, Trace, measure_step, trace_step
from tests.parallel.ranks import batch_of, on_ranks

_ADAMW = {"optimizer": "adamw", "learning_rate": 1e-3}


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("transformer", {}),
        ("transformer", {"dp": 2, "zero": 3}),
        ("transformer", {"tp": 2, "sp": True, "recompute": "full"}),
        ("transformer", {"pp": 2, "schedule": "zb-v"}),
        ("hybrid", {"cp": 2, "recompute": "selective"}),
        ("mamba2", {"tp": 2, "pp": 2, "schedule": "1f1b"}),
        ("moe", {"dp": 2, "zero": 1}),
    ],
)
def test_traced_equals_real(family: str, layout: dict[str, Any], tmp_path: Path) -> None:
    preload()
    run = parity_run(family, layout, precision="fp32", workload=_ADAMW)

    def body(mesh: ProcessMesh) -> Trace:
        return measure_step(run, mesh, [batch_of(run, mesh.coordinate.dp, seed) for seed in range(3)])

    for real in on_ranks(run.strategy, tmp_path, body):
        traced = trace_step(run, real.rank)
        assert traced.flops == real.flops
        assert traced.comm == real.comm
        assert traced.held == real.held
        assert _sent(traced) == _sent(real)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("family", "layout"), [("hybrid", {"tp": 2, "cp": 2}), ("transformer", {"pp": 2, "dp": 2}), ("moe", {"cp": 2})]
)
def test_traced_serving_equals_real(phase: str, family: str, layout: dict[str, Any], tmp_path: Path) -> None:
    preload()
    run = parity_run(family, layout, precision="fp32", workload={"phase": phase, "steps": 3, "micro_batch": 2})

    def body(mesh: ProcessMesh) -> Trace:
        return measure_step(run, mesh, [batch_of(run, mesh.coordinate.dp, 0)])

    for real in on_ranks(run.strategy, tmp_path, body):
        traced = trace_step(run, real.rank)
        assert traced.flops == real.flops
        assert traced.comm == real.comm
        assert traced.held == real.held
        assert _sent(traced) == _sent(real)


def _sent(trace: Trace) -> list[tuple[str, str, int, str, int]]:
    return sorted((call.op, call.group, call.group_size, call.dtype, call.bytes) for call in trace.calls)


def test_the_peak_is_the_largest_sum_of_the_timeline() -> None:
    trace = trace_step(parity_run("transformer", {"tp": 2}, precision="fp32", workload=_ADAMW), 1)
    assert sum(trace.peak.values()) == max(sum(held.values()) for _, held in trace.timeline)
    assert trace.peak["activations"] <= trace.held.activations


def test_seventy_billion_parameters_on_a_thousand_devices() -> None:
    run = parse_run_spec(
        {
            "model": {"preset": "llama-3-70b", "layers": 16},
            "strategy": {"dp": 64, "tp": 8, "pp": 2, "sp": True, "zero": 1},
            "workload": {"seq_len": 8192, "global_batch": 128, "precision": "bf16"},
        }
    )
    trace = trace_step(run, 1023)
    assert trace.held.parameters > 2**30
    assert {row.group_size for row in trace.comm} == {2, 8, 64}


@pytest.mark.parametrize(
    ("layout", "rank", "sentence"),
    [
        ({"engine": "deepspeed", "dp": 2}, 0, "strategy.engine=deepspeed cannot be traced; legal: torch"),
        ({"tp": 2}, 2, "rank=2 is not in the grid; legal: 0 to 1"),
    ],
)
def test_what_cannot_be_traced_says_so(layout: dict[str, Any], rank: int, sentence: str) -> None:
    with pytest.raises(NotTracedError, match=sentence):
        trace_step(parity_run("transformer", layout, precision="fp32"), rank)


def test_a_trace_is_plain_data() -> None:
    trace = trace_step(parity_run("mamba2", {}, precision="fp32"), 0)
    assert trace.row()["held"] == dataclasses.asdict(trace.held)
