"""What is written beside what, the same bytes twice, and nothing left of what is no longer there."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from hybridpar.artifacts import figures, tables
from hybridpar.artifacts.artifact import Missing
from hybridpar.artifacts.inputs import InputError, Study, load
from hybridpar.artifacts.save import html_table, save, tex_table


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_figure_is_pdf_png_and_sidecar_and_the_same_bytes_twice(small: Study, tmp_path: Path) -> None:
    for attempt in ("first", "second"):
        save(figures.family_ranking(small), tmp_path / attempt)

    first = _files(tmp_path / "first")
    assert set(first) == {"family-ranking.pdf", "family-ranking.png", "family-ranking.json"}
    assert first == _files(tmp_path / "second")


def test_a_table_is_csv_tex_html_and_sidecar_and_the_same_bytes_twice(small: Study, tmp_path: Path) -> None:
    for attempt in ("first", "second"):
        save(tables.single_strategies(small), tmp_path / attempt)

    first = _files(tmp_path / "first")
    assert {Path(name).suffix for name in first} == {".csv", ".tex", ".html", ".json"}
    assert first == _files(tmp_path / "second")


def test_the_sidecar_says_where_the_numbers_come_from(small: Study, tmp_path: Path) -> None:
    content = json.loads(save(figures.single_memory(small), tmp_path).read_text())

    assert {"run_ids", "tier", "testbed", "commit", "caption", "environment"} <= set(content)
    assert content["tier"] == "measured"
    assert set(content["run_ids"]) <= set(small.runs["run_id"])
    assert content["environment"]["matplotlib"]


def test_a_figure_that_became_missing_takes_its_old_files_away(small: Study, tmp_path: Path) -> None:
    save(figures.single_memory(small), tmp_path)
    save(Missing("single-memory", "Where memory goes", "No runs of this kind in this study."), tmp_path)

    assert {path.name for path in tmp_path.iterdir()} == {"single-memory.json"}


def test_html_is_escaped(small: Study) -> None:
    table = tables.outcomes(replace(small, runs=small.runs.assign(reason="<b>&")))

    assert not isinstance(table, Missing)
    assert '<td class="text">&lt;b&gt;&amp;</td>' in html_table(table)
    assert r"<b>\&" in tex_table(table)


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no TeX on this machine")
def test_every_tex_table_compiles(full: Study, tmp_path: Path) -> None:
    made = [
        tables.collective_fits(full),
        tables.best_strategies(full),
        tables.family_rankings(full),
        tables.outcomes(full),
    ]
    body = "\n".join(tex_table(table) for table in made if not isinstance(table, Missing))
    source = "\\documentclass{article}\\usepackage{booktabs}\\begin{document}\n" + body + "\\end{document}\n"
    (tmp_path / "tables.tex").write_text(source)

    done = subprocess.run(
        ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "tables.tex"], cwd=tmp_path, capture_output=True
    )

    assert done.returncode == 0, done.stdout[-2000:]


def test_a_missing_column_is_named(small_paths: tuple[Path, Path], tmp_path: Path) -> None:
    for path in small_paths[0].iterdir():
        shutil.copy(path, tmp_path)
    pd.read_parquet(tmp_path / "steps.parquet").drop(columns="loss").to_parquet(tmp_path / "steps.parquet")

    with pytest.raises(InputError, match=r"steps\.parquet has no column loss"):
        load(tmp_path, small_paths[1])


def test_a_table_that_is_none_is_named(small_paths: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "collectives.parquet").write_text("garbage")
    with pytest.raises(InputError, match=r"collectives\.parquet is no Parquet table"):
        load(small_paths[0], tmp_path)


def test_missing_tables_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"runs\.parquet does not exist"):
        load(tmp_path, tmp_path / "none")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("garbage", "holds no departures"),
        ("[]", "holds no departures"),
        ('{"tier": "measured"}', "holds no departures"),
        ('{"tier": "measured", "departures": [{"name": "x"}]}', "has no column setting"),
    ],
)
def test_departures_that_cannot_be_read_are_named(
    content: str, sentence: str, small_paths: tuple[Path, Path], tmp_path: Path
) -> None:
    (tmp_path / "departures.json").write_text(content)
    with pytest.raises(InputError, match=rf"departures\.json {sentence}"):
        load(small_paths[0], tmp_path)


def test_no_departures_are_none_that_were_measured(small_paths: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "departures.json").write_text('{"tier": "measured", "departures": []}')
    assert load(small_paths[0], tmp_path).departures.empty
