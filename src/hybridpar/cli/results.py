"""Commands from run folders to tables, notebooks, numbers, paper and report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hybridpar.cli.application import OutOption, StudyArgument, app, fail, one_sentence_per_fault
from hybridpar.cli.running import RUNS_DIR, RunsDirOption
from hybridpar.study import load_study

TablesDirOption = Annotated[Path, typer.Option("--tables-dir", metavar="DIR", help="Tables of the study.")]


_BENCH_HELP = "Holds collectives.parquet and departures.json (either may be missing)."


BenchDirOption = Annotated[Path, typer.Option("--bench-dir", metavar="DIR", help=_BENCH_HELP)]


FiguresDirOption = Annotated[Path, typer.Option("--figures-dir", metavar="DIR", help="Figures and tables as saved.")]


@app.command()
def tables(
    path: StudyArgument,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the Parquet files.")],
    runs_dir: RunsDirOption = RUNS_DIR,
) -> None:
    """Collect the run folders of a study into tidy tables with a checked schema."""
    from hybridpar.results.schemas import TableError
    from hybridpar.results.tables import build

    with one_sentence_per_fault():
        try:
            rows = build(load_study(path), runs_dir, out)
        except TableError as error:
            fail([str(error)])
        typer.echo(f"{out}: " + ", ".join(f"{name} {count} rows" for name, count in rows.items()))


@app.command()
def notebook(
    source: Annotated[Path, typer.Argument(metavar="NOTEBOOK.ipynb", help="A notebook of notebooks/.")],
    tables_dir: TablesDirOption,
    bench_dir: BenchDirOption,
    figures_dir: FiguresDirOption,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the executed .ipynb and .html.")],
) -> None:
    """Execute one notebook over the tables of a study; it saves its figures and tables."""
    from hybridpar.artifacts.notebook import NotebookError, execute

    parameters = {
        "tables_dir": str(tables_dir),
        "bench_dir": str(bench_dir),
        "figures_dir": str(figures_dir),
        "study": tables_dir.name,
    }
    with one_sentence_per_fault():
        try:
            execute(source, out / source.name, out / f"{source.stem}.html", parameters)
        except NotebookError as error:
            fail([str(error)])


@app.command()
def numbers(tables_dir: TablesDirOption, bench_dir: BenchDirOption, out: OutOption) -> None:
    """Compute every number that the paper quotes, with the runs it comes from (and macros.tex beside it)."""
    from hybridpar.artifacts.inputs import InputError
    from hybridpar.artifacts.numbers import write

    with one_sentence_per_fault():
        try:
            write(tables_dir, bench_dir, out)
        except InputError as error:
            fail([str(error)])


@app.command()
def paper(
    figures_dir: FiguresDirOption,
    numbers: Annotated[Path, typer.Option("--numbers", metavar="FILE", help="What `hybridpar numbers` wrote.")],
    out: OutOption,
    paper_dir: Annotated[Path, typer.Option("--paper-dir", metavar="DIR", help="Sources of the paper.")] = Path(
        "paper"
    ),
) -> None:
    """Check that no result is typed by hand, and compile the paper."""
    from hybridpar.artifacts.paper import PaperError, build

    with one_sentence_per_fault():
        try:
            build(paper_dir, figures_dir, numbers, out)
        except PaperError as error:
            fail([str(error)])


@app.command()
def report(
    figures_dir: FiguresDirOption,
    numbers: Annotated[Path, typer.Option("--numbers", metavar="FILE", help="What `hybridpar numbers` wrote.")],
    notebooks_dir: Annotated[Path, typer.Option("--notebooks-dir", metavar="DIR", help="Executed notebooks.")],
    paper: Annotated[Path, typer.Option("--paper", metavar="FILE", help="The compiled paper.")],
    out: OutOption,
) -> None:
    """Put all figures, tables, outcomes and notebooks on one page."""
    from hybridpar.artifacts.report import build

    with one_sentence_per_fault():
        build(figures_dir, numbers, notebooks_dir, paper, out)
