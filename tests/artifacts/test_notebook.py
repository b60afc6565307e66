"""Executed notebooks: the same bytes twice and from anywhere, a sentence when a cell fails, sources that stay clean."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from hybridpar.artifacts import prose
from hybridpar.artifacts.catalogue import QUESTIONS
from hybridpar.artifacts.notebook import NotebookError, execute, normalised

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
_PYTHON = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
SOURCES = sorted(NOTEBOOKS.glob("*.ipynb"))


def _notebook(path: Path, *cells: str) -> Path:
    parameters = new_code_cell("data_dir = 'none'\nstudy = 'none'", metadata={"tags": ["parameters"]})
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(new_notebook(cells=[parameters, *map(new_code_cell, cells)], metadata=_PYTHON), path)
    return path


def test_a_notebook_gives_the_same_bytes_in_two_places(tmp_path: Path) -> None:
    outputs = []
    for place in ("here", "there/deeper"):
        folder = tmp_path / place
        source = _notebook(folder / "notebooks" / "01-question.ipynb", "print(data_dir, study)")
        execute(source, folder / "out.ipynb", folder / "out.html", {"data_dir": folder / "data", "study": "smoke"})
        outputs.append([(folder / name).read_bytes() for name in ("out.ipynb", "out.html")])

    assert outputs[0] == outputs[1]
    executed, page = (content.decode() for content in outputs[0])
    assert "../data smoke" in executed
    assert not re.search(r"""(?:src|href)=["']https?://""", page)


def test_a_failing_cell_is_one_sentence_and_what_ran_is_kept(tmp_path: Path) -> None:
    source = _notebook(tmp_path / "01-question.ipynb", "print('before')", "1 / 0")

    with pytest.raises(NotebookError, match=r"01-question\.ipynb: cell \d+ raised ZeroDivisionError: division by zero"):
        execute(source, tmp_path / "out" / "q.ipynb", tmp_path / "out" / "q.html", {})

    assert not (tmp_path / "out" / "q.ipynb").exists()
    assert "before" in (tmp_path / "out" / "q.failed.ipynb").read_text()


def test_normalising_drops_what_differs_between_runs() -> None:
    cell = new_code_cell("1", metadata={"papermill": {"duration": 0.3}, "execution": {}, "tags": ["parameters"]})
    notebook = new_notebook(
        cells=[cell], metadata={"papermill": {"start_time": "now"}, "language_info": {"name": "python", "version": "3"}}
    )
    clean = normalised(notebook)

    assert set(clean.metadata) == {"kernelspec", "language_info"}
    assert clean.cells[0].metadata == {"tags": ["parameters"]}
    assert clean.cells[0].id == "cell-00"


def test_there_is_one_notebook_for_each_question() -> None:
    assert [source.stem for source in SOURCES] == [question.notebook for question in QUESTIONS]


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_sources_are_clean_of_outputs_and_parameterised(source: Path) -> None:
    notebook = nbformat.read(source, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]

    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    (parameters,) = [cell for cell in code if cell.metadata.get("tags") == ["parameters"]]
    names = [node.targets[0].id for node in ast.parse(parameters.source).body]  # type: ignore[attr-defined]
    assert names == ["tables_dir", "bench_dir", "figures_dir", "study"]


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.notebook)
def test_the_notebook_shows_what_the_catalogue_says(question: object) -> None:
    cells = json.loads((NOTEBOOKS / f"{question.notebook}.ipynb").read_text())["cells"]  # type: ignore[attr-defined]
    source = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    shown = re.findall(r"show\(\w+\.(\w+)\(", source)

    assert sorted(name.replace("_", "-") for name in shown) == sorted(question.artifacts)  # type: ignore[attr-defined]


def test_no_notebook_holds_a_typed_result() -> None:
    assert prose.check(SOURCES) == []
