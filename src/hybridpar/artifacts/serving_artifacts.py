"""Figures and tables of serving: latency by context, what is cached, all numbers."""

from __future__ import annotations

from matplotlib.lines import Line2D

from hybridpar.artifacts import captions, style
from hybridpar.artifacts.artifact import Column, FigureArtifact, Missing, TableArtifact
from hybridpar.artifacts.columns import LABEL, MODEL, RANKS, numeric
from hybridpar.artifacts.inputs import Study
from hybridpar.artifacts.serving import cache_per_sequence, cells

_LATENCY = {"prefill": "time to first token", "decode": "time per output token"}


def prefill_latency(study: Study) -> FigureArtifact | Missing:
    """Time to the first token by context, for each strategy."""
    return _latency(study, "prefill", "Time to the first token")


def decode_latency(study: Study) -> FigureArtifact | Missing:
    """Time per output token by context, for each strategy."""
    return _latency(study, "decode", "Time per output token")


def _latency(study: Study, phase: str, title: str) -> FigureArtifact | Missing:
    name = f"{phase}-latency"
    table = cells(study)
    table = table[table["phase"] == phase]
    if not (table["world"] > 1).any():
        return Missing(name, title, captions.nothing(f"multi-rank {phase}"))
    models = list(dict.fromkeys(table["model"]))
    kinds = [kind for kind in style.KIND_COLOURS if kind in set(table["kind"])]
    batches = sorted(table["global_batch"].unique())
    dashes = dict(zip(batches, ("-", "--", ":", "-."), strict=False))
    figure, axes = style.panels(len(models), height=1.5, sharex=True)
    for panel, model in zip(axes.flat, models, strict=False):
        of_model = table[table["model"] == model]
        for (kind, batch, _), line in of_model.groupby(["kind", "global_batch", "strategy"]):
            colour, marker = style.KIND_COLOURS[kind], style.MARKERS[kinds.index(kind)]
            line = line.sort_values("seq_len")
            panel.vlines(
                line["seq_len"], 1e3 * line["latency_low"], 1e3 * line["latency_high"], color=colour, linewidth=0.7
            )
            panel.plot(
                line["seq_len"],
                1e3 * line["latency_s"],
                color=colour,
                marker=marker,
                markersize=3,
                linestyle=dashes.get(batch, "-"),
            )
        contexts = sorted(table["seq_len"].unique())
        panel.set(xscale="log", yscale="log", title=model, xlim=(contexts[0] / 1.5, contexts[-1] * 1.5))
        style.log_axis(panel.xaxis, contexts)
        style.log_axis(panel.yaxis)
    style.trim(axes, len(models), xlabel="tokens of context")
    figure.supylabel(f"{_LATENCY[phase]} in ms", fontsize=style.FONT_POINTS)
    handles = [
        Line2D([], [], color=style.KIND_COLOURS[kind], marker=style.MARKERS[n], linestyle="", label=kind)
        for n, kind in enumerate(kinds)
    ]
    handles += [
        Line2D([], [], color="0.3", linestyle=dash, label=f"{batch} sequences") for batch, dash in dashes.items()
    ]
    style.legend_below(figure, handles)
    world = int(table["world"].max())
    caption = (
        f"Median over the timed steps, bars from the fastest to the slowest, slowest of up to {world} ranks. "
        f"{captions.conditions(study)}"
    )
    return FigureArtifact(name, title, caption, study.provenance(table["run_ids"].explode()), figure)


def cache_growth(study: Study) -> FigureArtifact | Missing:
    """Bytes cached for a sequence by its context: keys and values, or a state."""
    name, title = "cache-growth", "What is cached for a sequence"
    table = cache_per_sequence(study)
    if table.empty:
        return Missing(name, title, captions.nothing("decoding"))
    figure, axes = style.canvas(height=1.9)
    panel = axes[0, 0]
    for position, (model, line) in enumerate(table.groupby("model", sort=False)):
        colour = style.FAMILY_COLOURS[line["family"].iloc[0]]
        panel.plot(line["seq_len"], line["kb"], color=colour, marker=style.MARKERS[position], label=model)
    contexts = sorted(table["seq_len"].unique())
    panel.set(xscale="log", yscale="log", xlabel="tokens of context", ylabel="kB a sequence")
    panel.set_xlim(contexts[0] / 1.5, contexts[-1] * 1.5)
    style.log_axis(panel.xaxis, contexts)
    style.log_axis(panel.yaxis)
    style.legend_below(figure, panel.get_legend_handles_labels()[0], columns=2)
    caption = (
        "Keys and values of attention grow with the context; a Mamba-2 state does not; a hybrid has both. Bytes held "
        f"on one device after decoding. {captions.conditions(study, times=False)}"
    )
    return FigureArtifact(name, title, caption, study.provenance(table["run_ids"].explode()), figure)


def serving(study: Study) -> TableArtifact | Missing:
    """Every strategy, phase, context and batch that was served."""
    name, title = "serving", "Serving"
    frame = cells(study)
    if frame.empty:
        return Missing(name, title, captions.nothing("serving"))
    columns = (
        MODEL,
        Column("phase", "phase"),
        numeric("seq_len", "context"),
        numeric("global_batch", "batch"),
        RANKS,
        LABEL,
        numeric("latency_s", "ms", 2, 1e3),
        numeric("latency_low", "min", 2, 1e3),
        numeric("latency_high", "max", 2, 1e3),
        numeric("tokens_per_s", "tokens/s"),
        numeric("steps", "n"),
        numeric("weights_mb", "weights MB", 2),
        numeric("cache_mb", "cache MB", 3),
        numeric("wire_mb", "wire MB", 3),
    )
    caption = (
        "Prefill: time to the first token, and prompt tokens a second. Decode: time per output token, and new tokens a "
        "second of all sequences. Median with the fastest and slowest of n timed steps; weights and cache of the "
        f"fullest rank; bytes a rank sends in a step. {captions.conditions(study)}"
    )
    return TableArtifact(name, title, caption, study.provenance(frame["run_ids"].explode()), frame, columns)
