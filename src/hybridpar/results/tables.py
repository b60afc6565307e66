"""One study's run folders -> `runs`, `ranks`, `steps`, `collectives`, `memory`, one Parquet file each.

Every cell of the study is a row of `runs`, whatever its outcome; a cell without a result is an error that names it.
"""

from __future__ import annotations

import json
import os
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hybridpar.events import Event, read_all_events
from hybridpar.launch.folder import RunFolder
from hybridpar.launch.result import MEMORY_CATEGORIES
from hybridpar.mesh import RankGrid
from hybridpar.results.schemas import TABLES, TableError, checked
from hybridpar.specs import RunSpec
from hybridpar.study import Cell, Study

Row = dict[str, Any]

_STRATEGY = (
    *("dp", "tp", "pp", "cp", "ep", "zero", "zero_group", "sp", "cp_kind", "schedule", "virtual", "recompute"),
    *("offload", "overlap"),
)
_WORKLOAD = ("phase", "seq_len", "global_batch", "micro_batch", "precision", "optimizer")


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
    found = [(cell, RunFolder(runs_dir / cell.run.run_id).result(cell.run.run_id)) for cell in study.cells]
    finished = [(cell, result) for cell, result in found if result is not None]
    missing = [cell.run for cell, result in found if result is None]
    if missing:
        first = missing[0]
        raise TableError(
            f"{len(missing)} of {len(study.cells)} runs of study {study.name} have no result in {runs_dir}; "
            f"the first is {first.run_id} ({first.model.name} {first.strategy.label}); hybridpar batch makes them"
        )
    rows: dict[str, list[Row]] = {name: [] for name in TABLES}
    for cell, result in finished:
        for name, new in _rows_of(study.name, cell, runs_dir / cell.run.run_id, result).items():
            rows[name] += new
    frames = {name: checked(name, content) for name, content in rows.items()}
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


def _rows_of(study: str, cell: Cell, folder: Path, result: Mapping[str, Any]) -> dict[str, list[Row]]:
    environment = json.loads((folder / "environment.json").read_text())
    where = {"run_id": result["run_id"], "tier": result["tier"]}
    ok = result["outcome"] == "ok"
    events = read_all_events(folder, cell.run.strategy.devices) if ok else ()
    return {
        "runs": [{**where, **_run_row(study, cell, result, environment)}],
        "ranks": [{**where, **_rank_row(cell.run, rank, diary)} for rank, diary in enumerate(events)],
        "steps": [{**where, **row} for row in _steps(events)],
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
        **{key: getattr(strategy, key) for key in _STRATEGY},
        **{key: getattr(workload, key) for key in _WORKLOAD},
        "seed": run.seed,
        "repeat": run.repeat,
        "device": environment["device"],
        "cores": environment["cores"],
        "launcher": run.cluster.launcher,
        "tokens_per_step": run.tokens_per_step,
        "parameters": result["parameters"],
        **{f"step_s_{key}": step.get(key) for key in ("median", "min", "max")},
        "timed_steps": step.get("n"),
        **{key: (result[key] or {}).get("median") for key in ("ttft_s", "tpot_s")},
        **{key: result[key] for key in ("tokens_per_s", "mfu", "model_flops_per_step", "peak_flops_per_s")},
        "peak_bytes": (result["peak_bytes"] or {}).get("total"),
        "last_loss": result["loss"][-1] if result["loss"] else None,
        **{f"{key}_s": wall.get(key) for key in ("start_up", "training", "total")},
    }


def _rank_row(run: RunSpec, rank: int, diary: Sequence[Event]) -> Row:
    """What one rank of a finished run told: per timed step, and at its peak.

    Raises:
        TableError: its events are gone.
    """
    timed = [event["seconds"] for event in diary if event["kind"] == "step" and not event["warmup"]]
    if not timed:
        raise TableError(f"run {run.run_id} ended ok, but events-{rank}.jsonl holds no timed step; remove its folder")
    comm = [event for event in diary if event["kind"] == "comm"]
    held = [event for event in diary if event["kind"] == "memory"]
    by_category = {name: max((event[name] for event in held), default=None) for name in MEMORY_CATEGORIES}
    totals = [sum(event[name] for name in MEMORY_CATEGORIES if name != "host") for event in held]
    return {
        "rank": rank,
        **asdict(RankGrid.of(run.strategy).coordinate(rank)),
        "step_s_median": statistics.median(timed),
        "exposed_s": sum(event["exposed_seconds"] for event in comm) / len(timed),
        "wire_bytes": sum(event["wire_bytes"] for event in comm) / len(timed),
        **{f"{name}_bytes": size for name, size in by_category.items()},
        "total_bytes": max(totals, default=None),
    }


def _steps(diaries: Sequence[Sequence[Event]]) -> Iterable[Row]:
    by_step: dict[int, list[Event]] = defaultdict(list)
    for diary in diaries:
        for event in diary:
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
