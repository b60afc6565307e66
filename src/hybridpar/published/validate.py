"""Predictions beside measurements: every row of a table of training runs predicted, or listed with the reason.

    validate(Path("TABLE.csv"), Path("PRED.csv"))

The table is `data/published/training.csv` or anybody's in its format. Three sets of coefficients are scored: `raw`
(microbenchmarks and data sheets), `fitted` (on all published sources, or those that are named), and `held_out`, for
each source those fitted on all other sources. PRED.csv has the second.

Glossary: error = predicted/measured - 1; MAPE its mean absolute value; bias the median of its signed value; Spearman
the correlation of ranks; regret = measured time of the run that is predicted to be fastest over that of the fastest,
minus 1, in a group of runs that train the same model with the same batch on as many of the same devices.
"""

from __future__ import annotations

import csv
import html
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridpar.cost import calibrate, memory, step
from hybridpar.cost.coefficients import RAW, Coefficients
from hybridpar.cost.doubt import Calibration, Doubt, read_calibration
from hybridpar.cost.predict import Prediction, evaluate
from hybridpar.published.cases import Case, Refused, batch_of, case_of, read_cells
from hybridpar.published.training import TABLE, PublishedDataError

Vector = npt.NDArray[np.float64]
COLUMNS = (
    *("row_id", "predicted_step_time_s", "predicted_low", "predicted_high", "predicted_peak_mem_gb", "p_oom"),
    *("status", "reason"),
)
MOST_ROWS = 400  # of a source that a fit looks at: every n-th, so that a fit takes seconds
FAILED = ("oom", "failed_or_oom")
_STYLE = "body{font:14px sans-serif}td,th{padding:2px 8px;text-align:right}td:first-child{text-align:left}"


@dataclass(frozen=True)
class Score:
    """How far predictions of one set of rows are off; NaN where there are too few rows to say."""

    name: str
    rows: int
    mape: float
    median: float
    bias: float
    spearman: float
    regret: float
    groups: int


@dataclass(frozen=True)
class Confusion:
    """Runs that fitted and runs that did not, by whether they were predicted to (p_oom below 1/2)."""

    fitted_and_predicted: int
    fitted_not_predicted: int
    failed_and_predicted: int
    failed_not_predicted: int


@dataclass(frozen=True)
class Report:
    """All of a validation: rows predicted and refused, scores by kind of coefficients (`raw`, `fitted`, `held_out`)
    with one for all rows first and one for each source, and fits against failures."""

    predicted: int
    refused: int
    reasons: Mapping[str, int]
    scores: Mapping[str, tuple[Score, ...]]
    confusion: Confusion
    calibration: Calibration


def read_cases(path: Path) -> tuple[Case | Refused, ...]:
    """Every row of a table.

    Raises:
        PublishedDataError: see `hybridpar.published.cases.read_cells`.
    """
    return tuple(case_of(cells, number) for number, cells in enumerate(read_cells(path), start=1))


def fit_on(rows: Iterable[Case | Refused], sources: Sequence[str] | None = None) -> Calibration:
    """Coefficients for the complete runs of some sources (None: of all) that say what the model needs, with doubt.

    Raises:
        PublishedDataError: a source that has no such rows.
    """
    known = [one for one in rows if isinstance(one, Case) and _fits(one)]
    wanted = sorted({one.source_id for one in known}) if sources is None else list(sources)
    missing = sorted(set(wanted) - {one.source_id for one in known})
    if missing or not wanted:
        legal = ", ".join(sorted({one.source_id for one in known})) or "none"
        raise PublishedDataError(f"no rows to fit on in sources={', '.join(missing) or 'none'}; legal: {legal}")
    chosen = _thinned([one for one in known if one.source_id in wanted])
    parts = batch_of(chosen)
    measured = np.array([one.seconds for one in chosen], dtype=np.float64)
    found = calibrate.fit(lambda k: step.seconds(*parts, k).total, measured, [one.source_id for one in chosen])
    doubt = replace(_memory_doubt(chosen), low=found.low, high=found.high)
    return Calibration(found.coefficients, doubt, found.sources, found.rows)


def _fits(one: Case) -> bool:
    return one.complete and one.told and one.seconds is not None and one.status == "ok"


def _thinned(cases: Sequence[Case]) -> list[Case]:
    by_source = defaultdict(list)
    for one in cases:
        by_source[one.source_id].append(one)
    return [one for found in by_source.values() for one in found[:: max(1, -(-len(found) // MOST_ROWS))]]


def _memory_doubt(cases: Sequence[Case]) -> Doubt:
    """Spread of measured over predicted memory around what a device holds beside it."""
    told = [one for one in cases if one.bytes is not None]
    if len(told) < 10:
        return Doubt()
    shape, load, _, software, candidates = batch_of(told)
    size = memory.held(shape, load, software, candidates).total
    measured = np.array([one.bytes for one in told], dtype=np.float64)
    return Doubt(spread=float(np.quantile(np.abs(np.log(measured / size)), 0.68)))


def predict_cases(cases: Sequence[Case], coefficients: Coefficients, doubt: Doubt) -> Prediction:
    """All of them at once."""
    parts = batch_of(cases)
    flops = np.full(len(cases), np.nan)
    return evaluate(*parts, coefficients, flops, doubt)


def validate(
    table: Path,
    out: Path,
    *,
    sources: Sequence[str] | None = None,
    report: Path | None = None,
    held_out: bool = True,
    fit_table: Path | None = None,
) -> Report:
    """Predict every row of `table`, write PRED.csv to `out` and a page with scores to `report`, and score.

    Args:
        sources: fit on these of `fit_table` (by default the published table); None takes the committed coefficients,
            which were fitted on all its sources; "raw" alone fits nothing.
        held_out: score each source of the table with coefficients fitted on the others too (a few seconds a source).

    Raises:
        PublishedDataError: the table cannot be read or is not one, or sources have nothing to fit on.
        HardwareError: a file of accelerators or coefficients is broken.
    """
    rows = read_cases(table)
    cases = [one for one in rows if isinstance(one, Case)]
    reference: tuple[Case | Refused, ...] | None = None
    if sources is None:
        calibration = read_calibration()
    elif list(sources) == ["raw"]:
        calibration = Calibration(RAW, Doubt())
    else:
        reference = read_cases(fit_table or _published())
        calibration = fit_on(reference, sources)
    prediction = predict_cases(cases, calibration.coefficients, calibration.doubt) if cases else None
    _write(out, rows, prediction)

    timed = np.array([index for index, one in enumerate(cases) if one.seconds and one.status == "ok"], dtype=np.intp)
    scored = [cases[index] for index in timed]
    scores: dict[str, tuple[Score, ...]] = {}
    if scored and prediction is not None:
        raw = predict_cases(scored, RAW, Doubt()).seconds
        scores = {"raw": score(scored, raw), "fitted": score(scored, prediction.seconds[timed])}
        if held_out:
            reference = read_cases(fit_table or _published()) if reference is None else reference
            scores["held_out"] = score(scored, _held_out(scored, reference))
    refused = [one for one in rows if isinstance(one, Refused)]
    found = Report(
        predicted=len(cases),
        refused=len(refused),
        reasons=_counted(one.reason for one in refused),
        scores=scores,
        confusion=confusion(cases, prediction),
        calibration=calibration,
    )
    if report is not None:
        report.write_text(page(found, table), encoding="utf-8")
    return found


def _published() -> Path:
    return TABLE if TABLE.exists() else Path(__file__).parents[3] / TABLE


def _held_out(cases: Sequence[Case], reference: Sequence[Case | Refused]) -> Vector:
    """Seconds of each row with coefficients fitted on the published sources but its own."""
    seconds = np.full(len(cases), np.nan)
    every = {one.source_id for one in reference if isinstance(one, Case) and _fits(one)}
    cached: dict[frozenset[str], Coefficients] = {}
    for source in sorted({one.source_id for one in cases}):
        others = frozenset(every - {source})
        if others not in cached:
            cached[others] = fit_on(reference, sorted(others)).coefficients if others else RAW
        index = [place for place, one in enumerate(cases) if one.source_id == source]
        seconds[index] = predict_cases([cases[place] for place in index], cached[others], Doubt()).seconds
    return seconds


def score(cases: Sequence[Case], seconds: Vector) -> tuple[Score, ...]:
    """One for all rows, one for complete rows, one for each source."""
    sources = sorted({one.source_id for one in cases})
    whole = list(range(len(cases)))
    parts = {"all rows": whole, "complete rows": [place for place in whole if cases[place].complete]}
    parts |= {name: [place for place in whole if cases[place].source_id == name] for name in sources}
    return tuple(
        _score(name, [cases[place] for place in places], seconds[places]) for name, places in parts.items() if places
    )


def _score(name: str, cases: Sequence[Case], seconds: Vector) -> Score:
    measured = np.array([one.seconds for one in cases], dtype=np.float64)
    error = seconds / measured - 1
    regrets = group_regrets(cases, seconds)
    return Score(
        name,
        len(cases),
        mape=float(np.abs(error).mean()),
        median=float(np.median(np.abs(error))),
        bias=float(np.median(error)),
        spearman=spearman(measured, seconds),
        regret=float(np.median(regrets)) if regrets else math.nan,
        groups=len(regrets),
    )


def group_regrets(cases: Sequence[Case], seconds: Vector) -> list[float]:
    """Of every group of at least two runs: how much slower the predicted best is than the measured best."""
    groups = defaultdict(list)
    for place, one in enumerate(cases):
        groups[one.group].append(place)
    regrets = []
    for places in groups.values():
        if len(places) > 1:
            measured = [float(cases[place].seconds or math.nan) for place in places]
            pick = int(np.argmin(seconds[places]))
            regrets.append(measured[pick] / min(measured) - 1)
    return regrets


def spearman(first: Vector, second: Vector) -> float:
    """Correlation of ranks, ties sharing theirs; NaN for fewer than three values or where one side is constant."""
    if len(first) < 3:
        return math.nan
    ranks = [_ranks(first), _ranks(second)]
    if min(float(np.ptp(one)) for one in ranks) == 0:
        return math.nan
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def _ranks(values: Vector) -> Vector:
    _, where, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[where]


def confusion(cases: Sequence[Case], prediction: Prediction | None) -> Confusion:
    """Runs by outcome and prediction."""
    counts = {(failed, beyond): 0 for failed in (False, True) for beyond in (False, True)}
    for place, one in enumerate(cases):
        if prediction is not None and one.status in ("ok", *FAILED):
            counts[one.status in FAILED, bool(prediction.p_oom[place] > 0.5)] += 1
    return Confusion(counts[False, False], counts[False, True], counts[True, True], counts[True, False])


def _counted(reasons: Iterable[str]) -> dict[str, int]:
    counts: dict[str, int] = defaultdict(int)
    for one in reasons:
        counts[one] += 1
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def _write(out: Path, rows: Sequence[Case | Refused], prediction: Prediction | None) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        place = 0
        for one in rows:
            if isinstance(one, Refused) or prediction is None:
                writer.writerow([one.row_id, "", "", "", "", "", "refused", getattr(one, "reason", "")])
                continue
            numbers = [prediction.seconds[place], prediction.low[place], prediction.high[place]]
            numbers += [prediction.bytes[place] / 2**30, prediction.p_oom[place]]
            told = f"assumed: {one.assumed}" if one.assumed else ""
            writer.writerow([one.row_id, *[f"{number:.6g}" for number in numbers], "ok", told])
            place += 1


def page(found: Report, table: Path) -> str:
    """A page of tables: scores, reasons, coefficients."""
    parts = [f"<h1>{html.escape(table.name)}: predicted beside measured</h1>"]
    parts.append(f"<p>{found.predicted} rows predicted, {found.refused} refused.</p>")
    for kind, scores in found.scores.items():
        parts.append(f"<h2>{kind}</h2>" + _table([_rounded(asdict(one)) for one in scores]))
    parts.append("<h2>Fits and failures</h2>" + _table([asdict(found.confusion)]))
    fitted = ", ".join(found.calibration.sources) or "nothing"
    parts.append(f"<h2>Coefficients</h2><p>Fitted on {html.escape(fitted)} ({found.calibration.rows} rows).</p>")
    parts.append(_table([_rounded({**found.calibration.coefficients.as_dict()})]))
    parts.append("<h2>Refused</h2>" + _table([{"reason": why, "rows": many} for why, many in found.reasons.items()]))
    title = f"<!doctype html><meta charset='utf-8'><title>{html.escape(table.name)}</title>"
    return f"{title}<style>{_STYLE}</style>{''.join(parts)}\n"


def _rounded(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in values.items()}


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return "<p>none</p>"
    head = "".join(f"<th>{html.escape(str(name))}</th>" for name in rows[0])
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(str(value))}</td>" for value in row.values()) + "</tr>" for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"
