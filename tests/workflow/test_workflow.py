"""The DAG: what a change reruns and what it does not. Snakemake is the real one; the commands are stood in for."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT / "src")}
STUDY = """
name: tiny
defaults: {workload: {seq_len: 16, global_batch: 4, steps: 3}}
sweeps:
  - name: single
    models: [llama-toy]
    strategies: [{}, {dp: 2}, {tp: 2}, {tp: 4}, {engine: deepspeed, dp: 2}]
"""
# Snakemake itself takes seconds a call, more on a busy machine.
pytestmark = pytest.mark.timeout(300)

AFTER_TABLES = {**{f"notebook_{number:02}": 1 for number in range(1, 9)}, "numbers": 1}
END = {"paper": 1, "report": 1, "all": 1}


def _checkout(folder: Path) -> Path:
    """What the workflow reads of a checkout, with the tiny study."""
    stand_in = folder / "bin" / "hybridpar"
    stand_in.parent.mkdir()
    stand_in.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).with_name("stand_in.py")} "$@"\n')
    stand_in.chmod(0o755)
    package = [f"src/hybridpar/{name}" for name in ("artifacts", "results", "theory")]
    for name in ("src/rules", *package, "notebooks", "paper", "envs"):
        ignored = shutil.ignore_patterns("executed", "generated", "__pycache__", "*.pdf")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    shutil.copy(ROOT / "Snakefile", folder)
    (folder / "README.md").write_text("prose")
    (folder / "data/studies").mkdir(parents=True)
    (folder / "data/studies/tiny.yaml").write_text(STUDY)
    return folder


def _command(*options: str) -> list[str]:
    # two cores whatever the machine has: threads are part of no trigger, and the profile's `all` is for real runs
    profile = ["--workflow-profile", "envs/profiles/local", "--cores", "2"]
    return [sys.executable, "-m", "snakemake", "--config", "study=tiny", "bin=$PWD/bin", *profile, *options]


def _snakemake(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        _command(*options), cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=110
    )


def _planned(folder: Path) -> dict[str, int]:
    """How many jobs of each rule a call would run."""
    done = _snakemake(folder, "--dry-run")
    assert done.returncode == 0, done.stdout + done.stderr
    jobs = re.findall(r"^(\w+) +(\d+)$", (done.stdout + done.stderr).partition("Job stats:")[2], flags=re.MULTILINE)
    return {rule: int(count) for rule, count in jobs if rule != "total"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout in which the tiny study was made."""
    folder = _checkout(tmp_path_factory.mktemp("checkout"))
    done = _snakemake(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of it, times and all, to change."""
    folder = tmp_path / "checkout"
    shutil.copytree(finished, folder)  # copy2: keeps the times
    yield folder
    shutil.rmtree(folder)


def _edit(path: Path) -> None:
    text = path.read_text()
    path.write_text(f"{text} \n")


def test_a_fresh_study_runs_every_command_and_each_batch_once(finished: Path) -> None:
    calls = Counter(line.split()[0] for line in (finished / "calls.txt").read_text().splitlines())
    assert calls == {
        "corpus": 1,
        "batch": 4,  # torch on 1, 2 and 4 ranks, deepspeed on 2
        "collectives": 1,
        "departures": 1,
        "tables": 1,
        "check-theory": 1,
        "notebook": 8,
        "numbers": 1,
        "paper": 1,
        "report": 1,
    }
    assert (finished / "report.html").is_file()
    assert (finished / "paper/paper.pdf").is_file()


def test_nothing_changed_reruns_nothing(copy: Path) -> None:
    assert _planned(copy) == {}


def test_docs_comments_and_touched_files_rerun_nothing(copy: Path) -> None:
    _edit(copy / "README.md")
    _edit(copy / "data/studies/tiny.yaml")  # its runs are the same
    (copy / "data/corpus/shakespeare.bin").touch()
    (copy / "src/hybridpar/results/tables.py").touch()
    assert _planned(copy) == {}


def test_a_notebook_reruns_itself_and_what_shows_it(copy: Path) -> None:
    _edit(copy / "notebooks/03-which-hybrid-wins.ipynb")
    assert _planned(copy) == {"notebook_03": 1, **END}


def test_prose_of_the_paper_makes_the_paper_again(copy: Path) -> None:
    _edit(copy / "paper/main.typ")
    assert _planned(copy) == END


def test_a_plot_reruns_notebooks_and_no_job(copy: Path) -> None:
    _edit(copy / "src/hybridpar/artifacts/figures.py")
    notebooks = {rule: count for rule, count in AFTER_TABLES.items() if rule != "numbers"}
    assert _planned(copy) == {**notebooks, **END}


def test_a_table_reruns_what_reads_it_and_no_job(copy: Path) -> None:
    _edit(copy / "src/hybridpar/results/tables.py")
    assert _planned(copy) == {"tables": 1, **AFTER_TABLES, **END}


def test_a_closed_form_is_compared_anew_and_reruns_no_job(copy: Path) -> None:
    _edit(copy / "src/hybridpar/theory/traffic.py")
    assert _planned(copy) == {"theory": 1, **AFTER_TABLES, **END}


@pytest.mark.parametrize("amount", ["layouts: 1", "layouts: 2, measured: 4"])  # the second: the usual, exchanged
def test_another_number_of_layouts_is_compared_anew_and_reruns_no_job(copy: Path, amount: str) -> None:
    path = copy / "data/studies/tiny.yaml"
    path.write_text(f"{STUDY}theory: {{{amount}}}\n")
    assert _planned(copy) == {"theory": 1, **AFTER_TABLES, **END}


def test_a_number_that_deviates_stops_nothing_but_a_fault_does(copy: Path) -> None:
    theory, stand_in = copy / "data/tables/tiny/theory.parquet", copy / "bin/hybridpar"
    honest = stand_in.read_text()
    nothing_written = f"rm {theory.relative_to(copy)}; exit 3"
    for end, ends_well in (("exit 3", True), ("exit 1", False), (nothing_written, False)):
        theory.unlink(missing_ok=True)
        stand_in.write_text(f"{honest.replace('exec ', '')}{end}\n")
        done = _snakemake(copy, str(theory.relative_to(copy)))
        assert (done.returncode == 0) == ends_well, done.stderr
        assert theory.exists() == ends_well


def test_a_changed_cell_reruns_its_batch_alone(copy: Path) -> None:
    path = copy / "data/studies/tiny.yaml"
    path.write_text(STUDY.replace("{tp: 4}", "{pp: 4}"))
    assert _planned(copy) == {"batch": 1, "tables": 1, **AFTER_TABLES, **END}


def test_a_lost_result_is_made_again(copy: Path) -> None:
    result = sorted((copy / "data/runs").glob("*/result.json"))[0]
    result.unlink()
    assert _planned(copy) == {"batch": 1, "tables": 1, **AFTER_TABLES, **END}


def test_what_is_wrong_with_a_study_is_said_and_nothing_runs(copy: Path) -> None:
    (copy / "data/studies/tiny.yaml").write_text(STUDY.replace("{dp: 2}", "{dq: 2}", 1))
    done = _snakemake(copy)
    assert done.returncode != 0
    assert "sweep single: strategy.dq is not a known key" in done.stderr
    assert "Traceback" not in done.stderr


def test_killed_and_called_again_it_goes_on_without_help(tmp_path: Path) -> None:
    folder = _checkout(tmp_path)
    stamp = "data/batches/tiny/torch-2-000.json"
    (folder / "slow").touch()
    with subprocess.Popen(
        _command(stamp),
        cwd=folder,
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as first:
        deadline = time.monotonic() + 60
        while not list((folder / "data/runs").glob("*/result.json")):
            assert first.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        os.killpg(first.pid, signal.SIGKILL)
    (folder / "slow").unlink()
    done = _snakemake(folder, stamp)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / stamp).is_file()
