"""The arithmetic of memory: what a schedule holds, what an option saves and costs, how many bytes a parameter takes."""

from __future__ import annotations

import pandas as pd

from hybridpar.artifacts import comparison
from hybridpar.artifacts.inputs import MEMORY_CATEGORIES, Study

# Options of a strategy that trade memory for time or place, each with the value that is without it.
_OPTIONS = {"recompute": "none", "offload": "none"}
_HELD = [f"{category}_mb" for category in MEMORY_CATEGORIES]
_STATE = ("parameters", "gradients", "optimizer")


def schedules(study: Study) -> pd.DataFrame:
    """Cells that only a pipeline splits, under two schedules or more on as many ranks; `schedule` names the method.

    Columns: those of `comparison.cells`.
    """
    table = comparison.cells(study)
    table = table[(table["kind"] == "pipeline") & (table["engine"] == "torch")]
    several = table.groupby(["model", "world"])["method"].transform("nunique") > 1
    return table[several].reset_index(drop=True)


def savings(study: Study) -> pd.DataFrame:
    """Each recomputing or offloading cell beside the same strategy without that option.

    Columns: model, world, `base` (the strategy without it), `option`; `activations_before`, `activations_after`,
    `peak_before`, `peak_after`, `host_after` (MB of the fullest rank); `speed` (throughput over the plain one's) with
    `speed_low`, `speed_high`; `run_ids`.
    """
    table = comparison.cells(study)
    keys = ["dp", "tp", "pp", "cp", "ep", "zero", "zero_group", "sp", "cp_kind", "schedule", "overlap", "virtual"]
    does = study.runs[["strategy", *keys, *_OPTIONS]].drop_duplicates("strategy")
    table = table.merge(does, on="strategy")
    plain = table[(table[list(_OPTIONS)] == pd.Series(_OPTIONS)).all(axis=1)]
    found = []
    for option, without in _OPTIONS.items():
        others = [name for name in _OPTIONS if name != option]
        with_it = table[(table[option] != without) & (table[others] == pd.Series(_OPTIONS)[others]).all(axis=1)]
        pairs = with_it.merge(plain, on=["model", "engine", *keys], suffixes=("_after", "_before"))
        found.append(pairs.assign(option=pairs[f"{option}_after"] + f" {option}"))
    pairs = pd.concat(found, ignore_index=True)
    return pd.DataFrame(
        {
            "family": pairs["family_after"],
            "model": pairs["model"],
            "world": pairs["world_after"],
            "base": pairs["method_before"],
            "option": pairs["option"].str.replace("recompute", "recomputation"),
            **{
                f"{name}_{side}": pairs[f"{name}_mb_{side}"]
                for name in ("activations", "peak", "host")
                for side in ("before", "after")
            },
            "speed": pairs["tokens_per_s_after"] / pairs["tokens_per_s_before"],
            "speed_low": pairs["tokens_low_after"] / pairs["tokens_high_before"],
            "speed_high": pairs["tokens_high_after"] / pairs["tokens_low_before"],
            "run_ids": comparison.united(pairs["run_ids_after"], pairs["run_ids_before"]),
        }
    )


def state_per_parameter(study: Study) -> pd.DataFrame:
    """Bytes that the fullest rank holds at its peak for each parameter of the whole model, by strategy.

    Columns: model, family, world, method, strategy; `parameters`, `gradients`, `optimizer`, `host` and `state` (the
    first three together) in bytes a parameter of the model; `run_ids`. Parameters held on one rank alone are counted
    on that rank: the fullest decides whether a model fits.
    """
    table = comparison.cells(study)
    table = table[(table["kind"] != "hybrid") & table["peak_mb"].notna()]
    counts = study.trained.groupby("model")["parameters"].first().astype("float64")
    whole = table["model"].map(counts)
    per_parameter = {name: 1e6 * table[f"{name}_mb"] / whole for name in (*_STATE, "host")}
    columns = ["family", "size", "model", "world", "kind", "method", "strategy", "engine", "run_ids"]
    found = table[columns].assign(**per_parameter)
    return found.assign(state=found[list(_STATE)].sum(axis=1)).reset_index(drop=True)
