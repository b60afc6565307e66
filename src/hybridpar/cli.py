"""The command line. Thin: each command reads its input, calls one function, prints what came of it.

Exit codes: 0 done; 1 the input is malformed or a file cannot be used (one sentence per fault on stderr);
2 usage; 3 the run was executed and did not end ok (its result.json says how); 130 interrupted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from hybridpar import __version__
from hybridpar.corpus import CorpusError
from hybridpar.launch.folder import LaunchError
from hybridpar.specs import SpecError, load_run_spec

app = typer.Typer(
    name="hybridpar",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="How should a large language model be split over devices? Run one strategy, or a whole study.\n\n"
    "Start with `hybridpar schema --fields` to see what a run spec may say, `hybridpar check SPEC.yaml` to see "
    "whether a strategy is legal, `hybridpar run SPEC.yaml --out DIR` to train it for a few steps, and "
    "`hybridpar parity` to see that every strategy computes what one device computes. "
    "`make study` runs everything.",
)

_SETTINGS_HELP = "Override one field, e.g. --set strategy.dp=4 (may be given many times)."
SpecArgument = Annotated[Path, typer.Argument(metavar="SPEC.yaml", help="A run spec (see `hybridpar schema`).")]
SettingsOption = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help=_SETTINGS_HELP)]


def _fail(faults: tuple[str, ...] | list[str], code: int = 1) -> NoReturn:
    for fault in faults:
        typer.echo(f"hybridpar: {fault}", err=True)
    raise typer.Exit(code)


@contextmanager
def _one_sentence_per_fault() -> Iterator[None]:
    """Turn the faults a user can cause into sentences and exit codes, never a traceback."""
    try:
        yield
    except SpecError as error:
        _fail(error.faults)
    except (LaunchError, CorpusError) as error:
        _fail([str(error)])
    except KeyboardInterrupt:
        _fail(["interrupted; finished results are kept, and the same command goes on from there"], 130)
    except BrokenPipeError:
        os._exit(1)
    except OSError as error:
        _fail([f"{error.filename or 'a file'} cannot be used: {error.strerror or error}"])


def _version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def run(
    spec: SpecArgument,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for spec, environment, result and events.")],
    settings: SettingsOption = None,
    force: Annotated[bool, typer.Option("--force", help="Run again though DIR holds this run's result.")] = False,
) -> None:
    """Execute one run spec: train for a few steps, and write what was measured to DIR."""
    from hybridpar.launch import run_one

    with _one_sentence_per_fault():
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
        f"{result['tokens_per_s']:.0f} tokens/s, last loss {result['loss'][-1]:.4f} ({out / 'result.json'})"
    )


@app.command()
def check(spec: SpecArgument, settings: SettingsOption = None) -> None:
    """Say whether a run spec is legal, and if not, every violated constraint with its legal values."""
    from hybridpar.legality import violations

    with _one_sentence_per_fault():
        spec_run = load_run_spec(spec, settings or ())
        found = violations(spec_run)
    if found:
        _fail([str(violation) for violation in found], 3)
    degrees = f"{spec_run.strategy.devices} devices, {spec_run.micro_batches} micro-batches a replica"
    typer.echo(f"legal: {spec_run.model.name} {spec_run.strategy.label} on {degrees} (run_id {spec_run.run_id})")


@app.command()
def schema(
    fields: Annotated[bool, typer.Option("--fields", help="A readable list instead of JSON Schema.")] = False,
) -> None:
    """Print what a run spec may say, as JSON Schema (draft 2020-12)."""
    from hybridpar.schema import field_lines, run_spec_schema

    typer.echo("\n".join(field_lines()) if fields else json.dumps(run_spec_schema(), indent=2))
