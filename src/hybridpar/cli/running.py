"""Commands that run specs and studies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from hybridpar.cli.application import (
    SettingsOption,
    SpecArgument,
    StudyArgument,
    app,
    fail,
    must_be_one_of,
    one_sentence_per_fault,
    write_json,
)
from hybridpar.specs import load_run_spec
from hybridpar.study import LARGEST_BATCH, batches, load_study

RunsDirOption = Annotated[Path, typer.Option("--runs-dir", metavar="DIR", help="Parent of the run folders.")]


RUNS_DIR = Path("data/runs")


@app.command()
def run(
    spec: SpecArgument,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for spec, environment, result and events.")],
    settings: SettingsOption = None,
    force: Annotated[bool, typer.Option("--force", help="Run again though DIR holds this run's result.")] = False,
) -> None:
    """Execute one run spec: train for a few steps, and write what was measured to DIR."""
    from hybridpar.launch import run_one

    with one_sentence_per_fault():
        result = run_one(load_run_spec(spec, settings or ()), out, force=force)
        typer.echo(_result_line(result, out))
    if result["outcome"] != "ok":
        raise typer.Exit(3)


def _result_line(result: dict[str, Any], out: Path) -> str:
    name = f"{result['model']} {result['strategy']}"
    if result["outcome"] != "ok":
        return f"{result['outcome']}: {name}: {result['reason']} ({out / 'result.json'})"
    step = result["step_time_s"]
    return (
        f"ok: {name}: {step['median']:.4f} s a step (median of {step['n']}), "
        f"{result['tokens_per_s']:.0f} tokens/s{_end_of(result)} ({out / 'result.json'})"
    )


def _end_of(result: dict[str, Any]) -> str:
    if result["loss"]:
        return f", last loss {result['loss'][-1]:.4f}"
    return f", first token after {result['ttft_s']['median']:.4f} s"


@app.command()
def check(spec: SpecArgument, settings: SettingsOption = None) -> None:
    """Say whether a run spec is legal, and if not, every violated constraint with its legal values."""
    from hybridpar.legality import violations

    with one_sentence_per_fault():
        spec_run = load_run_spec(spec, settings or ())
        found = violations(spec_run)
    if found:
        fail([str(violation) for violation in found], 3)
    degrees = f"{spec_run.strategy.devices} devices, {spec_run.micro_batches} micro-batches a replica"
    typer.echo(f"legal: {spec_run.model.name} {spec_run.strategy.label} on {degrees} (run_id {spec_run.run_id})")


@app.command()
def schema(
    fields: Annotated[bool, typer.Option("--fields", help="A readable list instead of JSON Schema.")] = False,
) -> None:
    """Print what a run spec may say, as JSON Schema (draft 2020-12)."""
    from hybridpar.schema import field_lines, run_spec_schema

    typer.echo("\n".join(field_lines()) if fields else json.dumps(run_spec_schema(), indent=2))


@app.command()
def preflight(path: StudyArgument) -> None:
    """Look at this machine before a study is started: what is missing, and how to mend it."""
    from hybridpar.preflight import inspect

    with one_sentence_per_fault():
        runs = load_study(path).runs
        world = max(run.strategy.devices for run in runs)
        findings = inspect(world, RUNS_DIR.parent, frozenset(run.strategy.engine for run in runs))
    for finding in findings:
        typer.echo(f"{'ok' if finding.ok else 'NOT OK'}: {finding.name}: {finding.seen}")
    faults = [f"{finding.name}: {finding.remedy}" for finding in findings if not finding.ok]
    if faults:
        fail(faults)


@app.command()
def batch(
    path: StudyArgument,
    runs_dir: RunsDirOption = RUNS_DIR,
    only: Annotated[str | None, typer.Option("--only", metavar="NAME", help="One batch, e.g. torch-000.")] = None,
    largest: Annotated[int, typer.Option(min=1, help="Most runs in a batch.")] = LARGEST_BATCH,
    retries: Annotated[int, typer.Option(min=0, help="How often a crash or timeout is tried again.")] = 1,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write run ids and outcomes there.")] = None,
) -> None:
    """Execute the runs of a study from one warm process; finished ones are not run again.

    A run that fails is a row with its reason and stops nothing: the exit code is 0 once all are accounted for.
    """
    from hybridpar.launch import run_batch

    with one_sentence_per_fault():
        every = {batch.name: batch for batch in batches(load_study(path), largest)}
        must_be_one_of("--only", [only] if only else [], every)
        runs = [run for name, batch in every.items() if only in (None, name) for run in batch.runs]
        results = run_batch(runs, runs_dir, retries=retries)
        if out:
            write_json(out, {result["run_id"]: result["outcome"] for result in results})


@app.command()
def study(path: StudyArgument) -> None:
    """List the runs of a study, with the reason for each that is illegal."""
    from hybridpar.legality import infeasible_reason

    with one_sentence_per_fault():
        for cell in load_study(path).cells:
            reason = infeasible_reason(cell.run)
            name = f"{cell.run.run_id} {cell.run.model.name} {cell.run.strategy.label} repeat {cell.run.repeat}"
            typer.echo(f"{name}: infeasible: {reason}" if reason else f"{name}: legal")


@app.command()
def corpus(name: Annotated[str, typer.Argument(help="A corpus name, or a UTF-8 text file.")] = "shakespeare") -> None:
    """Fetch and tokenise the text to train on (the first run does it too)."""
    from hybridpar.corpus import prepare

    with one_sentence_per_fault():
        typer.echo(str(prepare(name)))
