"""Run folders become tidy tables: every cell a row whatever its outcome, none silently left out."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest

from hybridpar.results.schemas import TABLES, TableError
from hybridpar.results.tables import build
from hybridpar.study import Study
from tests.results.folders import leave, tiny_study


@pytest.fixture
def study(tmp_path: Path) -> Study:
    """The tiny study, with a folder for each of its runs."""
    found = tiny_study(tmp_path)
    leave(tmp_path / "runs", found)
    return found


def _built(folder: Path, study: Study) -> dict[str, pd.DataFrame]:
    build(study, folder / "runs", folder / "tables")
    return {name: pd.read_parquet(folder / "tables" / f"{name}.parquet") for name in TABLES}


def test_every_cell_is_a_row_with_outcome_and_reason(tmp_path: Path, study: Study) -> None:
    runs = _built(tmp_path, study)["runs"].set_index("strategy")
    assert runs["outcome"].to_dict() == {
        "one-device": "ok",
        "tp2-pp2-1f1b": "ok",
        "tp8": "infeasible",
        "dp2": "crash",
    }
    assert "heads=4" in runs.loc["tp8", "reason"]
    assert "RuntimeError: a fault" in runs.loc["dp2", "reason"]
    assert (runs.loc[["one-device", "tp2-pp2-1f1b"], "reason"] == "").all()


def test_what_a_failed_run_did_not_measure_is_empty_not_zero(tmp_path: Path, study: Study) -> None:
    tables = _built(tmp_path, study)
    failed = tables["runs"][tables["runs"]["outcome"] != "ok"]
    for column in ("step_s_median", "tokens_per_s", "mfu", "peak_bytes", "parameters", "last_loss", "timed_steps"):
        assert failed[column].isna().all(), column
    finished = set(tables["runs"].loc[tables["runs"]["outcome"] == "ok", "run_id"])
    assert all(set(tables[name]["run_id"]) <= finished for name in ("ranks", "steps", "collectives", "memory"))


def test_each_table_has_one_row_for_what_it_is_about(tmp_path: Path, study: Study) -> None:
    tables = _built(tmp_path, study)
    assert {name: len(frame) for name, frame in tables.items()} == {
        "runs": 4,
        "ranks": 1 + 4,
        "steps": 2 * 3,
        "collectives": 1,
        "memory": 2 * 8,
    }


def test_a_rank_has_its_place_its_times_and_its_bytes(tmp_path: Path, study: Study) -> None:
    ranks = _built(tmp_path, study)["ranks"]
    last = ranks[ranks["rank"] == 3].iloc[0]
    assert (last["pp"], last["dp"], last["tp"]) == (1, 0, 1)
    assert (last["step_s_median"], last["exposed_s"], last["wire_bytes"]) == (4.0, 0.75, 32)
    assert (last["parameters_bytes"], last["total_bytes"]) == (103, 103 + 35)


def test_a_step_lasts_as_long_as_its_slowest_rank(tmp_path: Path, study: Study) -> None:
    tables = _built(tmp_path, study)
    hybrid = tables["runs"].set_index("strategy").loc["tp2-pp2-1f1b"]
    steps = tables["steps"][tables["steps"]["run_id"] == hybrid["run_id"]]
    assert (steps["seconds"] == 4.0).all()
    assert (steps["seconds_min"] == 1.0).all()
    assert hybrid["step_s_median"] == 4.0
    assert list(steps["warmup"]) == [True, False, False]


def test_the_sweeps_that_name_a_run_are_told(tmp_path: Path, study: Study) -> None:
    runs = _built(tmp_path, study)["runs"].set_index("strategy")
    assert runs["sweeps"].to_dict() == {"one-device": "good", "tp2-pp2-1f1b": "good", "tp8": "bad", "dp2": "bad"}


@pytest.mark.parametrize("content", [None, "{", '{"schema": 1}'])
def test_a_run_without_a_whole_result_is_an_error_that_names_it(
    tmp_path: Path, study: Study, content: str | None
) -> None:
    run = study.runs[1]
    result = tmp_path / "runs" / run.run_id / "result.json"
    result.unlink() if content is None else result.write_text(content)
    with pytest.raises(TableError, match=rf"1 of 4 runs of study tiny have no result .*{run.run_id}") as caught:
        build(study, tmp_path / "runs", tmp_path / "tables")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "tables").exists()


def test_a_finished_run_whose_events_are_gone_is_an_error_that_names_it(tmp_path: Path, study: Study) -> None:
    run = study.runs[1]
    (tmp_path / "runs" / run.run_id / "events-2.jsonl").unlink()
    with pytest.raises(TableError, match=rf"run {run.run_id} ended ok, but events-2\.jsonl"):
        build(study, tmp_path / "runs", tmp_path / "tables")


def test_a_value_outside_the_schema_leaves_the_old_tables_as_they_were(tmp_path: Path, study: Study) -> None:
    before = _built(tmp_path, study)["runs"]
    path = tmp_path / "runs" / study.runs[0].run_id / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"mfu": "high"}))
    with pytest.raises(TableError, match="mfu='high'"):
        build(study, tmp_path / "runs", tmp_path / "tables")
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "tables" / "runs.parquet"), before)


def test_the_same_folders_make_the_same_bytes(tmp_path: Path, study: Study) -> None:
    for out in ("one", "two"):
        build(study, tmp_path / "runs", tmp_path / out)
    for name in TABLES:
        file = f"{name}.parquet"
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_meaning_and_unit_of_every_column_are_in_the_file(tmp_path: Path, study: Study) -> None:
    build(study, tmp_path / "runs", tmp_path / "tables")
    told = json.loads(pq.read_schema(tmp_path / "tables" / "runs.parquet").metadata[b"columns"])
    assert told["step_s_median"]["unit"] == "s"
    assert told.keys() == TABLES["runs"].keys()
