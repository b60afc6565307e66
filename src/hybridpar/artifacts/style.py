"""The house style of every figure: one column wide, colour-blind safe, legible in print, the same on every machine.

Fonts are matplotlib's own DejaVu, so that a machine without fonts draws the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import seaborn as sns
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

COLUMN_INCHES = 3.4  # width of one column of a two-column A4 page
FONT_POINTS = 7.5

_RC: Mapping[str, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "mathtext.fontset": "dejavusans",
    "font.size": FONT_POINTS,
    "axes.titlesize": FONT_POINTS,
    "axes.labelsize": FONT_POINTS,
    "xtick.labelsize": FONT_POINTS - 1,
    "ytick.labelsize": FONT_POINTS - 1,
    "legend.fontsize": FONT_POINTS - 1,
    "legend.title_fontsize": FONT_POINTS - 1,
    "legend.frameon": False,
    "axes.linewidth": 0.6,
    "grid.linewidth": 0.4,
    "lines.linewidth": 1.0,
    "lines.markersize": 3.5,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "savefig.dpi": 220,
    "pdf.fonttype": 42,
    "svg.hashsalt": "hybridpar",
}

_PALETTE = sns.color_palette("colorblind", 10)

# One colour per kind of strategy, in every figure; engines differ by marker and hatch, never by colour alone.
KIND_COLOURS: Mapping[str, Any] = {
    "one device": (0.35, 0.35, 0.35),
    "recompute": (0.6, 0.6, 0.6),
    "data": _PALETTE[0],
    "sharded data": _PALETTE[9],
    "tensor": _PALETTE[1],
    "pipeline": _PALETTE[2],
    "context": _PALETTE[5],
    "expert": _PALETTE[6],
    "hybrid": _PALETTE[4],
}
FAMILY_COLOURS: Mapping[str, Any] = {
    "transformer": _PALETTE[0],
    "mamba2": _PALETTE[1],
    "hybrid": _PALETTE[2],
    "moe": _PALETTE[4],
}
CATEGORY_COLOURS: Mapping[str, Any] = {
    "parameters": _PALETTE[0],
    "gradients": _PALETTE[1],
    "optimizer": _PALETTE[2],
    "activations": _PALETTE[4],
    "buffers": _PALETTE[7],
    "host": _PALETTE[3],
    "cache": _PALETTE[5],
}
VERDICT_COLOURS: Mapping[str, Any] = {
    "exact": _PALETTE[2],
    "explained": _PALETTE[0],
    "deviates": _PALETTE[3],
    "uncovered": (0.75, 0.75, 0.75),
}
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*", "h")


def apply() -> None:
    """Switch matplotlib to the house style."""
    sns.set_theme(context="paper", style="whitegrid", palette="colorblind", rc=dict(_RC))


def canvas(rows: int = 1, columns: int = 1, *, height: float, sharex: bool = False, sharey: bool = False) -> Any:
    """A one-column figure of `height` inches and its axes as a (rows, columns) array.

    The figure belongs to no window system: it is drawn on Agg and forgotten when its owner forgets it.
    """
    apply()
    figure = Figure(figsize=(COLUMN_INCHES, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False, sharex=sharex, sharey=sharey)
    return figure, np.asarray(axes)


def trim(axes: Any, panels: int, *, xlabel: str) -> None:
    """Hide the grid's places after the first `panels`; name the x axis under the last panel of each column."""
    for place in axes.flat[panels:]:
        place.set_axis_off()
    for panel in axes.flat[max(0, panels - axes.shape[1]) : panels]:
        panel.set_xlabel(xlabel)
        panel.tick_params(labelbottom=True)


def log_axis(axis: Any, values: Sequence[float] | None = None) -> None:
    """A logarithmic axis with plain numbers: at `values` alone when given, else at 1, 2 and 5 of each decade."""
    if values is None:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    else:
        axis.set_major_locator(FixedLocator(list(values)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_locator(NullLocator())


def few_ticks(axis: Any) -> None:
    """Three numbers at most, for a narrow panel."""
    axis.set_major_locator(MaxNLocator(2))


def name_row(axes: Any, label: str) -> None:
    """Name the x axis once, under the middle of a row of panels."""
    count = axes.shape[1]
    axes[-1, count // 2].set_xlabel(label, x=0.5 if count % 2 else 0.0)


def panels(count: int, *, height: float, sharex: bool = False, sharey: bool = False) -> Any:
    """A canvas for `count` panels of `height` inches: beside one another, or in two columns when they are many."""
    columns = min(2, count)
    rows = -(-count // columns)
    return canvas(rows, columns, height=rows * height, sharex=sharex, sharey=sharey)


def legend_below(figure: Figure, handles: Sequence[Any], columns: int = 3) -> None:
    """One legend for all panels, under them, outside the axes."""
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, handlelength=1.4, columnspacing=1.0)


def sequence(count: int) -> list[Any]:
    """`count` colours for an ordered quantity (ranks), light to dark, without the palest."""
    return list(sns.color_palette("flare", count))


def light(colour: Any) -> Any:
    """A tint on which black text is legible."""
    return tuple(1 - 0.45 * (1 - channel) for channel in colour)


def tile(x: float, y: float, colour: Any, *, decided: bool) -> Rectangle:
    """One square of a map, centred on (x, y); hatched where the answer is undecided."""
    return Rectangle(
        (x - 0.5, y - 0.5),
        1,
        1,
        facecolor=light(colour),
        edgecolor="white" if decided else (1, 1, 1, 0.6),
        hatch=None if decided else "////",
        linewidth=1.5,
    )
