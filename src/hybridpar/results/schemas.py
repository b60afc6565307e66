"""What each table holds: columns, types, units, allowed values and key; checked whenever a table is written.

Nothing is coerced: a value of another type than its column's is refused, so that no 1.5 becomes a step 1 and no "no"
a True. Only a whole number may stand where a measure is wanted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import pandera.pandas as pa
from pandera.errors import SchemaError, SchemaErrors

from hybridpar.launch.result import MEMORY_CATEGORIES
from hybridpar.outcome import OUTCOMES

TIERS = ("published", "measured", "traced", "predicted")
CATEGORIES = (*MEMORY_CATEGORIES, "total")


class TableError(ValueError):
    """A table does not hold what its schema says; one sentence."""


@dataclass(frozen=True)
class Column:
    """One column. `unit` is empty for names and counts."""

    dtype: str
    meaning: str
    unit: str = ""
    nullable: bool = False
    legal: tuple[Any, ...] = ()
    least: float | None = None


def _text(meaning: str, *legal: str, nullable: bool = False) -> Column:
    return Column("str", meaning, legal=legal, nullable=nullable)


def _count(meaning: str, least: float = 0, unit: str = "") -> Column:
    return Column("int64", meaning, unit=unit, least=least)


def _measure(meaning: str, unit: str, *, nullable: bool = False) -> Column:
    return Column("float64", meaning, unit=unit, nullable=nullable, least=0)


_WHERE = {
    "run_id": _text("hash of the run's spec and the training code's version"),
    "tier": _text("kind of evidence", *TIERS),
}

TABLES: Mapping[str, Mapping[str, Column]] = {
    "runs": {
        **_WHERE,
        "study": _text("study"),
        "sweeps": _text("sweeps that name the run, comma-separated"),
        "testbed": _text("where it ran"),
        "outcome": _text("how it ended", *OUTCOMES),
        "reason": _text("why it did not end ok; empty when it did"),
        "model": _text("model"),
        "family": _text("kind of network", "transformer", "mamba2", "hybrid", "moe"),
        "strategy": _text("short name of the strategy"),
        "engine": _text("what trained", "torch", "deepspeed"),
        "world": _count("devices", 1),
        "dp": _count("data replicas", 1),
        "tp": _count("tensor-parallel degree", 1),
        "pp": _count("pipeline stages", 1),
        "cp": _count("context-parallel degree", 1),
        "ep": _count("expert-parallel degree", 1),
        "zero": _count("ZeRO stage"),
        "zero_group": _count("ranks a copy of sharded state is spread over; 0: all"),
        "sp": Column("bool", "sequence parallelism"),
        "cp_kind": _text("how attention crosses cp ranks"),
        "schedule": _text("pipeline schedule"),
        "virtual": _count("pipeline stages a device", 1),
        "recompute": _text("recomputation"),
        "offload": _text("what lives in host memory"),
        "overlap": Column("bool", "communication during computation"),
        "phase": _text("what was done", "train", "prefill", "decode"),
        "seq_len": _count("tokens a sequence", 1),
        "global_batch": _count("sequences a step", 1),
        "micro_batch": _count("sequences a forward pass", 1),
        "precision": _text("number format"),
        "optimizer": _text("optimizer"),
        "seed": _count("seed"),
        "repeat": _count("which repetition"),
        "device": _text("cpu or cuda", "cpu", "cuda"),
        "cores": _count("CPU cores of the machine", 1),
        "launcher": _text("how ranks were started"),
        "tokens_per_step": _count("tokens a step", 1),
        "parameters": Column("Int64", "parameters of the whole model", nullable=True, least=1),
        "step_s_median": _measure("step time, slowest rank, median over timed steps", "s", nullable=True),
        "step_s_min": _measure("the same, smallest", "s", nullable=True),
        "step_s_max": _measure("the same, largest", "s", nullable=True),
        "timed_steps": Column("Int64", "number of timed steps", nullable=True, least=1),
        "ttft_s": _measure("time to the first token, slowest rank, median (inference)", "s", nullable=True),
        "tpot_s": _measure("time per output token, slowest rank, median (decode)", "s", nullable=True),
        "tokens_per_s": _measure("throughput", "tokens/s", nullable=True),
        "mfu": _measure("model FLOP utilisation", "1", nullable=True),
        "model_flops_per_step": _measure("model FLOPs of a step", "FLOP", nullable=True),
        "peak_flops_per_s": _measure("measured matmul ceiling of the devices used", "FLOP/s", nullable=True),
        "peak_bytes": _measure("peak bytes held, largest rank", "B", nullable=True),
        "last_loss": Column("float64", "loss of the last step", unit="nat/token", nullable=True),
        "start_up_s": _measure("from launch to the last rank joined", "s", nullable=True),
        "training_s": _measure("from joined to the last event", "s", nullable=True),
        "total_s": _measure("wall time of the run", "s", nullable=True),
    },
    "ranks": {
        **_WHERE,
        "rank": _count("rank"),
        **{axis: _count(f"coordinate on the axis {axis}") for axis in ("dp", "tp", "pp", "cp")},
        "step_s_median": _measure("step time of this rank, median over timed steps", "s"),
        "exposed_s": _measure("spent waiting for communication, mean over timed steps", "s"),
        "wire_bytes": _measure("bytes sent, mean over timed steps", "B"),
        **{
            f"{category}_bytes": Column("Int64", f"peak: {category}", unit="B", nullable=True, least=0)
            for category in CATEGORIES
        },
    },
    "steps": {
        **_WHERE,
        "step": _count("step"),
        "warmup": Column("bool", "left out of timings"),
        "seconds": _measure("slowest rank", "s"),
        "seconds_min": _measure("fastest rank", "s"),
        "loss": Column("float64", "mean over the global batch (training)", unit="nat/token", nullable=True),
        "grad_norm": _measure("global gradient norm before clipping (training)", "1", nullable=True),
    },
    "collectives": {
        **_WHERE,
        "op": _text("operation"),
        "group": _text("axes of the group"),
        "group_size": _count("ranks of the group", 2),
        "calls": _measure("calls a timed step, mean over ranks", "1"),
        "bytes": _measure("logical bytes a timed step, mean over ranks", "B"),
        "wire_bytes": _measure("bytes sent a timed step, mean over ranks", "B"),
        "seconds": _measure("from call to completion", "s"),
        "exposed_seconds": _measure("of that, spent waiting", "s"),
    },
    "memory": {
        **_WHERE,
        "category": _text("what the bytes are for", *CATEGORIES),
        "bytes": _measure("peak, largest rank", "B"),
    },
}

# What names one row of each table.
KEYS: Mapping[str, tuple[str, ...]] = {
    "runs": ("run_id",),
    "ranks": ("run_id", "rank"),
    "steps": ("run_id", "step"),
    "collectives": ("run_id", "op", "group", "group_size"),
    "memory": ("run_id", "category"),
}

_PYTHON: Mapping[str, tuple[type, ...]] = {
    "str": (str,),
    "bool": (bool,),
    "int64": (int,),
    "Int64": (int,),
    "float64": (float, int),
}


def checked(name: str, rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Rows as a table of the schema `name`.

    Raises:
        TableError: a column is missing or unknown, a value is of another type or not allowed, or two rows have one key.
    """
    columns = TABLES[name]
    for row in rows:
        _check_row(name, row)
    frame = pd.DataFrame({column: _series(rows, column, meaning) for column, meaning in columns.items()})
    schema = pa.DataFrameSchema(
        {column: _pandera(column, meaning) for column, meaning in columns.items()},
        strict=True,
        unique=list(KEYS[name]),
    )
    try:
        return schema.validate(frame)
    except (SchemaError, SchemaErrors) as error:
        raise TableError(f"table {name}: {' '.join(str(error).split())}") from None


def _check_row(name: str, row: Mapping[str, Any]) -> None:
    columns, where = TABLES[name], f"table {name}: run {row.get('run_id')}"
    strange = row.keys() - columns.keys()
    if strange:
        raise TableError(f"{where} has the unknown column {', '.join(sorted(strange))}")
    lacking = columns.keys() - row.keys()
    if lacking:
        raise TableError(f"{where} lacks the column {', '.join(sorted(lacking))}")
    for column, meaning in columns.items():
        if not _fits(row[column], meaning):
            wanted = meaning.dtype.lower() + (", or nothing" if meaning.nullable else "")
            raise TableError(f"{where}: {column}={row[column]!r} is not legal; legal: {wanted}")


def _fits(value: Any, column: Column) -> bool:
    if value is None:
        return column.nullable
    if isinstance(value, bool):
        return column.dtype == "bool"
    if isinstance(value, float) and not math.isfinite(value):
        return False
    return isinstance(value, _PYTHON[column.dtype])


def _series(rows: Sequence[Mapping[str, Any]], name: str, column: Column) -> pd.Series[Any]:
    return pd.Series([row[name] for row in rows], dtype=column.dtype, name=name)


def _pandera(name: str, column: Column) -> pa.Column:
    checks = [pa.Check.isin(column.legal)] if column.legal else []
    checks += [pa.Check.ge(column.least)] if column.least is not None else []
    return pa.Column(column.dtype, checks, nullable=column.nullable, name=name)
