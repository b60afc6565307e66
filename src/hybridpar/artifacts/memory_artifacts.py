"""Figures and tables of where memory goes: schedules, options that save it, state by strategy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.patches import Patch

from hybridpar.artifacts import captions, memory_use, style
from hybridpar.artifacts.artifact import Column, FigureArtifact, Missing, TableArtifact
from hybridpar.artifacts.columns import METHOD, MODEL, RANKS, numeric
from hybridpar.artifacts.inputs import MEMORY_CATEGORIES, Study


def schedule_memory(study: Study) -> FigureArtifact | Missing:
    """What the fullest rank holds under each schedule of a pipeline, by category."""
    name, title = "schedule-memory", "Memory by pipeline schedule"
    table = memory_use.schedules(study)
    if table.empty:
        return Missing(name, title, captions.nothing("pipeline schedule"))
    groups = list(table.groupby(["model", "world"], sort=False))
    tallest = max(len(group) for _, group in groups)
    figure, axes = style.canvas(len(groups), 1, height=len(groups) * (0.14 * tallest + 0.35) + 0.5, sharex=True)
    for panel, ((model, world), group) in zip(axes.flat, groups, strict=True):
        stacked_categories(panel, group.sort_values("peak_mb").set_index("method"))
        panel.set_title(f"{model}, {world} stages on as many ranks")
    axes.flat[-1].set_xlabel("peak memory of the largest rank in MB")
    style.legend_below(figure, category_handles(table))
    caption = (
        "Peak bytes of each category on the rank that holds most of it, counted in a warm-up step. Schedules with two "
        "stages a rank hold the activations of both. "
        f"{captions.conditions(study, times=False)}"
    )
    return FigureArtifact(name, title, caption, study.provenance(table["run_ids"].explode()), figure)


def stacked_categories(panel: Any, table: pd.DataFrame) -> None:
    """Bars of `<category>_mb`, one for each row of `table`, labelled by its index."""
    left = np.zeros(len(table))
    for category in MEMORY_CATEGORIES:
        width = np.nan_to_num(table[f"{category}_mb"].to_numpy(np.float64))
        panel.barh(table.index, width, left=left, color=style.CATEGORY_COLOURS[category], height=0.75, linewidth=0)
        left = left + width
    panel.invert_yaxis()
    panel.grid(visible=False, axis="y")


def category_handles(table: pd.DataFrame) -> list[Patch]:
    """One legend entry for each category of memory that a row of `table` holds."""
    held = [category for category in MEMORY_CATEGORIES if (table[f"{category}_mb"] > 0).any()]
    return [Patch(color=style.CATEGORY_COLOURS[category], label=category) for category in held]


def schedules(study: Study) -> TableArtifact | Missing:
    """Throughput and memory of each schedule of a pipeline."""
    name, title = "schedules", "Pipeline schedules"
    frame = memory_use.schedules(study)
    if frame.empty:
        return Missing(name, title, captions.nothing("pipeline schedule"))
    columns = (
        MODEL,
        RANKS,
        METHOD,
        numeric("tokens_per_s", "tokens/s"),
        numeric("tokens_low", "min"),
        numeric("tokens_high", "max"),
        numeric("activations_mb", "activations MB", 2),
        numeric("peak_mb", "peak MB", 2),
        numeric("wire_mb", "wire MB", 2),
        numeric("comm_share", "waiting in %", 0, 100),
    )
    caption = (
        "Median throughput with the slowest and fastest timed step, memory of the largest rank, bytes a rank sends in "
        f"a step, and the share of the step that it waits for a message, the bubble included. "
        f"{captions.conditions(study)}"
    )
    return TableArtifact(name, title, caption, study.provenance(frame["run_ids"].explode()), frame, columns)


def memory_savings(study: Study) -> TableArtifact | Missing:
    """What recomputation and offload save, and what they cost."""
    name, title = "memory-savings", "What recomputation and offload save"
    frame = memory_use.savings(study)
    if frame.empty:
        return Missing(name, title, captions.nothing("recomputing or offloading"))
    columns = (
        MODEL,
        RANKS,
        Column("base", "strategy"),
        Column("option", "with"),
        numeric("activations_before", "activations MB", 2),
        numeric("activations_after", "then", 2),
        numeric("peak_before", "peak MB", 2),
        numeric("peak_after", "then", 2),
        numeric("host_after", "host MB", 2),
        numeric("speed", "speed ratio", 2),
        numeric("speed_low", "min", 2),
        numeric("speed_high", "max", 2),
    )
    caption = (
        "Each strategy with the option beside itself without: activations and peak of the largest rank before and "
        "then, what lies in host memory, and throughput over that without the option with its extremes. On a CPU, host "
        f"and device memory are the same chips: the bytes are told apart by who owns them. {captions.conditions(study)}"
    )
    return TableArtifact(name, title, caption, study.provenance(frame["run_ids"].explode()), frame, columns)


def state_per_parameter(study: Study) -> TableArtifact | Missing:
    """Bytes that the fullest rank holds for each parameter of the model, by strategy."""
    name, title = "state-per-parameter", "State for each parameter of the model"
    frame = memory_use.state_per_parameter(study)
    if not (frame["world"] > 1).any():
        return Missing(name, title, captions.nothing("multi-rank"))
    columns = (
        MODEL,
        RANKS,
        METHOD,
        numeric("parameters", "parameters B", 2),
        numeric("gradients", "gradients B", 2),
        numeric("optimizer", "optimizer B", 2),
        numeric("state", "state B", 2),
        numeric("host", "host B", 2),
    )
    caption = (
        "Peak bytes on the fullest rank for each parameter of the whole model; the device's memory over this is the "
        "largest model whose state fits, before activations. "
        f"{captions.conditions(study, times=False)}"
    )
    return TableArtifact(name, title, caption, study.provenance(frame["run_ids"].explode()), frame, columns)
