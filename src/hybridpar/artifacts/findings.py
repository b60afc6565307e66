"""Sentences about results, computed: the only place where a conclusion is worded.

Each function returns `Finding`s. A sentence names medians with their range and the number of values, and says that
something is undecided where ranges overlap.
"""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from hybridpar.artifacts import (
    captions,
    collective_cost,
    comparison,
    engine_artifacts,
    layer_forms,
    memory_use,
    serving,
    theory_artifacts,
)
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


def departures(study: Study) -> list[Finding]:
    """Settings with which DeepSpeed trains another model than one device."""
    table = study.departures
    if table.empty:
        return [Finding("departures", "Departures of DeepSpeed were not measured in this study.", ())]
    again = table[table["reproduced"]]
    trained = again[again["departing_verdict"] == "differs"]
    deviation = engine_artifacts.worst_deviation(trained, "departing")
    text = (
        f"Of {_count(len(table), 'setting')} known to depart from one device, {len(again)} do so here: DeepSpeed "
        f"trains another model in {len(trained)} and refuses to start in {len(again) - len(trained)}; the setting "
        "beside each is right."
    )
    if len(trained):
        worst = trained.iloc[int(deviation.to_numpy().argmax())]
        text += f" The largest deviation is {deviation.max():.1e}, of {worst['setting']}: {worst['differs']}."
    return [Finding("departures", text, ())]


def theory(study: Study) -> list[Finding]:
    """Whether closed forms are what the program does, what has none, and what they predict of pipelines."""
    return [*_compared_with_theory(study.theory), *_uncovered(study), _predicted_schedules()]


def _compared_with_theory(rows: pd.DataFrame) -> list[Finding]:
    if rows.empty:
        return [Finding("theory-verdicts", theory_artifacts.NOT_COMPARED, ())]
    counts, tiers = rows["verdict"].value_counts(), rows["tier"].value_counts()
    exact, explained, deviating = (int(counts.get(verdict, 0)) for verdict in ("exact", "explained", "deviates"))
    seen = _and([f"{count:,} were {tier}" for tier, count in tiers.items()])
    text = (
        f"Of {_count(exact + explained + deviating, 'number')} that a closed form predicts, {exact:,} are exactly what "
        f"the program did, {explained:,} differ for a reason that is known, and "
        f"{f'{deviating:,} deviate' if deviating else 'none deviates'}. Of all {len(rows):,}, those without a form "
        f"included, {seen}; {_phases(rows)} layouts of {_count(rows['family'].nunique(), 'family', 'families')}."
    )
    if deviating:
        wrong = rows[rows["verdict"] == "deviates"]
        difference = theory_artifacts.relative_difference(wrong)
        worst = wrong.iloc[int(difference.to_numpy().argmax())]
        text += (
            f" The largest deviation is {_percent(float(difference.max()))}, of {worst['quantity']} ({worst['item']}) "
            f"for {worst['layout']}, {worst['model']}."
        )
    return [Finding("theory-verdicts", text, ())]


def _phases(rows: pd.DataFrame) -> str:
    """How many layouts were trained and served: `12 trained and 4 served`."""
    is_trained = rows["phase"] == "train"
    counts = {"trained": rows.loc[is_trained, "run_id"].nunique(), "served": rows.loc[~is_trained, "run_id"].nunique()}
    return _and([f"{count:,} {word}" for word, count in counts.items() if count])


def _uncovered(study: Study) -> list[Finding]:
    if study.theory.empty:
        return []
    reasons = theory_artifacts.uncovered(study)
    if reasons.empty:
        return [Finding("theory-uncovered", "Every number that was seen has a closed form.", ())]
    parts = [f"{row['numbers']:,} of {row['quantities']} ({row['reason']})" for _, row in reasons.iterrows()]
    text = f"{_count(int(reasons['numbers'].sum()), 'number')} without a closed form: {'; '.join(parts)}."
    return [Finding("theory-uncovered", text, ())]


def _predicted_schedules() -> Finding:
    table = layer_forms.schedules().drop_duplicates(["schedule", "place"])
    fullest = table.loc[table.groupby("schedule", sort=False)["peak"].idxmax()]
    parts = [
        f"{layer_forms.SCHEDULES[row['schedule']]} {row['peak'] / 1e9:,.1f} GB (its {row['place']} rank)"
        for _, row in fullest.sort_values("peak", kind="stable").iterrows()
    ]
    run = layer_forms.schedule_run("1f1b")
    text = (
        f"In closed form (tier: predicted), the fullest rank of {run.strategy.pp} pipeline ranks of {run.model.name} "
        f"holds these activations with {run.micro_batches} micro-batches: {_and(parts)}."
    )
    return Finding("theory-schedules", text, ())


def schedules(study: Study) -> list[Finding]:
    """What the schedule of a pipeline costs in memory and time."""
    table = memory_use.schedules(study)
    found = []
    for (model, world), group in table.groupby(["model", "world"], sort=False):
        held, speed = group["activations_mb"].to_numpy(), group["tokens_per_s"].to_numpy()
        leanest, heaviest = group.iloc[int(held.argmin())], group.iloc[int(held.argmax())]
        fastest = group.iloc[int(speed.argmax())]
        found.append(
            Finding(
                f"schedules-{model}-{world}",
                f"{model} in {world} stages: {leanest['method']} holds least, {leanest['activations_mb']:,.2f} MB of "
                f"activations on the largest rank, and {heaviest['method']} most, {heaviest['activations_mb']:,.2f} "
                f"MB; {fastest['method']} is fastest with {_tokens(fastest)}.",
                _ids(group),
            )
        )
    return found or [_nothing("schedules", "pipeline schedule")]


def memory(study: Study) -> list[Finding]:
    """What recomputing and offloading save and cost, and how far sharding brings the state down."""
    pairs, state = memory_use.savings(study), memory_use.state_per_parameter(study)
    found = []
    for option, group in pairs.groupby("option"):
        offloads = str(option).endswith("offload")
        ratios = group["peak_after"] / group["peak_before"]
        spread, speed = comparison.Spread.of(ratios), comparison.Spread.of(group["speed"])
        held = "peak memory without what lies on the host" if offloads else "peak memory"
        found.append(
            Finding(
                f"memory-{str(option).replace(' ', '-')}",
                f"{str(option).capitalize()} brings {held} to {_percent(spread.median)} ({_percent(spread.low)} to "
                f"{_percent(spread.high)}) and throughput to {_percent(speed.median)} ({_percent(speed.low)} to "
                f"{_percent(speed.high)}) of those without it, over "
                f"{_count(len(group), 'paired strategy', 'paired strategies')}.",
                _ids(group),
            )
        )
    for model, group in state[state["world"] > 1].groupby("model", sort=False):
        group = group[group["world"] == group["world"].max()]
        least, most = group.loc[group["state"].idxmin()], group.loc[group["state"].idxmax()]
        found.append(
            Finding(
                f"state-{model}",
                f"{model} on {least['world']} ranks: parameters, gradients and optimizer take {least['state']:.1f} "
                f"bytes for each parameter of the model under {least['method']} and {most['state']:.1f} under "
                f"{most['method']}, on the fullest rank.",
                _ids(group),
            )
        )
    return found or [_nothing("memory", "recomputing, offloading or multi-rank")]


def serving_cost(study: Study) -> list[Finding]:
    """How strategies serve: latency of prefill and decode, and what is cached."""
    table = serving.cells(study)
    best = serving.fastest(table)
    if best.empty:
        return [_nothing("serving", "comparable serving")]
    found = []
    for phase, word in (("prefill", "time to the first token"), ("decode", "time per output token")):
        group = best[best["phase"] == phase]
        if group.empty:
            continue
        alone = int((group["world"] == 1).sum())
        found.append(
            Finding(
                f"serving-{phase}",
                f"{phase.capitalize()}: one device has the shortest {word} in {alone} of "
                f"{_count(len(group), 'case')} of model, context and batch; the fastest strategy is decided (ranges "
                f"apart) in {int(group['decided'].sum())}.",
                _ids(group),
            )
        )
    longest = best[best["seq_len"] == best["seq_len"].max()]
    for _, row in longest[longest["global_batch"] == longest["global_batch"].max()].iterrows():
        word = "decided" if row["decided"] else "undecided: the ranges overlap"
        against = "" if pd.isna(row["over_one_device"]) else f", {row['over_one_device']:.2f} of one device's"
        found.append(
            Finding(
                f"serving-{row['phase']}-{row['model']}",
                f"{row['model']}, {row['phase']}, {row['seq_len']} tokens of context, "
                f"{_count(row['global_batch'], 'sequence')}: {row['strategy']} is fastest of {row['compared']} with "
                f"{1e3 * row['latency_s']:,.2f} ms{against} ({word}).",
                row["run_ids"],
            )
        )
    return found + _cache(study)


def _cache(study: Study) -> list[Finding]:
    """How the cache of a sequence grows with its context."""
    found = []
    for model, line in serving.cache_per_sequence(study).groupby("model", sort=False):
        line = line.sort_values("seq_len")
        first, last = line.iloc[0], line.iloc[-1]
        if first["seq_len"] == last["seq_len"]:
            continue
        found.append(
            Finding(
                f"cache-{model}",
                f"{model} caches {first['kb']:,.1f} kB for a sequence of {first['seq_len']} tokens of context and "
                f"{last['kb']:,.1f} kB for one of {last['seq_len']}.",
                _ids(line),
            )
        )
    return found


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
        "schedules": schedules(study),
        "memory": memory(study),
        "serving": serving_cost(study),
        "departures": departures(study),
        "theory": theory(study),
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
