"""Load the tidy tables of one study, with the few derived columns that every figure and table uses."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from hybridpar.artifacts.artifact import Provenance

SIZES = ("toy", "small", "medium", "large")
FAMILIES = ("transformer", "mamba2", "hybrid", "moe")
MEMORY_CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "buffers", "host", "cache")

# Besides the strategy, what two runs must share to be repeats of one another.
_WORKLOAD = ("seq_len", "global_batch", "micro_batch", "precision")


# What is read of each table; more columns may be there.
COLUMNS = {
    "runs": (
        *("run_id", "outcome", "reason", "testbed", "tier", "model", "family", "strategy", "engine", "world"),
        *("dp", "tp", "pp", "cp", "ep", "zero", "zero_group", "sp", "cp_kind", "schedule", "virtual", "recompute"),
        *("offload", "overlap", "phase", "seq_len", "global_batch", "micro_batch"),
        *("precision", "seed", "repeat", "tokens_per_step", "parameters", "mfu", "device", "cores"),
    ),
    "steps": ("run_id", "step", "warmup", "seconds", "loss"),
    "collectives": ("run_id", "op", "group", "group_size", "calls", "bytes", "wire_bytes", "exposed_seconds"),
    "memory": ("run_id", "category", "bytes"),
    "bench": ("op", "world", "bytes", "repeat", "seconds", "wire_bytes", "tier"),
    "theory": (
        *("run_id", "family", "model", "layout", "phase", "rank", "quantity", "item", "tier"),
        *("predicted", "seen", "verdict", "note"),
    ),
}


_DEPARTURE = (
    *("name", "setting", "differs", "right", "reproduced"),
    *(f"{side}_{what}" for side in ("departing", "correct") for what in ("verdict", "reason")),
    *(f"{side}_{kind}" for side in ("departing", "correct") for kind in ("loss", "grad_norm", "gradient", "parameter")),
)


class InputError(ValueError):
    """A table or a column is not there; the message names the file and what makes it."""


@dataclass(frozen=True)
class Study:
    """The tables of one study.

    runs: one row a run, with `outcome` and `reason`; columns of the RunSpec and of result.json, and `size`, `kind`,
        `method`, `options` (derived here).
    steps: one row a step, with `warmup`: `seconds` (slowest rank), `loss`.
    collectives: one row a run, operation and group, per timed step (mean over ranks).
    memory: one row a run and category, `bytes` (largest rank).
    bench: one row a measured collective; empty when the benchmark was not run.
    departures: one row a setting with which DeepSpeed trains another model; empty when they were not measured.
    theory: one row a number of a closed form beside what the program did (see `hybridpar.check_theory`); empty when
        they were not compared.
    """

    name: str
    runs: pd.DataFrame
    steps: pd.DataFrame
    collectives: pd.DataFrame
    memory: pd.DataFrame
    bench: pd.DataFrame
    departures: pd.DataFrame
    theory: pd.DataFrame

    @property
    def finished(self) -> pd.DataFrame:
        """The runs that ended ok, of training and of serving."""
        return self.runs[self.runs["outcome"] == "ok"]

    @property
    def trained(self) -> pd.DataFrame:
        """The finished runs of training: what strategies are compared by, unless a question is about serving."""
        return self.finished[self.finished["phase"] == "train"]

    @property
    def served(self) -> pd.DataFrame:
        """The finished runs of serving."""
        return self.finished[self.finished["phase"] != "train"]

    def provenance(self, run_ids: pd.Series | None = None) -> Provenance:
        """Tier, testbed and runs of an artifact made from `run_ids` (all runs when left out)."""
        chosen = self.runs if run_ids is None else self.runs[self.runs["run_id"].isin(run_ids)]
        return Provenance(
            tier=_listed(chosen["tier"]),
            testbed=_listed(chosen["testbed"]),
            run_ids=tuple(sorted(chosen["run_id"].astype(str))),
        )

    def bench_provenance(self) -> Provenance:
        """Tier and testbed of an artifact made from the collective benchmark, which is no run."""
        return Provenance(tier=_listed(self.bench["tier"]), testbed=_listed(self.runs["testbed"]), run_ids=())

    def theory_provenance(self) -> Provenance:
        """Tiers and testbed of an artifact made from comparisons with closed forms, which are no runs of the study."""
        return Provenance(tier=_listed(self.theory["tier"]), testbed=_listed(self.runs["testbed"]), run_ids=())


def load(tables_dir: str | Path, bench_dir: str | Path, name: str | None = None) -> Study:
    """Read the tables of a study and, where they exist, the benchmarks and comparisons with theory, which are no runs.

    Args:
        tables_dir: holds the Parquet files of the study; theory.parquet may be missing.
        bench_dir: holds collectives.parquet and departures.json.
        name: of the study; the name of `tables_dir` when left out.

    Raises:
        InputError: a table of the study is missing, or lacks a column.
    """
    folder = Path(tables_dir)
    tables = {name: _read(folder / f"{name}.parquet", name) for name in ("runs", "steps", "collectives", "memory")}
    bench, departures = Path(bench_dir, "collectives.parquet"), Path(bench_dir, "departures.json")
    theory = folder / "theory.parquet"
    return Study(
        name=name or folder.name,
        runs=_with_derived_columns(tables["runs"]),
        steps=tables["steps"],
        collectives=tables["collectives"],
        memory=tables["memory"],
        bench=_read(bench, "bench") if bench.exists() else _nothing("bench"),
        departures=_read_departures(departures) if departures.exists() else pd.DataFrame(),
        theory=_read(theory, "theory") if theory.exists() else _nothing("theory"),
    )


def _read_departures(path: Path) -> pd.DataFrame:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        rows = pd.DataFrame(content["departures"]).assign(tier=content["tier"])
    except (ValueError, TypeError, KeyError):
        raise InputError(f"{path} holds no departures; hybridpar departures writes it") from None
    lacking = [column for column in _DEPARTURE if len(rows) and column not in rows]
    if lacking:
        raise InputError(f"{path} has no column {', '.join(lacking)}; write it anew with this version")
    return rows


def _nothing(table: str) -> pd.DataFrame:
    return pd.DataFrame(columns=list(COLUMNS[table]))


def _read(path: Path, table: str) -> pd.DataFrame:
    if not path.exists():
        raise InputError(f"{path} does not exist; the workflow's table rule writes it from the run folders")
    try:
        frame = pd.read_parquet(path)
    except (ValueError, OSError):  # pyarrow's errors are of these kinds
        raise InputError(f"{path} is no Parquet table; write it anew") from None
    lacking = [column for column in COLUMNS[table] if column not in frame]
    if lacking:
        raise InputError(f"{path} has no column {', '.join(lacking)}; write it anew with this version")
    return frame


def _with_derived_columns(runs: pd.DataFrame) -> pd.DataFrame:
    records = [{str(key): value for key, value in row.items()} for row in runs.to_dict("records")]
    derived = runs.assign(
        size=runs["model"].map(size_of),
        kind=[kind_of(row) for row in records],
        method=[method_of(row) for row in records],
        options=[options_of(row) for row in records],
    )
    return derived.assign(model=_model_labels(runs)).sort_values("run_id", ignore_index=True)


def _model_labels(runs: pd.DataFrame) -> pd.Series:
    """The model's name; with what differs of its workload where the study trains one model under several.

    Serving is compared by its workload anyway, and keeps the plain name.
    """
    training = runs[runs["phase"] == "train"]
    labels = runs["model"].copy()
    for _, group in training.groupby("model"):
        differs = [column for column in _WORKLOAD if group[column].nunique() > 1]
        for column in differs:
            labels[group.index] += f" {column.replace('_', ' ')} " + group[column].astype(str)
    return labels


def size_of(model: str) -> str:
    """`medium` of `llama-medium`; the whole name where it ends in no known size."""
    suffix = model.rsplit("-", 1)[-1]
    return suffix if suffix in SIZES else model


def split_axes(run: dict[str, object]) -> list[str]:
    """The axes a run splits over, outermost degree first as in the strategy's label."""
    return [axis for axis in ("dp", "tp", "pp", "cp") if int(str(run[axis])) > 1]


def kind_of(run: dict[str, object]) -> str:
    """The one axis that a run splits over (a key of style.KIND_COLOURS), `hybrid` of several, `recompute` of none."""
    axes = split_axes(run)
    if len(axes) > 1:
        return "hybrid"
    if not axes:
        return "one device" if run["recompute"] == "none" else "recompute"
    if axes != ["dp"]:
        return {"tp": "tensor", "pp": "pipeline", "cp": "context"}[axes[0]]
    if int(str(run["ep"])) > 1:
        return "expert"
    return "sharded data" if run["zero"] else "data"


def method_of(run: dict[str, object]) -> str:
    """What a strategy is called without its degrees, e.g. `FSDP2 resharding`, `TP+SP`, `DeepSpeed ZeRO-1`."""
    axes, deepspeed = split_axes(run), run["engine"] == "deepspeed"
    names = {
        "dp": _data_method(run),
        "tp": "TP+SP" if run["sp"] else "TP",
        "pp": f"PP {_SCHEDULES[str(run['schedule'])]}",
        "cp": f"CP {_CONTEXT[str(run['cp_kind'])]}",
    }
    name = " × ".join(names[axis] for axis in axes) or "one device"
    if "dp" not in axes and run["zero"]:
        name = f"{_data_method(run)} × {name}" if axes else _data_method(run)
    name = f"{name} {options_of(run)}".rstrip()
    return f"DeepSpeed {name}" if deepspeed else name


def options_of(run: dict[str, object]) -> str:
    """What a strategy does besides splitting, e.g. `full recompute`; empty for the usual."""
    options = [f"{run['recompute']} recompute"] if run["recompute"] != "none" else []
    options += [f"{run['offload']} offload"] if run["offload"] != "none" else []
    options += [] if run["overlap"] else ["no overlap"]
    return " ".join(options)


def _data_method(run: dict[str, object]) -> str:
    zero, ep = int(str(run["zero"])), int(str(run["ep"]))
    if ep > 1 and not zero:
        return "EP" if ep == run["dp"] else "DP+EP"
    if run["engine"] == "deepspeed":
        name = f"ZeRO-{zero}"
    elif run["zero_group"]:
        name = "HSDP" if zero == 3 else "HSDP keeping"
    else:
        name = ("DDP", "ZeRO-1", "FSDP2 keeping", "FSDP2 resharding")[zero]
    return f"{name}+EP" if ep > 1 else name


_SCHEDULES = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved": "interleaved",
    "zero-bubble": "zero-bubble",
    "zb-v": "ZB-V",
    "dualpipe-v": "DualPipe-V",
}
_CONTEXT = {"ring": "ring", "ulysses": "Ulysses"}


def _listed(values: pd.Series) -> str:
    return ", ".join(sorted(values.dropna().astype(str).unique())) or "none"
