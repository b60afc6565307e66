"""Sentences about results, computed: the only place where a conclusion is worded.

Each function returns `Finding`s. A sentence names medians with their range and the number of values, and says that
something is undecided where ranges overlap.
"""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from hybridpar.artifacts import captions, collective_cost, comparison
from hybridpar.artifacts.inputs import Study
from hybridpar.outcome import OUTCOMES


@dataclass(frozen=True)
class Finding:
    """One computed sentence and the runs that it rests on."""

    key: str
    text: str
    run_ids: tuple[str, ...]

    def __str__(self) -> str:
        return self.text


def conditions(study: Study) -> list[Finding]:
    """Under which conditions the study was run."""
    ok = study.provenance(study.finished["run_id"])
    steps = comparison.timed_steps(study)
    text = (
        f"Study “{study.name}”: {_count(len(study.runs), 'run')}, of which {len(study.finished)} finished, with "
        f"{_count(len(steps), 'timed step')}. {captions.conditions(study)}"
    )
    return [Finding("conditions", text, ok.run_ids)]


def collectives(study: Study) -> list[Finding]:
    """What a collective costs."""
    fitted, factors = collective_cost.fits(study.bench), collective_cost.wire_factors(study.bench)
    if fitted.empty:
        return [_nothing("collectives", "collective benchmark")]
    known = factors.dropna(subset=["ring"])
    deviation = ((known["factor_high"] - known["ring"]).abs() / known["ring"]).max() if len(known) else float("nan")
    found = [
        Finding(
            "collectives-wire",
            f"The bytes that a rank sends differ from the ring formula by at most {_percent(deviation)} over "
            f"{_count(len(known), 'pair')} of operation and ranks.",
            (),
        )
    ]
    for op, group in fitted.groupby("op"):
        first, last = group.sort_values("world").iloc[0], group.sort_values("world").iloc[-1]
        if first["world"] == last["world"]:
            continue
        found.append(
            Finding(
                f"collectives-latency-{op}",
                f"{captions.operation(str(op)).capitalize()}: latency is {first['alpha_us']:,.0f} µs on "
                f"{first['world']:.0f} ranks and {last['alpha_us']:,.0f} µs on {last['world']:.0f}; bandwidth "
                f"{_rate(first['mb_per_s'])} and {_rate(last['mb_per_s'])} (median error of the fits "
                f"{_percent(first['error'])} and {_percent(last['error'])}).",
                (),
            )
        )
    return found


def single_strategies(study: Study) -> list[Finding]:
    """What each strategy does alone."""
    table = comparison.cells(study)
    alone = table[(table["kind"] != "hybrid") & (table["world"] > 1)]
    if alone.empty:
        return [_nothing("single", "single-strategy")]
    found = []
    for model, group in alone.groupby("model", sort=False):
        world = group["world"].max()
        group = group[group["world"] == world]
        if len(group) < 2:
            continue
        fastest, leanest = group.loc[group["tokens_per_s"].idxmax()], group.loc[group["peak_mb"].idxmin()]
        heaviest = group.loc[group["peak_mb"].idxmax()]
        found.append(
            Finding(
                f"single-{model}",
                f"{model} on {world} ranks: {fastest['method']} is fastest with {_tokens(fastest)}; "
                f"{leanest['method']} needs least memory, {leanest['peak_mb']:,.1f} MB on the largest rank against "
                f"{heaviest['peak_mb']:,.1f} MB for {heaviest['method']}.",
                _ids(group),
            )
        )
    found += _communication(alone)
    return found or [_nothing("single", "comparable single-strategy")]


def _communication(alone: pd.DataFrame) -> list[Finding]:
    """How the share of communication grows with the ranks, over all single strategies."""
    shares = alone.dropna(subset=["comm_share"])
    if shares.empty:
        return []
    parts = []
    for world, group in shares.groupby("world"):
        spread = comparison.Spread.of(group["comm_share"])
        parts.append(
            f"{_percent(spread.median)} on {world} ranks ({_percent(spread.low)} to {_percent(spread.high)}, "
            f"{_count(spread.n, 'pair')})"
        )
    text = f"Blocked in communication is, in the median over pairs of strategy and model, {_and(parts)} of a step."
    return [Finding("single-communication", text, _ids(shares))]


def loss_parity(study: Study) -> list[Finding]:
    """Whether every strategy trains the same model as one device."""
    runs = comparison.loss_deviations(study)
    if runs.empty:
        return [_nothing("losses", "multi-rank")]
    parts = []
    for precision, group in runs.groupby("precision"):
        worst = group.iloc[int(group["deviation"].to_numpy().argmax())]
        parts.append(
            f"{worst['deviation']:.1e} in {precision} ({_count(len(group), 'run')}; largest for {worst['strategy']}, "
            f"{worst['model']})"
        )
    text = f"Losses differ from those of one device, relatively and over all steps, by at most {_and(parts)}."
    return [Finding("losses", text, tuple(sorted({*runs["run_id"], *runs["alone"]})))]


def engines(study: Study) -> list[Finding]:
    """DeepSpeed against torch for the same strategies."""
    pairs = comparison.engine_pairs(study)
    if pairs.empty:
        return [_nothing("engines", "paired torch and DeepSpeed")]
    spread = comparison.Spread.of(pairs["ratio"])
    undecided = int(((pairs["ratio_low"] <= 1) & (pairs["ratio_high"] >= 1)).sum())
    text = (
        f"DeepSpeed reaches {spread.median:.2f} of torch's throughput in the median of "
        f"{_count(spread.n, 'paired strategy', 'paired strategies')} ({spread.low:.2f} to {spread.high:.2f}); in "
        f"{undecided} of them the ranges of the two overlap."
    )
    return [Finding("engines", text, _ids(pairs))]


def hybrids(study: Study) -> list[Finding]:
    """Which hybrid wins, and whether a hybrid wins at all."""
    table = comparison.cells(study)
    best = comparison.winners(table[table["world"] > 1])
    if best.empty:
        return [_nothing("hybrids", "multi-rank")]
    found = []
    for world, group in best.groupby("world"):
        mixed = int((group["kind"] == "hybrid").sum())
        kinds = _and([f"{kind} ({count})" for kind, count in group["kind"].value_counts(sort=True).items()])
        decided = int(group["decided"].sum())
        found.append(
            Finding(
                f"hybrids-{world}",
                f"On {world} ranks a hybrid is fastest for {mixed} of {_count(len(group), 'model')}; by kind: {kinds}. "
                f"The winner is decided (ranges apart) for {decided}.",
                _ids(group),
            )
        )
    for _, row in best[best["world"] == best["world"].max()].iterrows():
        word = "decided" if row["decided"] else "undecided: the ranges overlap"
        found.append(
            Finding(
                f"best-{row['model']}",
                f"{row['model']} on {row['world']} ranks: {row['strategy']} at {row['tokens_per_s']:,.0f} tokens/s "
                f"({row['tokens_low']:,.0f} to {row['tokens_high']:,.0f}), {_percent(row['lead'] - 1)} before "
                f"{row['runner_up']} of {row['compared']} strategies ({word}).",
                row["run_ids"],
            )
        )
    return found


def families(study: Study) -> list[Finding]:
    """Whether Transformer and Mamba-2 rank the strategies alike."""
    correlations, pairs = comparison.family_correlations(study), comparison.family_pairs(study)
    if pairs.empty:
        return [_nothing("families", "paired Transformer and Mamba-2")]
    found = []
    for _, row in correlations.iterrows():
        winner = (
            f"both are fastest with {row['transformer_winner']}"
            if row["same_winner"]
            else f"the Transformer is fastest with {row['transformer_winner']}, Mamba-2 with {row['mamba2_winner']}"
        )
        found.append(
            Finding(
                f"families-{row['size']}-{row['world']}",
                f"{row['size']} models on {row['world']} ranks: Spearman's ρ is {row['rho']:.2f} "
                f"({row['rho_low']:.2f} to {row['rho_high']:.2f}) over {row['strategies']} strategies; {winner}.",
                row["run_ids"],
            )
        )
    apart = pairs[(pairs["ratio_low"] > 1) | (pairs["ratio_high"] < 1)]
    text = (
        f"Of {_count(len(pairs), 'paired strategy', 'paired strategies')}, {len(apart)} differ between the families by "
        "more than the range of the timed steps"
    )
    if len(apart):
        strongest = apart.iloc[int((apart["ratio"] - 1).abs().to_numpy().argmax())]
        text += (
            f"; the largest effect is {strongest['strategy']} ({strongest['size']}, {strongest['world']} ranks), whose "
            f"relative throughput under Mamba-2 is {strongest['ratio']:.2f} of that under the Transformer "
            f"({strongest['ratio_low']:.2f} to {strongest['ratio_high']:.2f})"
        )
    return [*found, Finding("families-effects", f"{text}.", _ids(pairs))]


def outcomes(study: Study) -> list[Finding]:
    """How the runs of the study ended."""
    counts = study.runs["outcome"].value_counts()
    parts = [f"{counts[kind]} {kind}" for kind in OUTCOMES if counts.get(kind, 0)]
    return [Finding("outcomes", f"Of {_count(len(study.runs), 'run')}: {_and(parts)}.", study.provenance().run_ids)]


def everything(study: Study) -> dict[str, list[Finding]]:
    """All findings by the question that they answer."""
    return {
        "conditions": conditions(study),
        "outcomes": outcomes(study),
        "collectives": collectives(study),
        "losses": loss_parity(study),
        "single": single_strategies(study),
        "engines": engines(study),
        "hybrids": hybrids(study),
        "families": families(study),
    }


def _nothing(key: str, kind: str) -> Finding:
    return Finding(key, captions.nothing(kind), ())


def _tokens(cell: pd.Series) -> str:
    return (
        f"{cell['tokens_per_s']:,.0f} tokens/s ({cell['tokens_low']:,.0f} to {cell['tokens_high']:,.0f}, "
        f"n = {cell['steps']})"
    )


def _rate(mb_per_s: float) -> str:
    return "unbounded by these sizes" if mb_per_s == float("inf") else f"{mb_per_s:,.0f} MB/s"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if abs(share) < 0.1 else f"{100 * share:.0f} %"


def _count(count: int, noun: str, plural: str | None = None) -> str:
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def _and(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1] if parts else "none"


def _ids(table: pd.DataFrame) -> tuple[str, ...]:
    return tuple(sorted({run for ids in table["run_ids"] for run in ids}))
