"""One function per table. Each takes the loaded study and returns a table, or says that it has no runs for it."""

from __future__ import annotations

import pandas as pd

from hybridpar.artifacts import captions, collective_cost, comparison
from hybridpar.artifacts.artifact import Column, Missing, TableArtifact
from hybridpar.artifacts.columns import LABEL, METHOD, MODEL, RANKS, THROUGHPUT, numeric, scientific, text, yes_no
from hybridpar.artifacts.inputs import Study
from hybridpar.outcome import OUTCOMES

Listed = TableArtifact | Missing


def collective_fits(study: Study) -> Listed:
    """Latency and bandwidth of each collective by ranks."""
    name, title = "collective-fits", "Latency and bandwidth"
    frame = collective_cost.fits(study.bench)
    if frame.empty:
        return Missing(name, title, captions.nothing("collective benchmark"))
    columns = (
        Column("op", "operation", captions.operation),
        RANKS,
        numeric("alpha_us", "α in µs"),
        numeric("mb_per_s", "1/β in MB/s"),
        numeric("error", "error in %", 0, 100),
        numeric("sizes", "sizes"),
        numeric("n", "n"),
    )
    caption = (
        "Time as α + wire bytes · β, fitted to the relative error over all sizes and repeats; error: median of the "
        f"relative deviation. {captions.conditions(study)}"
    )
    return TableArtifact(name, title, caption, study.bench_provenance(), frame, columns)


def wire_bytes(study: Study) -> Listed:
    """Bytes that one rank sends over the bytes of the message, beside the ring's formula."""
    name, title = "wire-bytes", "Bytes on the wire"
    frame = collective_cost.wire_factors(study.bench)
    if frame.empty:
        return Missing(name, title, captions.nothing("collective benchmark"))
    columns = (
        Column("op", "operation", captions.operation),
        RANKS,
        numeric("factor", "wire/message", 3),
        numeric("factor_low", "min", 3),
        numeric("factor_high", "max", 3),
        numeric("ring", "ring", 3),
    )
    caption = (
        "Bytes that one rank sends over the bytes of the message, median and range over sizes, and what the ring "
        f"algorithm needs. {captions.conditions(study, times=False)}"
    )
    return TableArtifact(name, title, caption, study.bench_provenance(), frame, columns)


def single_strategies(study: Study) -> Listed:
    """Every single strategy: throughput with spread, memory, wire bytes, share of communication."""
    table = comparison.cells(study)
    return _strategies(study, table[table["kind"] != "hybrid"], "single-strategies", "Each strategy alone", "single")


def hybrid_strategies(study: Study) -> Listed:
    """Every factorisation over two axes or more."""
    table = comparison.cells(study)
    return _strategies(study, table[table["kind"] == "hybrid"], "hybrid-strategies", "Hybrids", "hybrid")


def _strategies(study: Study, frame: pd.DataFrame, name: str, title: str, kind: str) -> Listed:
    if frame.empty:
        return Missing(name, title, captions.nothing(kind))
    columns = (
        MODEL,
        RANKS,
        METHOD if kind == "single" else LABEL,
        *THROUGHPUT,
        numeric("relative", "of best in %", 0, 100),
        numeric("peak_mb", "peak MB", 1),
        numeric("wire_mb", "wire MB", 2),
        numeric("comm_share", "comm. in %", 0, 100),
        numeric("mfu", "MFU in %", 1, 100),
    )
    caption = (
        "Median throughput with the slowest and fastest of n timed steps, share of the fastest strategy on as many "
        "ranks, peak memory of the largest rank, bytes a rank sends in a step, share of the step blocked in "
        f"communication, and utilisation (MFU). {captions.conditions(study)}"
    )
    return TableArtifact(name, title, caption, study.provenance(frame["run_ids"].explode()), frame, columns)


def loss_parity(study: Study) -> Listed:
    """How far losses are from one device's, for each model and engine."""
    name, title = "loss-parity", "Losses against one device"
    runs = comparison.loss_deviations(study)
    if runs.empty:
        return Missing(name, title, captions.nothing("multi-rank"))
    runs = runs.sort_values("deviation", ascending=False, kind="stable")
    frame = (
        runs.groupby(["model", "precision", "engine"], sort=True)
        .agg(
            runs=("run_id", "size"),
            strategies=("strategy", "nunique"),
            steps=("steps", "max"),
            median=("deviation", "median"),
            largest=("deviation", "max"),
            worst=("strategy", "first"),
        )
        .reset_index()
    )
    columns = (
        MODEL,
        Column("precision", "precision"),
        Column("engine", "engine"),
        numeric("strategies", "strategies"),
        numeric("runs", "runs"),
        numeric("steps", "steps"),
        Column("median", "median", scientific, numeric=True),
        Column("largest", "largest", scientific, numeric=True),
        Column("worst", "in", captions.short),
    )
    caption = (
        "Largest relative deviation of a run's losses from those of one device, over all steps; its median and largest "
        f"value over the runs, and the strategy of the largest. {captions.conditions(study, times=False)}"
    )
    ids = pd.concat([runs["run_id"], runs["alone"]])
    return TableArtifact(name, title, caption, study.provenance(ids), frame, columns)


def best_strategies(study: Study) -> Listed:
    """The fastest strategy of each model and number of ranks and its lead."""
    name, title = "best-strategies", "Fastest strategy"
    table = comparison.cells(study)
    frame = comparison.winners(table[table["world"] > 1])
    if frame.empty:
        return Missing(name, title, captions.nothing("multi-rank"))
    columns = (
        MODEL,
        RANKS,
        Column("strategy", "fastest", captions.short),
        numeric("tokens_per_s", "tokens/s"),
        numeric("tokens_low", "min"),
        numeric("tokens_high", "max"),
        numeric("mfu", "MFU in %", 1, 100),
        Column("runner_up", "runner-up", captions.short),
        numeric("lead", "lead", 2),
        Column("decided", "decided", yes_no),
        numeric("compared", "of"),
    )
    caption = (
        "Highest median throughput among the strategies compared (of), its utilisation (MFU) and its ratio to the "
        "runner-up (lead); decided "
        f"where the ranges of the two do not overlap. {captions.conditions(study)}"
    )
    return TableArtifact(name, title, caption, study.provenance(frame["run_ids"].explode()), frame, columns)


def infeasible(study: Study) -> Listed:
    """Strategies that are no runs because they are not legal, with the constraint each violates."""
    name, title = "infeasible", "Infeasible strategies"
    runs = study.runs[study.runs["outcome"] == "infeasible"]
    if runs.empty:
        return Missing(name, title, captions.nothing("infeasible"))
    frame = _grouped(runs, ["model", "strategy", "reason"])
    columns = (MODEL, LABEL, Column("reason", "reason"), numeric("runs", "runs"))
    caption = "Strategies of the study's grid that are not legal, with every violated constraint; none was started."
    return TableArtifact(name, title, caption, study.provenance(runs["run_id"]), frame, columns)


def family_rankings(study: Study) -> Listed:
    """Rank correlation of the strategies between Transformer and Mamba-2."""
    name, title = "family-rankings", "Agreement of the rankings"
    frame = comparison.family_correlations(study)
    if frame.empty:
        return Missing(name, title, captions.nothing("paired Transformer and Mamba-2"))
    columns = (
        Column("size", "size"),
        RANKS,
        numeric("strategies", "strategies"),
        numeric("rho", "ρ", 2),
        numeric("rho_low", "low", 2),
        numeric("rho_high", "high", 2),
        Column("transformer_winner", "best Transformer", captions.short),
        Column("mamba2_winner", "best Mamba-2", captions.short),
    )
    caption = (
        "Spearman's ρ between the throughputs of the strategies that both families ran; low and high bound the central "
        f"mass of ρ when timed steps are drawn anew. {captions.conditions(study)}"
    )
    return TableArtifact(name, title, caption, study.provenance(frame["run_ids"].explode()), frame, columns)


def family_effects(study: Study) -> Listed:
    """How much better each strategy suits Mamba-2 than the Transformer of the same size."""
    name, title = "family-effects", "Effect of the family by strategy"
    frame = comparison.family_pairs(study)
    if frame.empty:
        return Missing(name, title, captions.nothing("paired Transformer and Mamba-2"))
    columns = (
        Column("size", "size"),
        RANKS,
        LABEL,
        numeric("transformer", "Transformer / best", 2),
        numeric("mamba2", "Mamba-2 / best", 2),
        numeric("ratio", "ratio", 2),
        numeric("ratio_low", "min", 2),
        numeric("ratio_high", "max", 2),
    )
    caption = (
        "Throughput over that of the family's best strategy on as many ranks, and the ratio of the two families with "
        f"its extremes over the timed steps. {captions.conditions(study)}"
    )
    return TableArtifact(name, title, caption, study.provenance(frame["run_ids"].explode()), frame, columns)


def outcomes(study: Study) -> Listed:
    """Every run accounted for: how many ended how, and why."""
    name, title = "outcomes", "Outcome of every run"
    runs = study.runs.assign(reason=study.runs["reason"].fillna("").astype(str))
    if runs.empty:
        return Missing(name, title, captions.nothing("recorded"))
    frame = _grouped(runs, ["outcome", "reason"])
    position = {outcome: index for index, outcome in enumerate(OUTCOMES)}
    frame = frame.assign(_position=frame["outcome"].map(position))
    frame = frame.sort_values(["_position", "runs", "reason"], ascending=[True, False, True]).drop(columns="_position")
    columns = (
        Column("outcome", "outcome"),
        numeric("runs", "runs"),
        Column("reason", "reason", text),
    )
    caption = f"All runs of the study by outcome and reason. Tier: {study.provenance().tier}."
    return TableArtifact(name, title, caption, study.provenance(), frame, columns)


def _grouped(runs: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    return runs.groupby(keys, dropna=False).size().reset_index(name="runs")
