"""One function per figure. Each takes the loaded study and returns a drawn figure, or says that there are no runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from hybridpar.artifacts import captions, collective_cost, comparison, style
from hybridpar.artifacts.artifact import FigureArtifact, Missing
from hybridpar.artifacts.inputs import Study
from hybridpar.artifacts.memory_artifacts import category_handles, stacked_categories

Drawn = FigureArtifact | Missing


def collective_time(study: Study) -> Drawn:
    """Time of each collective by message size, ranks apart, with the fitted latency-bandwidth lines."""
    name, title = "collective-time", "Time of a collective"
    points, fitted = collective_cost.by_size(study.bench), collective_cost.fits(study.bench)
    if points.empty:
        return Missing(name, title, captions.nothing("collective benchmark"))
    operations = sorted(points["op"].unique())
    rows = -(-len(operations) // 2)
    figure, axes = style.canvas(rows, 2, height=1.25 * rows + 0.45, sharex=True, sharey=True)
    looks = _rank_looks(points)
    for panel, operation in zip(axes.flat, operations, strict=False):
        for world, (colour, marker) in looks.items():
            group = points[(points["op"] == operation) & (points["world"] == world)]
            panel.vlines(group["bytes"], group["low"] * 1e3, group["high"] * 1e3, color=colour, linewidth=0.7)
            panel.plot(group["bytes"], group["seconds"] * 1e3, linestyle="", marker=marker, color=colour, markersize=3)
            line = fitted[(fitted["op"] == operation) & (fitted["world"] == world)]
            if len(line):
                sizes = np.geomspace(group["bytes"].min(), group["bytes"].max())
                wire = sizes * (group["wire"] / group["bytes"]).median()
                times = line["alpha_us"].item() * 1e-3 + wire / (line["mb_per_s"].item() * 1e3)
                panel.plot(sizes, times, color=colour, linewidth=0.8)
        panel.set(xscale="log", yscale="log", title=captions.operation(operation))
    style.trim(axes, len(operations), xlabel="message in bytes")
    figure.supylabel("time in ms", fontsize=style.FONT_POINTS)
    style.legend_below(figure, _rank_handles(points))
    caption = (
        "Markers: median of the repeats, bars from the fastest to the slowest; lines: latency plus wire bytes over "
        f"bandwidth, fitted to the relative error. {captions.conditions(study)}"
    )
    return FigureArtifact(name, title, caption, study.bench_provenance(), figure)


def single_throughput(study: Study) -> Drawn:
    """Throughput of each single strategy by number of ranks, one panel a family."""
    name, title = "single-throughput", "Throughput of each strategy alone"
    table = _single(study)
    if not (table["world"] > 1).any():
        return Missing(name, title, captions.nothing("single-strategy"))
    models = _one_size(table[table["world"] > 1])
    shown = table[table["model"].isin(models) & (table["world"] > 1)]
    figure, axes, methods = _method_panels(shown, models)
    for panel, model in zip(axes.flat, models, strict=True):
        _by_ranks(panel, shown[shown["model"] == model], methods, "tokens_per_s", "tokens_low", "tokens_high", 1e-3)
        alone = table[(table["model"] == model) & (table["kind"] == "one device") & (table["engine"] == "torch")]
        for value in alone["tokens_per_s"]:
            panel.axvline(value / 1e3, color=style.KIND_COLOURS["one device"], linestyle=":")
        panel.set_title(_family(model))
        panel.set_xlim(left=0)
        style.few_ticks(panel.xaxis)
    style.name_row(axes, "1,000 tokens/s")
    alone_line = Line2D([], [], color=style.KIND_COLOURS["one device"], linestyle=":", label="one device")
    style.legend_below(figure, [*_rank_handles(shown), alone_line], columns=4)
    caption = (
        "Median over the timed steps, bars from the slowest to the fastest, of "
        f"{_and(models)} (the table has all sizes). {captions.conditions(study)}"
    )
    return FigureArtifact(name, title, caption, study.provenance(_ids(shown)), figure)


def single_memory(study: Study) -> Drawn:
    """Peak memory of the largest rank by category, for each single strategy at the largest number of ranks."""
    name, title = "single-memory", "Where memory goes"
    table = _single(study)
    if table.empty or table["peak_mb"].isna().all():
        return Missing(name, title, captions.nothing("single-strategy"))
    world = int(table["world"].max())
    table = table[(table["world"] == world) | (table["world"] == 1)]
    models = _one_size(table)
    table = table[table["model"].isin(models)]
    methods = _method_order(table)
    figure, axes = style.canvas(1, len(models), height=0.14 * len(methods) + 0.95, sharey=True)
    for panel, model in zip(axes.flat, models, strict=True):
        group = table[table["model"] == model].drop_duplicates("method").set_index("method").reindex(methods)
        stacked_categories(panel, group)
        style.few_ticks(panel.xaxis)
        panel.set_title(_family(model))
    axes.flat[0].set_ylim(len(methods) - 0.5, -0.5)  # inverted once: the panels share it
    style.name_row(axes, "MB")
    style.legend_below(figure, category_handles(table))
    caption = (
        "Peak bytes of each category on the rank that holds most of it, counted in a warm-up step; median over "
        f"repeats. Models: {_and(models)}, on {world} ranks; a strategy without a bar was not run on as many. "
        f"{captions.conditions(study, times=False)}"
    )
    return FigureArtifact(name, title, caption, study.provenance(_ids(table)), figure)


def communication_share(study: Study) -> Drawn:
    """Share of a step that a rank stands still in communication, for each single strategy and number of ranks."""
    name, title = "communication-share", "Share of the step spent in communication"
    table = _single(study)
    table = table[table["world"] > 1].dropna(subset=["comm_share"])
    if table.empty:
        return Missing(name, title, captions.nothing("single-strategy"))
    models = _one_size(table)
    shown = table[table["model"].isin(models)]
    figure, axes, methods = _method_panels(shown, models)
    for panel, model in zip(axes.flat, models, strict=True):
        _by_ranks(panel, shown[shown["model"] == model], methods, "comm_share", "comm_low", "comm_high", 100)
        panel.set(xlim=(0, 100), title=_family(model))
        style.few_ticks(panel.xaxis)
    style.name_row(axes, "share in %")
    style.legend_below(figure, _rank_handles(shown))
    caption = (
        "Seconds blocked in collectives and point-to-point messages over the step's time, mean over ranks, median over "
        f"repeats with their range, of {_and(models)}; waiting for slower ranks is in it. {captions.conditions(study)}"
    )
    return FigureArtifact(name, title, caption, study.provenance(_ids(shown)), figure)


def best_strategy_map(study: Study) -> Drawn:
    """Which strategy is fastest for each model and number of ranks, and by how much."""
    name, title = "best-strategy-map", "Fastest strategy by model and ranks"
    table = comparison.cells(study)
    best = comparison.winners(table[table["world"] > 1])
    if best.empty:
        return Missing(name, title, captions.nothing("multi-rank"))
    by_family = best.sort_values("family", kind="stable")
    models, worlds = list(dict.fromkeys(by_family["model"])), sorted(best["world"].unique())
    figure, axes = style.canvas(height=0.36 * len(models) + 0.85)
    panel = axes[0, 0]
    for _, row in best.iterrows():
        x, y = worlds.index(row["world"]), models.index(row["model"])
        colour = style.KIND_COLOURS[row["kind"]]
        panel.add_patch(style.tile(x, y, colour, decided=bool(row["decided"])))
        text = f"{captions.short(row['strategy'])}\n+{100 * (row['lead'] - 1):.0f} %"
        panel.text(x, y, text, ha="center", va="center", fontsize=6.5)
    panel.set(xlim=(-0.5, len(worlds) - 0.5), ylim=(len(models) - 0.5, -0.5), xlabel="ranks")
    panel.set_xticks(range(len(worlds)), [str(world) for world in worlds])
    panel.set_yticks(range(len(models)), models)
    panel.grid(visible=False)
    kinds = [kind for kind in style.KIND_COLOURS if kind in set(best["kind"])]
    style.legend_below(figure, [Patch(color=style.light(style.KIND_COLOURS[kind]), label=kind) for kind in kinds])
    caption = (
        "The strategy with the highest median throughput and its lead over the runner-up; hatched where the ranges of "
        f"the two overlap, so that the winner is undecided. {captions.conditions(study)}"
    )
    return FigureArtifact(name, title, caption, study.provenance(_ids(table[table["world"] > 1])), figure)


def hybrid_ranking(study: Study) -> Drawn:
    """Throughput of every strategy at the largest number of ranks, relative to the best one of its model."""
    name, title = "hybrid-ranking", "All strategies at the largest number of ranks"
    table = comparison.cells(study)
    table = table[table["world"] > 1]
    if not (table["kind"] == "hybrid").any():
        return Missing(name, title, captions.nothing("hybrid"))
    world = int(table.loc[table["kind"] == "hybrid", "world"].max())
    table = table[table["world"] == world]
    models = _one_size(table)
    order = list(table.groupby("strategy")["relative"].median().sort_values(ascending=False, kind="stable").index)
    figure, axes = style.canvas(1, len(models), height=0.145 * len(order) + 0.95, sharey=True)
    for panel, model in zip(axes.flat, models, strict=True):
        group = table[table["model"] == model]
        best = group["tokens_per_s"].max()
        for _, row in group.iterrows():
            y, colour = order.index(row["strategy"]), style.KIND_COLOURS[row["kind"]]
            panel.hlines(y, row["tokens_low"] / best, row["tokens_high"] / best, color=colour, linewidth=1.0)
            panel.plot(row["relative"], y, color=colour, marker="s" if row["engine"] == "deepspeed" else "o")
        panel.set(ylim=(len(order) - 0.5, -0.5), title=_family(model))
        panel.set_xlim(left=0)
        panel.set_xticks([0, 1])
        panel.set_yticks(range(len(order)), [captions.short(strategy) for strategy in order], fontsize=6.5)
    style.name_row(axes, "throughput / best")
    kinds = [kind for kind in style.KIND_COLOURS if kind in set(table["kind"])]
    handles = [Line2D([], [], color=style.KIND_COLOURS[kind], marker="o", linestyle="", label=kind) for kind in kinds]
    handles.append(Line2D([], [], color="0.3", marker="s", linestyle="", label="DeepSpeed"))
    style.legend_below(figure, handles)
    caption = (
        f"All legal factorisations of {world} ranks, of {_and(models)}. Median over the timed steps, bars from the "
        f"slowest to the fastest, both over the median of the model's best strategy. {captions.conditions(study)}"
    )
    return FigureArtifact(name, title, caption, study.provenance(_ids(table)), figure)


def family_ranking(study: Study) -> Drawn:
    """Throughput of each strategy relative to the family's best: Transformer against Mamba-2."""
    name, title = "family-ranking", "Transformer against Mamba-2"
    pairs = comparison.family_pairs(study)
    correlations = comparison.family_correlations(study)
    if pairs.empty:
        return Missing(name, title, captions.nothing("paired Transformer and Mamba-2"))
    lowest = 0.9 * float(pairs[["transformer_low", "mamba2_low"]].to_numpy().min())
    groups = list(pairs.groupby(["size", "world"], sort=False))
    columns = min(3, len(groups))
    rows = -(-len(groups) // columns)
    figure, axes = style.canvas(rows, columns, height=1.2 * rows + 0.65, sharex=True, sharey=True)
    for panel, ((size, world), group) in zip(axes.flat, groups, strict=False):
        panel.plot([lowest, 1], [lowest, 1], color="0.6", linewidth=0.6, linestyle="--")
        for _, row in group.iterrows():
            colour = style.KIND_COLOURS[row["kind"]]
            panel.hlines(row["mamba2"], row["transformer_low"], row["transformer_high"], color=colour, linewidth=0.5)
            panel.vlines(row["transformer"], row["mamba2_low"], row["mamba2_high"], color=colour, linewidth=0.5)
            panel.plot(row["transformer"], row["mamba2"], color=colour, marker="o", linestyle="", markersize=3)
        rho = correlations[(correlations["size"] == size) & (correlations["world"] == world)]
        text = f"{size}, {world} ranks" + (f"\nρ = {rho['rho'].item():.2f}" if len(rho) else "")
        panel.set_title(text)
        panel.set(xlim=(lowest, 1.1), ylim=(lowest, 1.1))
    style.trim(axes, len(groups), xlabel="Transformer / best")
    figure.supylabel("Mamba-2: throughput / best", fontsize=style.FONT_POINTS)
    kinds = [kind for kind in style.KIND_COLOURS if kind in set(pairs["kind"])]
    handles = [Line2D([], [], color=style.KIND_COLOURS[kind], marker="o", linestyle="", label=kind) for kind in kinds]
    style.legend_below(figure, handles)
    caption = (
        "Each point is one strategy that both families ran; on the dashed line it suits both alike. Bars from the "
        f"slowest to the fastest timed step; ρ is Spearman's rank correlation. {captions.conditions(study)}"
    )
    return FigureArtifact(name, title, caption, study.provenance(_ids(pairs)), figure)


def _single(study: Study) -> pd.DataFrame:
    """Cells that one axis splits and nothing else changes: recomputing and offloading have their own table."""
    table = comparison.cells(study)
    return table[(table["kind"] != "hybrid") & (table["options"] == "")]


def _ids(table: pd.DataFrame) -> pd.Series:
    return table["run_ids"].explode()


def _method_order(table: pd.DataFrame) -> list[str]:
    """Methods grouped by kind, torch before DeepSpeed."""
    kinds = list(style.KIND_COLOURS)
    named = table[["method", "kind"]].drop_duplicates("method")
    keys = [(kinds.index(kind), "DeepSpeed" in method, method) for method, kind in named.itertuples(index=False)]
    return [method for _, _, method in sorted(keys)]


def _one_size(table: pd.DataFrame) -> list[str]:
    """The models, one a family, of the size that ran most strategies (the largest of such sizes)."""
    counts = table.groupby("size", sort=False)["strategy"].size()
    size = counts[counts == counts.max()].index[-1]
    return list(table[table["size"] == size].drop_duplicates("family")["model"])


def _and(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _family(model: str) -> str:
    """What stands above a narrow panel; the caption has the whole name."""
    return model.split("-")[0]


def _method_panels(table: pd.DataFrame, models: list[str]) -> tuple[Any, Any, list[str]]:
    """A panel for each model that share their rows, one for each method."""
    methods = _method_order(table)
    figure, axes = style.canvas(1, len(models), height=0.14 * len(methods) + 0.95, sharey=True)
    for panel in axes.flat:
        panel.set_ylim(len(methods) - 0.5, -0.5)
        panel.set_yticks(range(len(methods)), methods)
    return figure, axes, methods


def _by_ranks(
    panel: Any, rows: pd.DataFrame, methods: list[str], value: str, low: str, high: str, scale: float
) -> None:
    """One marker for each method and number of ranks, with a bar over its range."""
    looks = _rank_looks(rows)
    for world, (colour, marker) in looks.items():
        points = rows[rows["world"] == world]
        heights = points["method"].map(methods.index)
        panel.hlines(heights, points[low] * scale, points[high] * scale, color=colour, linewidth=0.8)
        panel.plot(points[value] * scale, heights, linestyle="", marker=marker, color=colour)


def _rank_looks(table: pd.DataFrame) -> dict[int, tuple[Any, str]]:
    worlds = sorted(int(world) for world in table["world"].unique())
    return dict(zip(worlds, zip(style.sequence(len(worlds)), style.MARKERS, strict=False), strict=True))


def _rank_handles(table: pd.DataFrame) -> list[Line2D]:
    return [
        Line2D([], [], linestyle="", color=colour, marker=marker, label=f"{world} ranks")
        for world, (colour, marker) in _rank_looks(table).items()
    ]
