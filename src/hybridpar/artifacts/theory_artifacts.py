"""What theory says, and whether it is true: closed forms beside the program, and what they predict at public sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from hybridpar.artifacts import layer_forms, style
from hybridpar.artifacts.artifact import Column, FigureArtifact, Missing, Provenance, TableArtifact
from hybridpar.artifacts.columns import MODEL, numeric, scientific, text
from hybridpar.artifacts.inputs import FAMILIES, Study

VERDICTS = ("exact", "explained", "deviates", "uncovered")
NOT_COMPARED = "Theory was not compared with the program in this study."
_PREDICTED = Provenance(tier="predicted", testbed="none", run_ids=())
_PLACES = ("first", "middle", "last")


def comparisons(study: Study) -> pd.DataFrame:
    """How many numbers of each `quantity` and `tier` were compared (`compared`), and how many have each verdict."""
    counts = study.theory.groupby(["quantity", "tier", "verdict"]).size().unstack("verdict", fill_value=0)
    counts = counts.reindex(columns=list(VERDICTS), fill_value=0)
    layouts = study.theory.groupby(["quantity", "tier"])["run_id"].nunique()
    return counts.assign(compared=counts.sum(axis=1), layouts=layouts).reset_index()


def deviations(study: Study) -> pd.DataFrame:
    """Numbers that differ, by `verdict`, `note` and `quantity`: how many, in how many layouts, and the `largest`
    relative difference with the `item` and `layout` of it."""
    rows = study.theory[study.theory["verdict"].isin(["explained", "deviates"])]
    rows = rows.assign(difference=relative_difference(rows))
    rows = rows.sort_values(["difference", "layout", "rank"], ascending=[False, True, True], kind="stable")
    found = rows.groupby(["verdict", "quantity", "note"], sort=True).agg(
        numbers=("item", "size"),
        layouts=("run_id", "nunique"),
        largest=("difference", "first"),
        item=("item", "first"),
        layout=("layout", "first"),
    )
    return found.reset_index()


def relative_difference(rows: pd.DataFrame) -> pd.Series:
    """Of what was predicted and what was seen, over the larger of the two."""
    both = rows[["predicted", "seen"]].astype(np.float64)
    return (both["predicted"] - both["seen"]).abs() / both.abs().max(axis=1)


def uncovered(study: Study) -> pd.DataFrame:
    """What has no closed form: `reason`, and how many `numbers` of how many `layouts` and which quantities."""
    rows = study.theory[study.theory["verdict"] == "uncovered"]
    found = rows.groupby("note", sort=True).agg(
        quantities=("quantity", lambda names: ", ".join(sorted(set(names)))),
        numbers=("item", "size"),
        layouts=("run_id", "nunique"),
    )
    return found.reset_index(names="reason").sort_values("numbers", ascending=False, kind="stable")


def theory_comparisons(study: Study) -> TableArtifact | Missing:
    """How many numbers were compared, and with what verdict."""
    name, title = "theory-comparisons", "Closed forms beside the program"
    if study.theory.empty:
        return Missing(name, title, NOT_COMPARED)
    columns = (
        Column("quantity", "quantity"),
        Column("tier", "tier"),
        numeric("layouts", "layouts"),
        numeric("compared", "numbers"),
        numeric("exact", "exact"),
        numeric("explained", "explained"),
        numeric("deviates", "deviate"),
        numeric("uncovered", "no form"),
    )
    caption = (
        "Numbers of one rank that a closed form predicts, each beside what the program did: traced with shapes instead "
        "of numbers, or measured in real ranks. Exact: the same number. Explained: another, for a reason that is known "
        "beforehand. Layouts: models under a strategy, trained or served. " + _compared_where(study)
    )
    return TableArtifact(name, title, caption, study.theory_provenance(), comparisons(study), columns)


def theory_deviations(study: Study) -> TableArtifact | Missing:
    """Every number that differs, grouped by its reason; those without one come first."""
    name, title = "theory-deviations", "Where closed forms and program differ"
    frame = deviations(study)
    if study.theory.empty:
        return Missing(name, title, NOT_COMPARED)
    if frame.empty:
        text_of_none = f"No number differs among the {len(study.theory):,} that were compared in this study."
        return Missing(name, title, text_of_none)
    columns = (
        Column("verdict", "verdict"),
        Column("quantity", "quantity"),
        numeric("numbers", "numbers"),
        numeric("layouts", "layouts"),
        Column("largest", "largest difference", scientific, numeric=True),
        Column("item", "of"),
        Column("layout", "in"),
        Column("note", "reason", text),
    )
    caption = (
        "Numbers that differ, with the largest difference relative to the larger of the two, and where it is. What "
        "deviates has no reason that is known: it is a fault of the form or of the program. " + _compared_where(study)
    )
    return TableArtifact(name, title, caption, study.theory_provenance(), frame, columns)


def theory_uncovered(study: Study) -> TableArtifact | Missing:
    """What has no closed form yet, and why."""
    name, title = "theory-uncovered", "What has no closed form"
    frame = uncovered(study)
    if study.theory.empty:
        return Missing(name, title, NOT_COMPARED)
    if frame.empty:
        return Missing(name, title, f"All {len(study.theory):,} numbers that were seen in this study have a form.")
    columns = (
        Column("reason", "what has no form, and why"),
        Column("quantities", "quantities"),
        numeric("layouts", "layouts"),
        numeric("numbers", "numbers"),
    )
    caption = "Numbers that were seen and that no closed form predicts yet. " + _compared_where(study)
    return TableArtifact(name, title, caption, study.theory_provenance(), frame, columns)


def theory_coverage(study: Study) -> FigureArtifact | Missing:
    """Share of each verdict by family and quantity."""
    name, title = "theory-coverage", "What is covered, and exact"
    rows = study.theory
    if rows.empty:
        return Missing(name, title, NOT_COMPARED)
    families = [family for family in FAMILIES if family in set(rows["family"])]
    quantities = sorted(rows["quantity"].unique())
    figure, axes = style.panels(len(families), height=0.17 * len(quantities) + 0.45, sharex=True, sharey=True)
    for panel, family in zip(axes.flat, families, strict=False):
        of_family = rows[rows["family"] == family]
        shares = pd.crosstab(of_family["quantity"], of_family["verdict"], normalize="index")
        _stacked_shares(panel, shares.reindex(index=quantities, columns=list(VERDICTS), fill_value=0.0))
        panel.set_title(f"{family}, n = {len(of_family):,}")
    style.trim(axes, len(families), xlabel="numbers in %")
    seen = [verdict for verdict in VERDICTS if (rows["verdict"] == verdict).any()]
    style.legend_below(figure, [Patch(color=style.VERDICT_COLOURS[verdict], label=verdict) for verdict in seen], 4)
    caption = (
        "Share of the numbers of each kind that are the same in closed form and program, differ, or have no form yet; "
        "n numbers in all. " + _compared_where(study)
    )
    return FigureArtifact(name, title, caption, study.theory_provenance(), figure)


def _stacked_shares(panel: Any, shares: pd.DataFrame) -> None:
    left = np.zeros(len(shares))
    for verdict in VERDICTS:
        width = 100 * shares[verdict].to_numpy(np.float64)
        panel.barh(shares.index, width, left=left, color=style.VERDICT_COLOURS[verdict], height=0.75, linewidth=0)
        left = left + width
    panel.set(xlim=(0, 100), ylim=(len(shares) - 0.5, -0.5))
    panel.grid(visible=False, axis="y")


def schedule_memory_form(study: Study) -> FigureArtifact:
    """Activations held over the actions of a step, for each schedule of a pipeline. The same in every study."""
    name, title = "schedule-memory-form", "Activations over a step, in closed form"
    table = layer_forms.schedules()
    figure, axes = style.canvas(3, 2, height=4.0, sharex=True, sharey=True)
    # wide under narrow, so that ranks that hold the same are all seen
    widths = (2.4, 1.5, 0.6)
    looks = dict(zip(_PLACES, zip(style.sequence(3), style.MARKERS[:3], widths, strict=True), strict=True))
    for panel, (schedule, label) in zip(axes.flat, layer_forms.SCHEDULES.items(), strict=True):
        for place, (colour, marker, width) in looks.items():
            line = table[(table["schedule"] == schedule) & (table["place"] == place)]
            panel.step(line["work"], line["held"] / 1e9, where="post", color=colour, linewidth=width)
            first = line.iloc[int(line["held"].to_numpy().argmax())]
            peak = line["peak"].iloc[0] / 1e9
            panel.plot(first["work"], peak, color=colour, marker=marker, markersize=4.5, markeredgecolor="white")
        panel.set_title(label)
        panel.set_ylim(bottom=0)
    style.name_row(axes, "work done, in forward passes of the rank's layers")
    figure.supylabel("activations held in GB", fontsize=style.FONT_POINTS)
    handles = [Line2D([], [], color=look[0], marker=look[1], label=f"{place} rank") for place, look in looks.items()]
    style.legend_below(figure, handles)
    run = layer_forms.schedule_run("1f1b")
    caption = (
        "Bytes kept for the backward pass on the first, a middle and the last rank of a pipeline after each pass of an "
        "optimizer step, in the order of the schedule, without waiting; the marker is where a rank first holds most. "
        f"{run.model.name}, {run.strategy.pp} pipeline ranks, tensor parallelism of {run.strategy.tp} with sequence "
        f"parallelism, {run.micro_batches} micro-batches of {run.workload.seq_len:,} tokens, {run.workload.precision}; "
        "schedules with two stages a rank cut each stage in two. A backward pass counts as two forward passes, each of "
        "its parts as one. Tier: predicted."
    )
    return FigureArtifact(name, title, caption, _PREDICTED, figure)


def block_forms(study: Study) -> TableArtifact:
    """What one layer costs a rank under each strategy. The same in every study."""
    name, title = "block-forms", "One layer under each strategy, in closed form"
    columns = (
        Column("layer", "layer"),
        MODEL,
        Column("method", "strategy"),
        numeric("ranks", "ranks"),
        numeric("parameters", "parameters M", 1, 1e-6),
        numeric("forward", "forward GFLOP", 1, 1e-9),
        numeric("recompute", "again GFLOP", 1, 1e-9),
        numeric("kept", "kept MB", 1, 1e-6),
        numeric("again", "made again MB", 1, 1e-6),
        numeric("calls", "calls"),
        numeric("bytes", "sent MB", 1, 1e-6),
    )
    run = layer_forms.layer_run(next(iter(layer_forms.LAYERS)), {})
    caption = (
        "One layer and one micro-batch on the first rank: parameters, FLOPs of matrix products in the forward pass and "
        "of recomputation, bytes kept for the backward pass and made again in it, calls of collectives and sends in "
        "forward and backward pass, and the bytes of the tensors that the rank gives to them. A micro-batch is one "
        f"sequence of {run.workload.seq_len:,} tokens in {run.workload.precision}; experts get an even load; what is "
        "sent once a step (gradients) is left out. A strategy that is not legal for a layer has no row. "
        "Tier: predicted."
    )
    return TableArtifact(name, title, caption, _PREDICTED, layer_forms.layers(), columns)


def _compared_where(study: Study) -> str:
    source = study.theory_provenance()
    return f"Tier: {source.tier}; testbed: {source.testbed}."
