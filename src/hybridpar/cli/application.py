"""The command line's frame: the application, options that commands share, and faults told as sentences.

Exit codes: 0 done; 1 the input is malformed or a file cannot be used (one sentence per fault on stderr);
2 usage; 3 the run was executed and did not end ok (its result.json says how); 130 interrupted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from hybridpar import __version__
from hybridpar.corpus import CorpusError
from hybridpar.launch.folder import LaunchError
from hybridpar.specs import SpecError

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


OutOption = Annotated[Path, typer.Option("--out", metavar="FILE", help="What to write.")]


StudyArgument = Annotated[Path, typer.Argument(metavar="STUDY.yaml", help="A study, e.g. data/studies/smoke.yaml.")]


def fail(faults: tuple[str, ...] | list[str], code: int = 1) -> NoReturn:
    """Say each fault on stderr, and end with the code."""
    for fault in faults:
        typer.echo(f"hybridpar: {fault}", err=True)
    raise typer.Exit(code)


@contextmanager
def one_sentence_per_fault() -> Iterator[None]:
    """Turn the faults a user can cause into sentences and exit codes, never a traceback."""
    try:
        yield
    except SpecError as error:
        fail(error.faults)
    except (LaunchError, CorpusError) as error:
        fail([str(error)])
    except KeyboardInterrupt:
        fail(["interrupted; finished results are kept, and the same command goes on from there"], 130)
    except BrokenPipeError:
        os._exit(1)
    except OSError as error:
        fail([f"{error.filename or 'a file'} cannot be used: {error.strerror or error}"])


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


def must_be_one_of(option: str, given: Iterable[str], legal: Iterable[str]) -> None:
    """End with code 2 where an option has a value that is not legal."""
    strange = [value for value in given if value not in legal]
    if strange:
        fail([f"{option} {strange[0]} is not legal; legal: {', '.join(legal)}"], 2)


def must_be_writable(path: Path, option: str = "--out") -> None:
    """Before minutes of work that would be lost."""
    if path.is_dir():
        fail([f"{option} {path} is a folder; legal: a file"], 2)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        probe = path.with_name(f"{path.name}.{os.getpid()}.part")
        probe.touch()
        probe.unlink()
    except OSError as error:
        fail([f"{option} {path} cannot be written: {error.strerror or error}"], 2)


def write_json(path: Path, content: Any) -> None:
    """Write whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    temporary.replace(path)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write a Parquet table whole or not at all."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    pq.write_table(pa.Table.from_pylist(rows), temporary)
    temporary.replace(path)
