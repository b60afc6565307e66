"""A SYNTHETIC study for tests of drawing and wording only: invented times, never shown as results anywhere."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from hybridpar.artifacts.inputs import FAMILIES
from hybridpar.legality import infeasible_reason
from hybridpar.specs import RunSpec, parse_run_spec

_TESTBED, _TIER = "synthetic", "measured"
_COLUMNS = {
    "collectives": [
        *("run_id", "op", "group", "group_size", "calls", "bytes", "wire_bytes", "seconds", "exposed_seconds"),
    ],
}


def write(
    folder: Path,
    *,
    families: Sequence[str] = ("llama", "mamba2"),
    sizes: Sequence[str] = ("small", "medium", "large"),
    worlds: Sequence[int] = (1, 2, 4, 8),
    hybrids: bool = True,
    repeats: int = 2,
) -> tuple[Path, Path]:
    """Write the tables of an invented study; returns the folders of its tables and of its benchmarks."""
    models = [f"{family}-{size}" for family, size in itertools.product(families, sizes)]
    runs = [
        _spec(model, strategy, repeat)
        for model in models
        for strategy in _strategies(worlds, hybrids)
        for repeat in range(repeats)
    ]
    runs += [
        _spec(model, strategy, 0, phase=phase, seq_len=context, micro_batch=4)
        for model, phase, context in itertools.product(models, ("prefill", "decode"), (32, 128))
        for strategy in ({}, {"tp": 2}, {"pp": 2})
        if max(worlds) > 1
    ]
    tables = folder / "tables" / "synthetic"
    tables.mkdir(parents=True)
    generator = np.random.default_rng(1)
    rows = [_run_row(run, index, generator) for index, run in enumerate(runs)]
    ok = [(run, row) for run, row in zip(runs, rows, strict=True) if row["outcome"] == "ok"]
    frames = {
        "runs": rows,
        "steps": [step for run, row in ok for step in _step_rows(run, row, generator)],
        "collectives": [call for run, row in ok for call in _collective_rows(run, row)],
        "memory": [kept for run, row in ok for kept in _memory_rows(run, row)],
    }
    for name, content in frames.items():
        pd.DataFrame(content, columns=_COLUMNS.get(name)).to_parquet(tables / f"{name}.parquet")
    pd.DataFrame(theory_rows()).to_parquet(tables / "theory.parquet")
    bench = folder / "bench"
    bench.mkdir()
    pd.DataFrame(_bench_rows(generator)).to_parquet(bench / "collectives.parquet")
    (bench / "departures.json").write_text(json.dumps({"tier": _TIER, "environment": {}, "departures": _departures()}))
    return tables, bench


def _strategies(worlds: Sequence[int], hybrids: bool) -> list[dict[str, object]]:
    found: list[dict[str, object]] = [{}] if 1 in worlds else []
    for n in (world for world in worlds if world > 1):
        found += [{"dp": n}, {"dp": n, "zero": 1}, {"dp": n, "zero": 2}, {"dp": n, "zero": 3}]
        found += [{"dp": n, "zero": zero, "engine": "deepspeed"} for zero in range(4)]
        found += [{"tp": n}, {"tp": n, "sp": True}, {"cp": n}, {"cp": n, "cp_kind": "ulysses"}]
        found += [{"dp": n, "recompute": "full"}, {"dp": n, "zero": 2, "offload": "optimizer"}]
        found += [{"pp": n, "schedule": "zero-bubble"}, {"pp": n, "schedule": "interleaved"}]
        found += [
            {"pp": n},
            {"pp": n, "schedule": "gpipe"},
            {"dp": 2, "pp": n, "zero": 1},
            {"dp": 2, "pp": n, "zero": 1, "engine": "deepspeed"},
        ]
        if hybrids:
            degrees = itertools.product((1, 2, 4), repeat=3)
            found += [
                {"dp": dp, "tp": tp, "pp": pp}
                for dp, tp, pp in degrees
                if dp * tp * pp == n and sum(degree > 1 for degree in (dp, tp, pp)) > 1
            ]
    return found


def _spec(model: str, strategy: dict[str, object], repeat: int, **workload: object) -> RunSpec:
    usual = {"seq_len": 64, "global_batch": 8, "micro_batch": 1, "steps": 6, "warmup_steps": 2}
    content = {
        "model": {"preset": model},
        "workload": {**usual, **workload},
        "strategy": strategy,
        "cluster": {"preset": "local-cpu"},
        "repeat": repeat,
    }
    return parse_run_spec(content)


def _outcome(run: RunSpec, index: int) -> tuple[str, str]:
    reason = infeasible_reason(run)
    if reason:
        return "infeasible", reason
    if index % 97 == 13:
        return "crash", "rank 1 was killed by signal 9"
    return "ok", ""


def _run_row(run: RunSpec, index: int, generator: np.random.Generator) -> dict[str, object]:
    outcome, reason = _outcome(run, index)
    s = run.strategy
    cost = {"small": 0.02, "medium": 0.15, "large": 0.8}[run.model.name.rsplit("-", 1)[-1]]
    overhead = 1 + 0.08 * np.log2(s.tp) + 0.04 * np.log2(s.pp) + 0.05 * s.zero + (0.2 if s.engine == "deepspeed" else 0)
    if run.model.family == "mamba2":
        overhead += 0.1 * np.log2(s.pp) - 0.05 * np.log2(s.tp)
    seconds = cost * overhead / min(2, s.devices) * float(generator.uniform(0.98, 1.02))
    ok = outcome == "ok"
    return {
        "run_id": run.run_id,
        "outcome": outcome,
        "reason": reason,
        "testbed": _TESTBED,
        "tier": _TIER,
        "device": "cpu",
        "cores": 2,
        "model": run.model.name,
        "family": run.model.family,
        "strategy": s.label,
        "engine": s.engine,
        "world": s.devices,
        **{
            field: getattr(s, field)
            for field in (
                *("dp", "tp", "pp", "cp", "ep", "zero", "zero_group", "sp", "cp_kind", "schedule", "virtual"),
                *("recompute", "offload", "overlap"),
            )
        },
        "parameters": 1_000_000,
        "phase": run.workload.phase,
        "seq_len": run.workload.seq_len,
        "global_batch": run.workload.global_batch,
        "micro_batch": run.workload.micro_batch,
        "precision": run.workload.precision,
        "seed": run.seed,
        "repeat": run.repeat,
        "tokens_per_step": run.tokens_per_step,
        "step_time_s_median": seconds if ok else None,
        "mfu": 0.3 / overhead if ok else None,
    }


def _step_rows(run: RunSpec, row: dict[str, object], generator: np.random.Generator) -> list[dict[str, object]]:
    seconds = float(str(row["step_time_s_median"]))
    return [
        {
            "run_id": run.run_id,
            "step": step,
            "warmup": step < 2,
            "seconds": seconds * float(generator.uniform(0.95, 1.1)),
            "loss": (5.0 - 0.1 * step) * (1 + 1e-7 * run.strategy.tp),
        }
        for step in range(6)
    ]


def _collective_rows(run: RunSpec, row: dict[str, object]) -> list[dict[str, object]]:
    if run.strategy.devices == 1:
        return []
    group = "-".join(axis for axis in ("dp", "tp", "pp") if getattr(run.strategy, axis) > 1)
    exposed = float(str(row["step_time_s_median"])) * 0.1 * np.log2(run.strategy.devices)
    return [
        {
            "run_id": run.run_id,
            "op": "all_reduce",
            "group": group,
            "group_size": run.strategy.devices,
            "calls": 8,
            "bytes": 1_000_000,
            "wire_bytes": 1_500_000,
            "seconds": exposed * 1.2,
            "exposed_seconds": exposed,
        }
    ]


def _memory_rows(run: RunSpec, row: dict[str, object]) -> list[dict[str, object]]:
    s = run.strategy
    parameters = 4e6 / (s.tp * s.pp) / (s.dp if s.zero == 3 else 1)
    sizes = {
        "parameters": parameters,
        "gradients": 4e6 / (s.tp * s.pp) / (s.dp if s.zero >= 2 else 1),
        "optimizer": 8e6 / (s.tp * s.pp) / (s.dp if s.zero >= 1 else 1),
        "activations": 3e6 / s.dp,
        "buffers": 1e5,
    }
    if s.recompute == "full":
        sizes["activations"] /= 3
    if s.offload == "optimizer":
        sizes |= {"optimizer": 0, "host": sizes["optimizer"]}
    if run.workload.phase != "train":
        sizes = {"parameters": sizes["parameters"], "cache": 1e3 * run.workload.seq_len}
    sizes["total"] = sum(sizes.values()) - sizes.get("host", 0)
    return [{"run_id": run.run_id, "category": name, "bytes": int(size)} for name, size in sizes.items()]


def _departures() -> list[dict[str, object]]:
    kinds = ("loss", "grad_norm", "gradient", "parameter")
    apart = {f"departing_{kind}": 0.5 for kind in kinds} | {"departing_verdict": "differs", "departing_reason": None}
    refused: dict[str, object] = {f"departing_{kind}": None for kind in kinds}
    refused |= {"departing_verdict": "refused", "departing_reason": "AssertionError: not supported"}
    right = {f"correct_{kind}": 1e-7 for kind in kinds} | {"correct_verdict": "equal", "correct_reason": None}
    return [
        {
            "name": f"invented {n}",
            "setting": f"setting {n}",
            "differs": "gradients",
            "right": "ZeRO-1",
            "reproduced": again,
        }
        | {"departing_layout": "deepspeed-dp2", "correct_layout": "deepspeed-dp2-zero1"}
        | departing
        | right
        for n, (departing, again) in enumerate(((apart, True), (refused, True), (apart, False)))
    ]


def theory_rows() -> list[dict[str, object]]:
    """Four families, two layouts each: in all but the last family one number deviates by a tenth, one by a fifth for a
    reason, and two have no form."""
    rows = []
    for family, layout, rank in itertools.product(FAMILIES, ("dp2", "tp2-pp2"), (0, 1)):
        usual: dict[str, object] = {"family": family, "model": f"parity-{family}", "layout": layout, "devices": 4}
        usual |= {"run_id": f"{family} {layout}", "phase": "decode" if family == "hybrid" else "train"}
        usual |= {"rank": rank, "tier": "measured" if layout == "dp2" else "traced", "seen": 100, "note": ""}
        exact = {**usual, "predicted": 100, "verdict": "exact"}
        rows += [{**exact, "quantity": "flops", "item": item} for item in ("forward", "backward")]
        rows += [{**exact, "quantity": quantity, "item": "all_reduce over tp of 2"} for quantity in ("calls", "bytes")]
        activations = {"quantity": "activations", "item": "peak"}
        if layout == "dp2" or family == FAMILIES[-1]:
            rows.append({**exact, **activations})
        elif rank == 0:
            rows.append({**usual, **activations, "predicted": 90, "verdict": "deviates"})
            known = {"predicted": 80, "verdict": "explained", "note": "it is gathered later"}
            rows.append({**usual, **known, "quantity": "state", "item": "parameters"})
        else:
            why = {"predicted": None, "verdict": "uncovered", "note": "nobody wrote it down"}
            rows += [{**usual, **activations, **why}, {**usual, **why, "quantity": "flops", "item": "recompute"}]
    return rows


def _bench_rows(generator: np.random.Generator) -> list[dict[str, object]]:
    factors = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0, "send_recv": 0.0}
    return [
        {
            "op": op,
            "world": world,
            "bytes": size,
            "repeat": repeat,
            "wire_bytes": (wire := int(size * (factor * (world - 1) / world or 1))),
            "seconds": (1e-4 * world + wire / 1e9) * float(generator.uniform(0.9, 1.2)),
            "tier": _TIER,
        }
        for op, factor in factors.items()
        for world in (2, 4, 8)
        for size in (1024, 16384, 262144, 4194304)
        for repeat in range(5)
    ]
