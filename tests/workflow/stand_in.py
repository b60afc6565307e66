#!/usr/bin/env python
"""Stands in for the `hybridpar` command in tests of the workflow: writes what each command would, trains nothing.

Every call is noted in calls.txt. With a file `slow` beside it, a batch waits, so that a test can kill it.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from hybridpar.artifacts.catalogue import QUESTIONS
from hybridpar.launch.folder import RunFolder
from hybridpar.launch.result import without_launch
from hybridpar.outcome import Outcome
from hybridpar.study import batches, load_study


def main(command: str, *words: str) -> None:
    """Do what `hybridpar COMMAND WORDS` is asked, for show."""
    with Path("calls.txt").open("a") as calls:
        calls.write(f"{command} {' '.join(words)}\n")
    options = {word: words[index + 1] for index, word in enumerate(words) if word.startswith("--")}
    out = Path(options.get("--out", "data/corpus/shakespeare.bin"))
    if command == "batch":
        _run(Path(words[0]), options)
    for path in _written(command, words, options, out):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(command)


def _run(study: Path, options: dict[str, str]) -> None:
    batch = next(b for b in batches(load_study(study), int(options["--largest"])) if b.name == options["--only"])
    for run in batch.runs:
        folder = RunFolder(Path(options["--runs-dir"], run.run_id))
        folder.create()
        outcome = Outcome(kind="crash", reason="nothing was trained")
        folder.write("result.json", without_launch(run, outcome, "stand-in", 1))
        while Path("slow").exists():
            time.sleep(0.1)


def _written(command: str, words: tuple[str, ...], options: dict[str, str], out: Path) -> list[Path]:
    match command:
        case "corpus":
            return [out, out.with_suffix(".json")]
        case "tables":
            return [out / f"{name}.parquet" for name in ("runs", "ranks", "steps", "collectives", "memory")]
        case "notebook":
            name = Path(words[0]).stem
            saved = next(question.artifacts for question in QUESTIONS if question.notebook == name)
            figures = [Path(options["--figures-dir"], f"{artifact}.json") for artifact in saved]
            return [out / f"{name}.ipynb", out / f"{name}.html", *figures]
        case "numbers":
            return [out, out.with_name("macros.tex")]
        case _:
            return [out]


main(*sys.argv[1:])
