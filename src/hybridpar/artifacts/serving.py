"""The arithmetic of serving: latency and throughput of prefill and decode, and what is cached."""

from __future__ import annotations

from typing import Any

import pandas as pd

from hybridpar.artifacts import comparison
from hybridpar.artifacts.inputs import FAMILIES, SIZES, Study

PHASES = ("prefill", "decode")
_CELL = ["family", "size", "model", "world", "kind", "method", "strategy", "phase", "seq_len", "global_batch"]


def cells(study: Study) -> pd.DataFrame:
    """One row for each strategy, phase, context and batch that was served.

    Columns: those that name the cell; `latency_s` with `latency_low` and `latency_high` (prefill: time to the first
    token, TTFT; decode: time per output token, TPOT; slowest rank); `tokens_per_s` with `tokens_low`, `tokens_high`
    (prefill: prompt tokens, decode: new tokens, of all sequences); `steps` (count); `cache_mb` (fullest rank);
    `weights_mb` (fullest rank); `wire_mb` (sent by a rank in a step, mean over ranks); `run_ids`.
    """
    runs = study.served[["run_id", *_CELL, "tokens_per_step"]]
    timed = study.steps.loc[~study.steps["warmup"].astype(bool), ["run_id", "seconds"]].merge(runs, on="run_id")
    if timed.empty:
        return pd.DataFrame(columns=[*_CELL, *_MEASURES])
    timed = timed.assign(tokens_per_s=timed["tokens_per_step"] / timed["seconds"])
    table = timed.groupby(_CELL, observed=True).agg(
        latency_s=("seconds", "median"),
        latency_low=("seconds", "min"),
        latency_high=("seconds", "max"),
        tokens_per_s=("tokens_per_s", "median"),
        tokens_low=("tokens_per_s", "min"),
        tokens_high=("tokens_per_s", "max"),
        steps=("seconds", "size"),
        run_ids=("run_id", lambda ids: tuple(sorted(set(ids)))),
    )
    table = table.reset_index().merge(_held(study, runs), on=_CELL)
    sizes = table["size"].map({size: position for position, size in enumerate(SIZES)}).fillna(len(SIZES))
    families, phases = table["family"].map(FAMILIES.index), table["phase"].map(PHASES.index)
    order = ["_size", "_family", "model", "_phase", "seq_len", "global_batch", "latency_s"]
    return table.assign(_size=sizes, _family=families, _phase=phases).sort_values(order, ignore_index=True)[
        [*_CELL, *_MEASURES]
    ]


_MEASURES = [
    *("latency_s", "latency_low", "latency_high", "tokens_per_s", "tokens_low", "tokens_high", "steps"),
    *("cache_mb", "weights_mb", "wire_mb", "run_ids"),
]


def _held(study: Study, runs: pd.DataFrame) -> pd.DataFrame:
    """Bytes kept and sent, median over repeats."""
    sent = study.collectives.groupby("run_id")["wire_bytes"].sum() / 1e6
    memory = comparison.memory_mb(study).rename(columns={"parameters_mb": "weights_mb"})
    per_run = runs.merge(memory[["run_id", "cache_mb", "weights_mb"]], on="run_id", how="left")
    per_run = per_run.assign(wire_mb=per_run["run_id"].map(sent).fillna(0.0))
    return per_run.groupby(_CELL, observed=True)[["cache_mb", "weights_mb", "wire_mb"]].median().reset_index()


def cache_per_sequence(study: Study) -> pd.DataFrame:
    """What one device caches for a sequence once it has been filled in, by context.

    Columns: family, size, model, seq_len, `kb` (10^3 bytes a sequence), `run_ids`.
    """
    table = cells(study)
    alone = table[(table["world"] == 1) & (table["phase"] == "decode")].dropna(subset=["cache_mb"])
    alone = alone.assign(kb=1e3 * alone["cache_mb"] / alone["global_batch"])
    grouped = alone.groupby(["family", "size", "model", "seq_len"], observed=True, sort=False)
    return grouped.agg(
        kb=("kb", "median"), run_ids=("run_ids", lambda ids: tuple(sorted({run for one in ids for run in one})))
    ).reset_index()


def fastest(table: pd.DataFrame) -> pd.DataFrame:
    """The lowest latency of each model, phase, context and batch, of two strategies or more.

    Columns: model, family, phase, seq_len, global_batch, strategy, world, latency_s, `over_one_device` (its latency
    over that of one device; nan without one), `decided` (its range is apart from the runner-up's), `compared`, run_ids.
    """
    rows: list[dict[str, Any]] = []
    keys = ["family", "model", "phase", "seq_len", "global_batch"]
    for key, group in table.groupby(keys, sort=False):
        if len(group) < 2:
            continue
        ordered = group.sort_values("latency_s")
        first, second = ordered.iloc[0], ordered.iloc[1]
        alone = group.loc[group["world"] == 1, "latency_s"]
        rows.append(
            {
                **dict(zip(keys, key, strict=True)),
                "strategy": first["strategy"],
                "world": first["world"],
                "latency_s": first["latency_s"],
                "over_one_device": first["latency_s"] / alone.iloc[0] if len(alone) else float("nan"),
                "decided": bool(first["latency_high"] < second["latency_low"]),
                "compared": len(group),
                "run_ids": tuple(sorted({run for ids in group["run_ids"] for run in ids})),
            }
        )
    columns = [*keys, "strategy", "world", "latency_s", "over_one_device", "decided", "compared", "run_ids"]
    return pd.DataFrame(rows, columns=columns)
