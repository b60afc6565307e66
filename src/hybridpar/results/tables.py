"""One study's run folders -> `runs`, `steps`, `collectives`, `memory`, one Parquet file each.

Every cell of the study is a row of `runs`, whatever its outcome; a cell without a result is an error that names it.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hybridpar.events import read_all_events
from hybridpar.results.schemas import TABLES, TableError, checked
from hybridpar.study import Cell, Study

Row = dict[str, Any]


def build(study: Study, runs_dir: Path, out_dir: Path) -> dict[str, int]:
    """Write the tables of a study.

    Args:
        study: whose cells to collect.
        runs_dir: holds a folder `<run_id>` for each.
        out_dir: where the Parquet files go.

    Returns:
        Number of rows by table.

    Raises:
        TableError: results are missing or do not fit the schema.
    """
    missing = [cell for cell in study.cells if not (runs_dir / cell.run.run_id / "result.json").is_file()]
    if missing:
        first = missing[0].run
        raise TableError(
            f"{len(missing)} of {len(study.cells)} runs of study {study.name} have no result in {runs_dir}; "
            f"the first is {first.run_id} ({first.model.name} {first.strategy.label})"
        )
    rows: dict[str, list[Row]] = {name: [] for name in TABLES}
    for cell in study.cells:
        for name, found in _rows_of(study.name, cell, runs_dir / cell.run.run_id).items():
            rows[name] += found
    frames = {name: checked(name, found) for name, found in rows.items()}
    out_dir.mkdir(parents=True, exist_ok=True)
    for name, frame in frames.items():
        _write(name, pa.Table.from_pandas(frame, preserve_index=False), out_dir / f"{name}.parquet")
    return {name: len(frame) for name, frame in frames.items()}


def _write(name: str, table: pa.Table, path: Path) -> None:
    """Atomically, with meaning and unit of every column in the file's metadata."""
    meanings = {column: {"meaning": c.meaning, "unit": c.unit} for column, c in TABLES[name].items()}
    described = table.replace_schema_metadata({**(table.schema.metadata or {}), b"columns": json.dumps(meanings)})
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    pq.write_table(described, temporary)
    temporary.replace(path)


def _rows_of(study: str, cell: Cell, folder: Path) -> dict[str, list[Row]]:
    result = json.loads((folder / "result.json").read_text())
    environment = json.loads((folder / "environment.json").read_text())
    where = {"run_id": result["run_id"], "tier": result["tier"]}
    ok = result["outcome"] == "ok"
    return {
        "runs": [{**where, **_run_row(study, cell, result, environment)}],
        "steps": [{**where, **row} for row in _steps(folder, cell.run.strategy.devices)] if ok else [],
        "collectives": [{**where, **row} for row in result["comm"] or []],
        "memory": [
            {**where, "category": category, "bytes": size} for category, size in (result["peak_bytes"] or {}).items()
        ],
    }


def _run_row(study: str, cell: Cell, result: Mapping[str, Any], environment: Mapping[str, Any]) -> Row:
    run = cell.run
    strategy, workload = run.strategy, run.workload
    step, wall = result["step_time_s"] or {}, result["wall_s"] or {}
    return {
        "study": study,
        "sweeps": ",".join(cell.sweeps),
        **{key: result[key] for key in ("testbed", "outcome", "reason", "model", "family", "strategy", "engine")},
        "world": strategy.devices,
        **{axis: getattr(strategy, axis) for axis in ("dp", "tp", "pp", "cp", "ep", "zero", "sp", "schedule")},
        "recompute": strategy.recompute,
        "overlap": strategy.overlap,
        **{key: getattr(workload, key) for key in ("seq_len", "global_batch", "micro_batch", "precision", "optimizer")},
        "seed": run.seed,
        "repeat": run.repeat,
        "device": environment["device"],
        "cores": environment["cores"],
        "launcher": run.cluster.launcher,
        "tokens_per_step": run.tokens_per_step,
        "parameters": result["parameters"],
        **{f"step_s_{key}": step.get(key) for key in ("median", "min", "max")},
        "timed_steps": step.get("n"),
        **{key: result[key] for key in ("tokens_per_s", "mfu", "model_flops_per_step", "peak_flops_per_s")},
        "peak_bytes": (result["peak_bytes"] or {}).get("total"),
        "last_loss": result["loss"][-1] if result["loss"] else None,
        **{f"{key}_s": wall.get(key) for key in ("start_up", "training", "total")},
    }


def _steps(folder: Path, world: int) -> Iterable[Row]:
    by_step: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for events_of_rank in read_all_events(folder, world):
        for event in events_of_rank:
            if event["kind"] == "step":
                by_step[event["step"]].append(event)
    for step, events in sorted(by_step.items()):
        first = events[0]
        yield {
            "step": step,
            "warmup": first["warmup"],
            "seconds": max(event["seconds"] for event in events),
            "seconds_min": min(event["seconds"] for event in events),
            "loss": first["loss"],
            "grad_norm": first["grad_norm"],
        }
