"""From tables to notebooks, paper and report: everything is in them, and twice the same bytes."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from hybridpar.artifacts import numbers, paper, prose, report
from hybridpar.artifacts.catalogue import QUESTIONS, artifact_names
from hybridpar.artifacts.notebook import execute

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(300)  # every notebook starts a kernel


@pytest.fixture(scope="module")
def built(small_paths: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with executed notebooks, their figures and the numbers of the small synthetic study."""
    folder = tmp_path_factory.mktemp("built")
    tables, bench = small_paths
    parameters = {"tables_dir": tables, "bench_dir": bench, "figures_dir": folder / "figures", "study": "synthetic"}
    for question in QUESTIONS:
        source, out = ROOT / "notebooks" / f"{question.notebook}.ipynb", folder / "notebooks" / question.notebook
        execute(source, out.with_suffix(".ipynb"), out.with_suffix(".html"), parameters)
    numbers.write(tables, bench, folder / "numbers.json", study="synthetic")
    return folder


def _paper(folder: Path) -> Path:
    copy = folder / "paper"
    shutil.copytree(ROOT / "paper", copy, ignore=shutil.ignore_patterns("generated", "*.pdf"))
    return copy


def test_the_notebooks_save_every_artifact_of_the_catalogue(built: Path) -> None:
    assert {path.stem for path in (built / "figures").glob("*.json")} == set(artifact_names())


def test_an_executed_notebook_is_the_same_bytes_twice(
    built: Path, small_paths: tuple[Path, Path], tmp_path: Path
) -> None:
    tables, bench = small_paths
    name = "03-which-hybrid-wins"
    parameters = {
        "tables_dir": tables,
        "bench_dir": bench,
        "figures_dir": built / "figures",
        "study": "synthetic",
    }
    execute(ROOT / "notebooks" / f"{name}.ipynb", tmp_path / "n.ipynb", tmp_path / f"{name}.html", parameters)

    assert (tmp_path / "n.ipynb").read_bytes() == (built / "notebooks" / f"{name}.ipynb").read_bytes()
    assert (tmp_path / f"{name}.html").read_bytes() == (built / "notebooks" / f"{name}.html").read_bytes()


def test_the_paper_is_the_same_bytes_twice(built: Path, tmp_path: Path) -> None:
    source = _paper(tmp_path)
    for attempt in ("first.pdf", "second.pdf"):
        paper.build(source, built / "figures", built / "numbers.json", tmp_path / attempt)

    first = (tmp_path / "first.pdf").read_bytes()
    assert first.startswith(b"%PDF")
    assert first == (tmp_path / "second.pdf").read_bytes()


def test_the_paper_includes_every_artifact() -> None:
    text = "\n".join(path.read_text() for path in paper.sources(ROOT / "paper"))

    assert sorted(re.findall(r'#artifact\("([\w-]+)"', text)) == sorted(artifact_names())


def test_the_paper_compiles_for_a_study_with_nothing_in_it(built: Path, tmp_path: Path) -> None:
    figures = tmp_path / "figures"
    figures.mkdir()
    for name in artifact_names():
        absent = {"name": name, "title": name, "kind": "missing", "caption": "No runs of this kind in this study."}
        (figures / f"{name}.json").write_text(json.dumps(absent))

    paper.build(_paper(tmp_path), figures, built / "numbers.json", tmp_path / "paper.pdf")

    assert (tmp_path / "paper.pdf").stat().st_size > 0


def test_the_paper_and_notebooks_hold_no_literal_result() -> None:
    assert prose.check(paper.sources(ROOT / "paper")) == []


def test_a_typed_result_stops_the_paper(built: Path, tmp_path: Path) -> None:
    source = _paper(tmp_path)
    section = source / "sections" / "single.typ"
    section.write_text(section.read_text() + "\nTensor parallelism is 12 percent slower.\n")

    with pytest.raises(paper.PaperError, match=r"single\.typ:\d+: literal result '12'"):
        paper.build(source, built / "figures", built / "numbers.json", tmp_path / "paper.pdf")


def test_a_missing_figure_stops_the_paper_with_its_name(built: Path, tmp_path: Path) -> None:
    with pytest.raises(paper.PaperError, match=r"wire-bytes\.json does not exist; the notebooks write it"):
        paper.build(_paper(tmp_path), tmp_path / "none", built / "numbers.json", tmp_path / "paper.pdf")


def test_the_report_is_one_page_with_everything_in_it(built: Path) -> None:
    out = built / "report.html"
    report.build(built / "figures", built / "numbers.json", built / "notebooks", built / "paper.pdf", out)
    page = out.read_text()

    for question in QUESTIONS:
        assert f'href="notebooks/{question.notebook}.html"' in page
    for name in artifact_names():
        assert (
            f'id="{name}"' in page or json.loads((built / "figures" / f"{name}.json").read_text())["kind"] == "missing"
        )
    assert 'href="paper.pdf"' in page
    assert "http://" not in page
    assert "https://" not in page
