"""Every figure, table and finding: drawn from a full study, said to be missing from one without its runs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridpar.artifacts import (
    columns,
    engine_artifacts,
    figures,
    findings,
    memory_artifacts,
    numbers,
    serving_artifacts,
    tables,
    theory_artifacts,
)
from hybridpar.artifacts.artifact import Artifact, FigureArtifact, Missing, TableArtifact
from hybridpar.artifacts.catalogue import artifact_names
from hybridpar.artifacts.inputs import Study

FIGURES: tuple[Callable[[Study], Artifact], ...] = (
    figures.collective_time,
    figures.single_throughput,
    figures.single_memory,
    figures.communication_share,
    figures.best_strategy_map,
    figures.hybrid_ranking,
    figures.family_ranking,
    memory_artifacts.schedule_memory,
    serving_artifacts.prefill_latency,
    serving_artifacts.decode_latency,
    serving_artifacts.cache_growth,
    engine_artifacts.engine_ratios,
    theory_artifacts.theory_coverage,
)
TABLES: tuple[Callable[[Study], Artifact], ...] = (
    tables.wire_bytes,
    tables.collective_fits,
    tables.loss_parity,
    tables.single_strategies,
    tables.hybrid_strategies,
    tables.best_strategies,
    tables.infeasible,
    tables.family_rankings,
    tables.family_effects,
    tables.outcomes,
    memory_artifacts.schedules,
    memory_artifacts.memory_savings,
    memory_artifacts.state_per_parameter,
    serving_artifacts.serving,
    engine_artifacts.engines,
    engine_artifacts.departures,
    theory_artifacts.theory_comparisons,
    theory_artifacts.theory_deviations,
    theory_artifacts.theory_uncovered,
)
# Closed forms need no run.
PREDICTED_FIGURES: tuple[Callable[[Study], Artifact], ...] = (theory_artifacts.schedule_memory_form,)
PREDICTED: tuple[Callable[[Study], Artifact], ...] = (*PREDICTED_FIGURES, theory_artifacts.block_forms)


def test_the_catalogue_names_every_artifact_once(full: Study) -> None:
    assert sorted(make(full).name for make in FIGURES + TABLES + PREDICTED) == sorted(artifact_names())


@pytest.mark.parametrize("make", FIGURES + PREDICTED_FIGURES)
def test_a_figure_is_one_column_wide_and_none_of_its_text_is_cut_off(
    make: Callable[[Study], FigureArtifact], full: Study
) -> None:
    figure = make(full).figure
    figure.canvas.draw()
    width, height = figure.bbox.width, figure.bbox.height
    boxes = [(text.get_text(), text.get_window_extent()) for text in figure.texts]
    boxes += [("legend", legend.get_window_extent()) for legend in figure.legends]
    boxes += [(axes.get_title(), axes.get_tightbbox()) for axes in figure.axes if axes.axison]

    assert figure.get_size_inches()[0] == 3.4
    for name, box in boxes:
        assert box.x0 >= -1, name
        assert box.y0 >= -1, name
        assert box.x1 <= width + 1, name
        assert box.y1 <= height + 1, name


@pytest.mark.parametrize("make", FIGURES + TABLES)
def test_a_caption_names_tier_and_where_times_are_shown_what_they_cannot_say(
    make: Callable[[Study], Artifact], full: Study
) -> None:
    artifact = make(full)

    assert not isinstance(artifact, Missing)
    if artifact.name not in ("infeasible",):
        assert "Tier: measured" in artifact.caption
    if artifact.name in ("single-throughput", "hybrid-strategies", "best-strategy-map", "collective-time"):
        assert "not GPU times" in artifact.caption


@pytest.mark.parametrize("make", PREDICTED)
def test_what_is_predicted_says_so_and_is_the_same_whatever_was_run(
    make: Callable[[Study], Artifact], full: Study, failed: Study
) -> None:
    artifact = make(full)

    assert not isinstance(artifact, Missing)
    assert artifact.provenance.tier == "predicted"
    assert artifact.provenance.run_ids == ()
    assert artifact.caption.endswith("Tier: predicted.")
    assert make(failed).caption == artifact.caption


@pytest.mark.parametrize("make", FIGURES + TABLES)
def test_a_study_without_multi_rank_runs_says_so(make: Callable[[Study], Artifact], lone: Study) -> None:
    artifact = make(lone)

    if artifact.name not in ("single-memory", "single-strategies", "outcomes"):
        assert isinstance(artifact, Missing)
        assert "in this study" in artifact.caption


@pytest.mark.parametrize("make", FIGURES + TABLES)
def test_a_study_in_which_nothing_finished_draws_nothing_but_its_outcomes(
    make: Callable[[Study], Artifact], failed: Study
) -> None:
    assert isinstance(make(failed), TableArtifact if make is tables.outcomes else Missing)


def test_the_outcomes_account_for_every_run(full: Study) -> None:
    table = tables.outcomes(full)

    assert isinstance(table, TableArtifact)
    assert table.frame["runs"].sum() == len(full.runs)
    assert list(table.frame["outcome"].drop_duplicates()) == ["ok", "infeasible", "crash"]
    assert (table.frame.loc[table.frame["outcome"] != "ok", "reason"] != "").all()


def test_infeasible_strategies_come_with_their_constraint(full: Study) -> None:
    table = tables.infeasible(full)

    assert isinstance(table, TableArtifact)
    assert table.frame["reason"].str.contains("strategy.tp=8: ").any()


def test_cells_of_a_table_that_do_not_exist_are_dashes() -> None:
    assert columns.number(1)(float("nan")) == "–"
    assert columns.number()(None) == "–"
    assert columns.number()(float("inf")) == "∞"
    assert columns.number(2, 100)(0.12345) == "12.35"


def test_findings_quote_ranges_and_counts(full: Study) -> None:
    found = findings.everything(full)
    fastest = next(finding for finding in found["single"] if finding.key == "single-llama-large")

    assert re.search(r"[\d,]+ tokens/s \([\d,]+ to [\d,]+, n = \d+\)", fastest.text)
    assert fastest.run_ids
    assert all(finding.text for group in found.values() for finding in group)


def test_findings_of_a_study_without_runs_say_so(lone: Study) -> None:
    found = findings.everything(lone)

    for question in ("collectives", "single", "engines", "hybrids", "families"):
        assert "in this study" in found[question][0].text


def test_every_quoted_number_has_text_and_resolves_to_known_runs(full: Study) -> None:
    quoted = numbers.collect(full)
    known = set(full.runs["run_id"])

    assert quoted["runs-all"].value == len(full.runs)
    for key, number in quoted.items():
        assert number.text, key
        assert set(number.run_ids) <= known, key


def test_numbers_are_written_the_same_twice_and_as_macros(small_paths: tuple[Path, Path], tmp_path: Path) -> None:
    for attempt in ("first", "second"):
        numbers.write(*small_paths, tmp_path / attempt / "numbers.json")
    first, second = ((tmp_path / attempt / "numbers.json").read_bytes() for attempt in ("first", "second"))

    assert first == second
    assert set(json.loads(first)["runs-ok"]) == {"value", "unit", "text", "run_ids"}
    assert r"\hpnum" in (tmp_path / "first" / "macros.tex").read_text()
