"""Every number and every computed sentence that the paper quotes, each with the runs that it comes from.

`numbers.json` maps a key to {value, unit, text, run_ids}; the paper names keys only. Beside it stands `macros.tex`,
the same texts for LaTeX: `\\hpnum{runs-ok}`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd

from hybridpar.artifacts import captions, collective_cost, comparison, findings, inputs
from hybridpar.artifacts.inputs import Study
from hybridpar.artifacts.save import tex_text, write_bytes
from hybridpar.outcome import OUTCOMES


@dataclass(frozen=True)
class Number:
    """One quoted number: its value in `unit`, the text that stands in the paper, and the runs behind it."""

    value: float | str | None
    unit: str
    text: str
    run_ids: tuple[str, ...]


def write(tables_dir: Path, bench_dir: Path, out_json: Path, study: str | None = None) -> None:
    """Compute all quoted numbers of a study; write `out_json` and, beside it, `macros.tex`."""
    quoted = collect(inputs.load(tables_dir, bench_dir, name=study))
    content = {key: asdict(number) for key, number in sorted(quoted.items())}
    write_bytes(out_json, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())
    write_bytes(out_json.with_name("macros.tex"), macros(quoted).encode())


def collect(study: Study) -> dict[str, Number]:
    """All quoted numbers by key; a number that the study has no runs for has the value None and says so."""
    quoted = dict(_counts(study)) | dict(_bench(study)) | dict(_comparisons(study)) | dict(_theory(study))
    for question, found in findings.everything(study).items():
        quoted |= {f"finding-{question}-{n}": Number(one.key, "", one.text, one.run_ids) for n, one in enumerate(found)}
        quoted[f"findings-{question}"] = Number(len(found), "sentences", str(len(found)), ())
    return quoted


def macros(quoted: dict[str, Number]) -> str:
    """LaTeX: `\\hpnum{key}` writes the text of a number."""
    lines = [
        rf"\expandafter\def\csname hp@{key}\endcsname{{{tex_text(number.text)}}}"
        for key, number in sorted(quoted.items())
    ]
    return "\n".join([r"\newcommand{\hpnum}[1]{\csname hp@#1\endcsname}", *lines, ""])


def _counts(study: Study) -> Iterator[tuple[str, Number]]:
    every, finished = study.provenance().run_ids, study.finished
    ok = tuple(sorted(finished["run_id"].astype(str)))
    yield "study", Number(study.name, "", study.name, ())
    yield "runs-all", _whole(len(study.runs), "runs", every)
    for kind in OUTCOMES:
        chosen = study.runs.loc[study.runs["outcome"] == kind, "run_id"].astype(str)
        yield f"runs-{kind}", _whole(len(chosen), "runs", tuple(sorted(chosen)))
    yield "steps-timed", _whole(len(comparison.timed_steps(study)), "steps", ok)
    trained, served = study.trained, study.served
    yield "models", _whole(finished["model"].nunique(), "models", ok)
    yield "strategies", _whole(trained["strategy"].nunique(), "strategies", ok)
    yield "runs-trained", _whole(len(trained), "runs", tuple(sorted(trained["run_id"])))
    yield "runs-served", _whole(len(served), "runs", tuple(sorted(served["run_id"])))
    repeats = [int(count) for count in sorted(comparison.cells(study)["runs"].unique())]
    yield "repeats", Number(max(repeats, default=0), "repeats", _times(repeats), ok)
    yield "ranks-list", _listed(trained, "world", ok)
    yield "model-list", _listed(trained, "model", ok)
    for column in ("precision", "seq_len", "global_batch"):
        yield f"{column.replace('_', '-')}-list", _listed(trained, column, ok)
    yield "context-list", _listed(served, "seq_len", ok)
    yield "conditions", Number(None, "", captions.conditions(study), ok)
    yield "testbed", Number(study.provenance().testbed, "", study.provenance().testbed, every)
    yield "tier", Number(study.provenance().tier, "", study.provenance().tier, every)
    yield "hardware", Number(None, "", captions.hardware(study), ok)


def _bench(study: Study) -> Iterator[tuple[str, Number]]:
    fitted = collective_cost.fits(study.bench)
    yield "bench-repeats", _whole(study.bench["repeat"].nunique(), "repeats", ())
    yield "bench-fits", _whole(len(fitted), "fits", ())
    error = None if fitted.empty else float(fitted["error"].median())
    yield "bench-error", Number(error, "share", _percent_or_nothing(error), ())


def _comparisons(study: Study) -> Iterator[tuple[str, Number]]:
    table = comparison.cells(study)
    best = comparison.winners(table[table["world"] > 1])
    ids = tuple(sorted({run for ids in best["run_ids"] for run in ids}))
    yield "winners-all", _whole(len(best), "winners", ids)
    yield "winners-decided", _whole(int(best["decided"].sum()), "winners", ids)
    yield "winners-hybrid", _whole(int((best["kind"] == "hybrid").sum()), "winners", ids)
    mfu = table["mfu"].dropna()
    highest = float(mfu.max()) if len(mfu) else None
    yield "mfu-highest", Number(highest, "share", _percent_or_nothing(highest), ids)


_VERDICTS = {"exact": "exact", "explained": "explained", "deviates": "deviating", "uncovered": "uncovered"}


def _theory(study: Study) -> Iterator[tuple[str, Number]]:
    """Of comparisons with closed forms, which are no runs of the study."""
    rows = study.theory
    yield "theory-comparisons", _whole(len(rows), "numbers", ())
    for verdict, word in _VERDICTS.items():
        yield f"theory-{word}", _whole(int((rows["verdict"] == verdict).sum()), "numbers", ())
    yield "theory-predicted", _whole(int((rows["verdict"] != "uncovered").sum()), "numbers", ())
    for tier in ("traced", "measured"):
        yield f"theory-{tier}", _whole(int((rows["tier"] == tier).sum()), "numbers", ())
    yield "theory-layouts", _whole(rows["run_id"].nunique(), "layouts", ())


def _whole(value: int, unit: str, run_ids: tuple[str, ...]) -> Number:
    return Number(value, unit, f"{value:,}", run_ids)


def _listed(runs: pd.DataFrame, column: str, run_ids: tuple[str, ...]) -> Number:
    words = [str(value) for value in sorted(runs[column].dropna().unique())] or ["none"]
    return Number(None, "", words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}", run_ids)


def _times(repeats: list[int]) -> str:
    """How often a strategy was run: `once`, `3 times`, `1 to 3 times`."""
    if not repeats:
        return "never"
    if repeats == [1]:
        return "once"
    return f"{repeats[0]} times" if len(repeats) == 1 else f"{repeats[0]} to {repeats[-1]} times"


def _percent_or_nothing(share: float | None) -> str:
    return "not measured in this study" if share is None else f"{100 * share:.1f} %"
