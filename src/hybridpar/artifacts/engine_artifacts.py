"""DeepSpeed beside torch: the same strategies in both, and where DeepSpeed trains another model than one device."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D

from hybridpar.artifacts import captions, comparison, style
from hybridpar.artifacts.artifact import Column, FigureArtifact, Missing, Provenance, TableArtifact
from hybridpar.artifacts.columns import MODEL, RANKS, numeric, scientific, text, yes_no
from hybridpar.artifacts.inputs import Study


def engines(study: Study) -> TableArtifact | Missing:
    """The same strategy in torch and in DeepSpeed."""
    name, title = "engines", "DeepSpeed beside torch"
    frame = comparison.engine_pairs(study)
    if frame.empty:
        return Missing(name, title, captions.nothing("paired torch and DeepSpeed"))
    columns = (
        MODEL,
        RANKS,
        Column("method_t", "torch"),
        Column("method_d", "DeepSpeed"),
        numeric("ratio", "speed ratio", 2),
        numeric("ratio_low", "min", 2),
        numeric("ratio_high", "max", 2),
        numeric("peak_mb_t", "torch MB", 1),
        numeric("peak_mb_d", "DS MB", 1),
        numeric("wire_mb_t", "torch wire MB", 2),
        numeric("wire_mb_d", "DS wire MB", 2),
    )
    caption = (
        "Median throughput of DeepSpeed over that of torch for the same strategy, with the extreme ratios of the timed "
        f"steps; peak memory and bytes sent of each. {captions.conditions(study)}"
    )
    return TableArtifact(name, title, caption, study.provenance(frame["run_ids"].explode()), frame, columns)


def engine_ratios(study: Study) -> FigureArtifact | Missing:
    """Throughput and peak memory of DeepSpeed over torch's, for each strategy that both have."""
    name, title = "engine-ratios", "DeepSpeed over torch"
    pairs = comparison.engine_pairs(study)
    if pairs.empty:
        return Missing(name, title, captions.nothing("paired torch and DeepSpeed"))
    pairs = pairs.assign(what=pairs["method_t"] + ", " + pairs["world"].astype(str) + " ranks")
    rows = list(dict.fromkeys(pairs.sort_values(["world", "method_t"])["what"]))
    families = sorted(pairs["family"].unique())
    figure, axes = style.canvas(1, 2, height=0.2 * len(rows) + 0.95, sharey=True)
    for position, family in enumerate(families):
        group = pairs[pairs["family"] == family]
        y = group["what"].map(rows.index) + 0.5 * ((position + 0.5) / len(families) - 0.5)
        colour, marker = style.FAMILY_COLOURS[family], style.MARKERS[position]
        axes[0, 0].hlines(y, group["ratio_low"], group["ratio_high"], color=colour, linewidth=0.7)
        axes[0, 0].plot(group["ratio"], y, color=colour, marker=marker, linestyle="", markersize=3)
        axes[0, 1].plot(
            group["peak_mb_d"] / group["peak_mb_t"], y, color=colour, marker=marker, linestyle="", markersize=3
        )
    for panel, label in zip(axes.flat, ("speed", "memory"), strict=True):
        panel.axvline(1, color="0.6", linewidth=0.6, linestyle="--")
        panel.set(xlabel=label, ylim=(len(rows) - 0.5, -0.5))
        panel.set_xlim(0, 1.1 * max(1.0, panel.dataLim.x1))
    axes[0, 0].set_yticks(range(len(rows)), rows)
    handles = [
        Line2D([], [], color=style.FAMILY_COLOURS[family], marker=style.MARKERS[n], linestyle="", label=family)
        for n, family in enumerate(families)
    ]
    style.legend_below(figure, handles, columns=4)
    caption = (
        "Median of DeepSpeed over median of torch for the same strategy and model, bars with the extreme ratios of the "
        f"timed steps; left of the dashed line DeepSpeed is slower, or holds less. {captions.conditions(study)}"
    )
    return FigureArtifact(name, title, caption, study.provenance(pairs["run_ids"].explode()), figure)


def departures(study: Study) -> TableArtifact | Missing:
    """Settings with which DeepSpeed trains another model, each with the setting that is right; both were run."""
    name, title = "departures", "Where DeepSpeed departs from one device"
    frame = study.departures
    if frame.empty:
        return Missing(name, title, "Departures of DeepSpeed were not measured in this study.")
    frame = frame.assign(**{f"{side}_worst": worst_deviation(frame, side) for side in ("departing", "correct")})
    columns = (
        Column("setting", "setting"),
        Column("differs", "what happens"),
        Column("departing_verdict", "verdict"),
        Column("departing_worst", "deviation", scientific, numeric=True),
        Column("departing_reason", "refusal", text),
        Column("right", "what is right"),
        Column("correct_worst", "its deviation", scientific, numeric=True),
        Column("reproduced", "reproduced", yes_no),
    )
    source = Provenance(", ".join(sorted(frame["tier"].unique())), study.provenance().testbed, ())
    caption = (
        "Each setting was run against one device, beside the setting that is right. Deviation: the largest relative "
        "one of loss, gradient norm, gradients and parameters; none where the engine refuses to start. "
        f"Tier: {source.tier}; testbed: {source.testbed}."
    )
    return TableArtifact(name, title, caption, source, frame, columns)


def worst_deviation(departures: pd.DataFrame, side: str) -> pd.Series:
    """The largest relative deviation of one side (`departing` or `correct`), nan where it was refused."""
    kinds = [f"{side}_{kind}" for kind in ("loss", "grad_norm", "gradient", "parameter")]
    return departures[kinds].astype(np.float64).max(axis=1)
