"""The arithmetic of comparing strategies: medians with their spread, shares, winners, rank correlation.

A *cell* is one strategy on one model and number of ranks; its repeats and their timed steps are pooled. Times are
medians with the smallest and largest timed step; a difference counts only where these ranges do not overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from hybridpar.artifacts.inputs import FAMILIES, MEMORY_CATEGORIES, SIZES, Study

Floats = npt.NDArray[np.float64]

_CELL = ["family", "size", "model", "world", "kind", "method", "options", "strategy", "engine"]
_RESAMPLES = 2000
_PAIR = ("transformer", "mamba2")


@dataclass(frozen=True)
class Spread:
    """A median with its range and the number of values behind it."""

    median: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float] | Floats | pd.Series) -> Spread:
        """Median, smallest, largest and count.

        Raises:
            ValueError: no values.
        """
        array = np.asarray(values, dtype=np.float64)
        if array.size == 0:
            raise ValueError("a spread needs at least one value")
        return cls(float(np.median(array)), float(array.min()), float(array.max()), int(array.size))

    def overlaps(self, other: Spread) -> bool:
        """Whether the two ranges share a value, so that their order is not decided."""
        return self.low <= other.high and other.low <= self.high


def timed_steps(study: Study) -> pd.DataFrame:
    """Timed steps of finished runs of training with `tokens_per_s` of the whole job: a step's tokens over its time."""
    runs = study.trained[["run_id", *_CELL, "tokens_per_step"]]
    steps = study.steps.loc[~study.steps["warmup"].astype(bool), ["run_id", "step", "seconds"]].merge(runs, on="run_id")
    return steps.assign(tokens_per_s=steps["tokens_per_step"] / steps["seconds"])


def cells(study: Study) -> pd.DataFrame:
    """One row a cell, sorted by size, family, ranks and falling throughput.

    Columns: those that name the cell; `tokens_per_s` (median), `tokens_low`, `tokens_high`; `step_s`; `runs` and
    `steps` (counts); `peak_mb` (largest rank, total) and `<category>_mb`; `wire_mb` (sent by one rank in a step, mean
    over ranks); `comm_share` with `comm_low`, `comm_high` over repeats (blocked in communication over step time);
    `mfu`; `relative` (to the fastest cell of this model and number of ranks); `run_ids`.
    """
    steps = timed_steps(study)
    if steps.empty:
        return pd.DataFrame(columns=[*_CELL, *_MEASURES])
    grouped = steps.groupby(_CELL, observed=True)
    table = grouped.agg(
        tokens_per_s=("tokens_per_s", "median"),
        tokens_low=("tokens_per_s", "min"),
        tokens_high=("tokens_per_s", "max"),
        step_s=("seconds", "median"),
        runs=("run_id", "nunique"),
        steps=("seconds", "size"),
        run_ids=("run_id", lambda ids: tuple(sorted(set(ids)))),
    ).reset_index()
    per_run = study.trained[["run_id", *_CELL, "mfu"]]
    per_run = per_run.merge(memory_mb(study), on="run_id", how="left").merge(
        communication(study), on="run_id", how="left"
    )
    measures = [f"{category}_mb" for category in MEMORY_CATEGORIES]
    medians = per_run.groupby(_CELL, observed=True)[[*measures, "peak_mb", "mfu", "wire_mb"]].median()
    shares = per_run.groupby(_CELL, observed=True)["comm_share"].agg(
        comm_share="median", comm_low="min", comm_high="max"
    )
    table = table.merge(medians.reset_index(), on=_CELL).merge(shares.reset_index(), on=_CELL)
    best = table.groupby(["model", "world"])["tokens_per_s"].transform("max")
    table = table.assign(relative=table["tokens_per_s"] / best)
    return _ordered(table)


_MEASURES = (
    ["tokens_per_s", "tokens_low", "tokens_high", "step_s", "runs", "steps", "run_ids"]
    + [f"{category}_mb" for category in MEMORY_CATEGORIES]
    + ["peak_mb", "mfu", "wire_mb", "comm_share", "comm_low", "comm_high", "relative"]
)


def memory_mb(study: Study) -> pd.DataFrame:
    """Peak MB (10^6 bytes) by category and in total, one row a run."""
    wide = study.memory.pivot_table(index="run_id", columns="category", values="bytes", aggfunc="max")
    wide = wide.reindex(columns=[*MEMORY_CATEGORIES, "total"]) / 1e6
    names = {category: f"{category}_mb" for category in MEMORY_CATEGORIES} | {"total": "peak_mb"}
    return wide.rename(columns=names).reset_index()


def communication(study: Study) -> pd.DataFrame:
    """One row a finished run of training: `wire_mb` a rank and step, `comm_share` = blocked seconds over step time.

    A run without any collective (one device) has zero of both.
    """
    seconds = timed_steps(study).groupby("run_id")["seconds"].median()
    sums = study.collectives.groupby("run_id")[["wire_bytes", "exposed_seconds"]].sum()
    runs = study.trained[["run_id"]].merge(sums.reset_index(), on="run_id", how="left").fillna(0.0)
    step_s = runs["run_id"].map(seconds)
    share = (runs["exposed_seconds"] / step_s).clip(upper=1.0)
    return pd.DataFrame({"run_id": runs["run_id"], "wire_mb": runs["wire_bytes"] / 1e6, "comm_share": share})


def _ordered(table: pd.DataFrame) -> pd.DataFrame:
    sizes = {size: position for position, size in enumerate(SIZES)}
    return (
        table.assign(
            _size=table["size"].map(sizes).fillna(len(sizes)),
            _family=table["family"].map(FAMILIES.index),
        )
        .sort_values(["_size", "_family", "model", "world", "tokens_per_s"], ascending=[True, True, True, True, False])
        .drop(columns=["_size", "_family"])
        .reset_index(drop=True)
    )


def tokens(cell: Any) -> Spread:
    """Throughput of one row of `cells`."""
    return Spread(
        float(cell["tokens_per_s"]), float(cell["tokens_low"]), float(cell["tokens_high"]), int(cell["steps"])
    )


def winners(table: pd.DataFrame) -> pd.DataFrame:
    """The fastest cell of each model and number of ranks, with the `runner_up` and whether the two are `decided`.

    `lead` is the winner's median over the runner-up's; `decided` says that their ranges do not overlap. Cells alone
    in their group have no runner-up and are left out: nothing was compared.
    """
    rows = []
    for _, group in table.groupby(["model", "world"], sort=False):
        if len(group) < 2:
            continue
        first, second = (row for _, row in group.sort_values("tokens_per_s", ascending=False).head(2).iterrows())
        rows.append(
            {
                **{key: first[key] for key in ("family", "size", "model", "world", "strategy", "method", "kind")},
                "tokens_per_s": first["tokens_per_s"],
                "tokens_low": first["tokens_low"],
                "tokens_high": first["tokens_high"],
                "mfu": first["mfu"],
                "runner_up": second["strategy"],
                "lead": first["tokens_per_s"] / second["tokens_per_s"],
                "decided": not tokens(first).overlaps(tokens(second)),
                "compared": len(group),
                "run_ids": tuple(sorted({run for ids in group["run_ids"] for run in ids})),
            }
        )
    columns = ["family", "size", "model", "world", "strategy", "method", "kind", "tokens_per_s", "tokens_low"]
    columns += ["tokens_high", "mfu", "runner_up", "lead", "decided", "compared", "run_ids"]
    return pd.DataFrame(rows, columns=columns)


def spearman(first: Sequence[float] | Floats, second: Sequence[float] | Floats) -> float:
    """Spearman's rank correlation (ties share their mean rank); nan where one side is constant."""
    ranks = [pd.Series(np.asarray(values)).rank().to_numpy() for values in (first, second)]
    if any(np.ptp(rank) == 0 for rank in ranks):
        return float("nan")
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def family_pairs(study: Study) -> pd.DataFrame:
    """Strategies that both families ran at one size and number of ranks.

    Columns: size, world, strategy, method, kind; `transformer` and `mamba2` (throughput relative to the family's best
    there) with `_low`, `_high`, and `_rank` (1 fastest); `ratio` = mamba2 over transformer, with the extreme ratios
    `ratio_low`, `ratio_high`; `run_ids`.
    """
    table = cells(study)
    sides = {}
    for family in _PAIR:
        side = table[(table["family"] == family) & (table["world"] > 1)]
        sides[family] = side.drop_duplicates(["size", "world", "strategy"])
    shared = ["size", "world", "strategy", "method", "kind"]
    paired = sides["transformer"].merge(sides["mamba2"], on=shared, suffixes=("_t", "_m"))
    if paired.empty:
        return pd.DataFrame(columns=[*shared, "transformer", "mamba2", "ratio", "ratio_low", "ratio_high", "run_ids"])
    group = paired.groupby(["size", "world"])
    columns: dict[str, Any] = {}
    for family, end in (("transformer", "_t"), ("mamba2", "_m")):
        best = group[f"tokens_per_s{end}"].transform("max")
        columns[family] = paired[f"tokens_per_s{end}"] / best
        columns[f"{family}_low"] = paired[f"tokens_low{end}"] / best
        columns[f"{family}_high"] = paired[f"tokens_high{end}"] / best
        columns[f"{family}_rank"] = group[f"tokens_per_s{end}"].rank(ascending=False)
    columns["ratio"] = columns["mamba2"] / columns["transformer"]
    columns["ratio_low"] = columns["mamba2_low"] / columns["transformer_high"]
    columns["ratio_high"] = columns["mamba2_high"] / columns["transformer_low"]
    columns["run_ids"] = united(paired["run_ids_t"], paired["run_ids_m"])
    return paired[shared].assign(**columns)


def family_correlations(study: Study) -> pd.DataFrame:
    """Spearman's rho between the families' rankings, for each size and number of ranks with three strategies or more.

    `rho_low` and `rho_high` hold 95 % of the values when the timed steps of each cell are drawn anew with replacement
    (a fixed seed, so the table repeats).
    """
    steps, pairs = timed_steps(study), family_pairs(study)
    rows = []
    for (size, world), group in pairs.groupby(["size", "world"], sort=False):
        if len(group) < 3:
            continue
        chosen = steps[(steps["size"] == size) & (steps["world"] == world)]
        low, high = _resampled_rho(chosen, list(group["strategy"]))
        winner = {family: str(group["strategy"].iloc[int(group[family].to_numpy().argmax())]) for family in _PAIR}
        rows.append(
            {
                "size": size,
                "world": world,
                "strategies": len(group),
                "rho": spearman(group["transformer"].to_numpy(), group["mamba2"].to_numpy()),
                "rho_low": low,
                "rho_high": high,
                "same_winner": winner["transformer"] == winner["mamba2"],
                "transformer_winner": winner["transformer"],
                "mamba2_winner": winner["mamba2"],
                "run_ids": tuple(sorted({run for ids in group["run_ids"] for run in ids})),
            }
        )
    columns = ["size", "world", "strategies", "rho", "rho_low", "rho_high", "same_winner", "transformer_winner"]
    return pd.DataFrame(rows, columns=[*columns, "mamba2_winner", "run_ids"])


def _resampled_rho(steps: pd.DataFrame, strategies: Sequence[str]) -> tuple[float, float]:
    generator = np.random.default_rng(0)
    medians = {}
    for family in _PAIR:
        values = steps[steps["family"] == family].groupby("strategy")["tokens_per_s"]
        medians[family] = np.stack(
            [_resampled_medians(np.sort(values.get_group(name).to_numpy()), generator) for name in strategies], axis=1
        )
    ranks = [np.argsort(np.argsort(medians[family], axis=1), axis=1) for family in _PAIR]
    centred = [rank - rank.mean(axis=1, keepdims=True) for rank in ranks]
    rho = (centred[0] * centred[1]).sum(axis=1) / (centred[0] ** 2).sum(axis=1)
    low, high = np.quantile(rho, [0.025, 0.975])
    return float(low), float(high)


def _resampled_medians(values: Floats, generator: np.random.Generator) -> Floats:
    draws = generator.integers(0, len(values), size=(_RESAMPLES, len(values)))
    return np.asarray(np.median(values[draws], axis=1))


def loss_deviations(study: Study) -> pd.DataFrame:
    """How far the losses of every finished run are from one device's, one row a run that has such a counterpart.

    `deviation` is the largest |loss - reference| / |reference| over the steps (warm-up included); the reference is the
    model's torch run on one device with the same seed and precision.
    """
    columns = [
        "run_id",
        "family",
        "size",
        "model",
        "world",
        "kind",
        "method",
        "strategy",
        "engine",
        "seed",
        "precision",
    ]
    losses = study.steps[["run_id", "step", "loss"]].merge(study.trained[columns], on="run_id")
    alone = losses[(losses["kind"] == "one device") & (losses["engine"] == "torch")]
    same = ["model", "seed", "precision", "step"]
    reference = alone.drop_duplicates(same)[[*same, "loss", "run_id"]]
    paired = losses[losses["kind"] != "one device"].merge(reference, on=same, suffixes=("", "_alone"))
    paired = paired.assign(deviation=(paired["loss"] - paired["loss_alone"]).abs() / paired["loss_alone"].abs())
    grouped = paired.groupby(columns, observed=True)
    return _ordered(
        grouped.agg(deviation=("deviation", "max"), steps=("step", "size"), alone=("run_id_alone", "first"))
        .reset_index()
        .assign(tokens_per_s=0.0)
    ).drop(columns="tokens_per_s")


def engine_pairs(study: Study) -> pd.DataFrame:
    """The same strategy in torch and in DeepSpeed: throughput, memory and wire bytes side by side.

    `ratio` is DeepSpeed's median throughput over torch's, with the extreme ratios of their ranges.
    """
    does = ["dp", "tp", "pp", "cp", "ep", "zero", "sp", "cp_kind", "schedule", "recompute", "offload", "overlap"]
    table = cells(study).merge(study.runs[["strategy", *does]].drop_duplicates("strategy"), on="strategy")
    table["schedule"] = table["schedule"].where(table["pp"] > 1, "")
    table["cp_kind"] = table["cp_kind"].where(table["cp"] > 1, "")
    same = ["family", "size", "model", "world", *does]
    torch, deepspeed = (table[table["engine"] == engine] for engine in ("torch", "deepspeed"))
    pairs = torch.merge(deepspeed, on=same, suffixes=("_t", "_d"))
    return pairs.assign(
        ratio=pairs["tokens_per_s_d"] / pairs["tokens_per_s_t"],
        ratio_low=pairs["tokens_low_d"] / pairs["tokens_high_t"],
        ratio_high=pairs["tokens_high_d"] / pairs["tokens_low_t"],
        run_ids=united(pairs["run_ids_t"], pairs["run_ids_d"]),
    )


def united(first: pd.Series, second: pd.Series) -> pd.Series:
    """Row by row, the runs behind either side."""
    return pd.Series(
        [tuple(sorted({*a, *b})) for a, b in zip(first, second, strict=True)], index=first.index, dtype=object
    )
