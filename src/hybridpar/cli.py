"""The command line. Thin: each command reads its input, calls one function, prints what came of it.

Exit codes: 0 done; 1 the input is malformed or a file cannot be used (one sentence per fault on stderr);
2 usage; 3 the run was executed and did not end ok (its result.json says how); 130 interrupted.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from hybridpar import __version__
from hybridpar.corpus import CorpusError
from hybridpar.launch.folder import LaunchError
from hybridpar.specs import RunSpec, SpecError, load_run_spec
from hybridpar.study import LARGEST_BATCH, batches, load_study

if TYPE_CHECKING:
    from hybridpar.explain import Explanation
    from hybridpar.trace.tracer import Trace

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


StudyArgument = Annotated[Path, typer.Argument(metavar="STUDY.yaml", help="A study, e.g. data/studies/smoke.yaml.")]
RunsDirOption = Annotated[Path, typer.Option("--runs-dir", metavar="DIR", help="Parent of the run folders.")]
RUNS_DIR = Path("data/runs")
COLLECTIVE_WORLDS = (2, 4, 8)
COLLECTIVE_SIZES = tuple(4**exponent for exponent in range(5, 12))  # 1 KiB to 4 MiB


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

    with _one_sentence_per_fault():
        every = {batch.name: batch for batch in batches(load_study(path), largest)}
        _must_be_one_of("--only", [only] if only else [], every)
        runs = [run for name, batch in every.items() if only in (None, name) for run in batch.runs]
        results = run_batch(runs, runs_dir, retries=retries)
        if out:
            _write_json(out, {result["run_id"]: result["outcome"] for result in results})


def _write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    temporary.replace(path)


def _must_be_writable(path: Path) -> None:
    """Before minutes of work that would be lost."""
    if path.is_dir():
        _fail([f"--out {path} is a folder; legal: a file"], 2)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        probe = path.with_name(f"{path.name}.{os.getpid()}.part")
        probe.touch()
        probe.unlink()
    except OSError as error:
        _fail([f"--out {path} cannot be written: {error.strerror or error}"], 2)


@app.command()
def study(path: StudyArgument) -> None:
    """List the runs of a study, with the reason for each that is illegal."""
    from hybridpar.legality import infeasible_reason

    with _one_sentence_per_fault():
        for cell in load_study(path).cells:
            reason = infeasible_reason(cell.run)
            name = f"{cell.run.run_id} {cell.run.model.name} {cell.run.strategy.label} repeat {cell.run.repeat}"
            typer.echo(f"{name}: infeasible: {reason}" if reason else f"{name}: legal")


@app.command()
def corpus(name: Annotated[str, typer.Argument(help="A corpus name, or a UTF-8 text file.")] = "shakespeare") -> None:
    """Fetch and tokenise the text to train on (the first run does it too)."""
    from hybridpar.corpus import prepare

    with _one_sentence_per_fault():
        typer.echo(str(prepare(name)))


@app.command()
def tables(
    path: StudyArgument,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the Parquet files.")],
    runs_dir: RunsDirOption = RUNS_DIR,
) -> None:
    """Collect the run folders of a study into tidy tables with a checked schema."""
    from hybridpar.results.schemas import TableError
    from hybridpar.results.tables import build

    with _one_sentence_per_fault():
        try:
            rows = build(load_study(path), runs_dir, out)
        except TableError as error:
            _fail([str(error)])
        typer.echo(f"{out}: " + ", ".join(f"{name} {count} rows" for name, count in rows.items()))


TablesDirOption = Annotated[Path, typer.Option("--tables-dir", metavar="DIR", help="Tables of the study.")]
_BENCH_HELP = "Holds collectives.parquet and departures.json (either may be missing)."
BenchDirOption = Annotated[Path, typer.Option("--bench-dir", metavar="DIR", help=_BENCH_HELP)]
FiguresDirOption = Annotated[Path, typer.Option("--figures-dir", metavar="DIR", help="Figures and tables as saved.")]
OutOption = Annotated[Path, typer.Option("--out", metavar="FILE", help="What to write.")]


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
    with _one_sentence_per_fault():
        try:
            execute(source, out / source.name, out / f"{source.stem}.html", parameters)
        except NotebookError as error:
            _fail([str(error)])


@app.command()
def numbers(tables_dir: TablesDirOption, bench_dir: BenchDirOption, out: OutOption) -> None:
    """Compute every number that the paper quotes, with the runs it comes from (and macros.tex beside it)."""
    from hybridpar.artifacts.inputs import InputError
    from hybridpar.artifacts.numbers import write

    with _one_sentence_per_fault():
        try:
            write(tables_dir, bench_dir, out)
        except InputError as error:
            _fail([str(error)])


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

    with _one_sentence_per_fault():
        try:
            build(paper_dir, figures_dir, numbers, out)
        except PaperError as error:
            _fail([str(error)])


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

    with _one_sentence_per_fault():
        build(figures_dir, numbers, notebooks_dir, paper, out)


@app.command()
def parity(
    family: Annotated[list[str] | None, typer.Option(help="One of the four families (may be repeated).")] = None,
    precision: Annotated[str, typer.Option(help="fp64 or fp32; DeepSpeed's layouts take fp32.")] = "fp64",
    engine: Annotated[str, typer.Option(help="torch or deepspeed.")] = "torch",
    phase: Annotated[str, typer.Option(help="train, or decode: prompts filled in and tokens decoded.")] = "train",
    devices: Annotated[int, typer.Option(min=1, help="Largest number of devices.")] = 4,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write all rows there as JSON.")] = None,
) -> None:
    """Compare every layout with one device: losses, gradients, parameters; in decoding tokens and logits.

    Exit code 3 where one differs.
    """
    from hybridpar.launch.forked import preload
    from hybridpar.parity import TOLERANCES, Parity
    from hybridpar.parity_generation import compare_generation
    from hybridpar.parity_layouts import MODELS, runs_to_compare

    _must_be_one_of("--engine", [engine], ["torch", "deepspeed"])
    _must_be_one_of("--precision", [precision], TOLERANCES)
    _must_be_one_of("--phase", [phase], ["train", "decode"])
    _must_be_one_of("--family", family or [], MODELS)
    rows: list[dict[str, Any]] = []
    if out:
        _must_be_writable(out)
    with _one_sentence_per_fault():
        runs = runs_to_compare(family or list(MODELS), engine, phase, precision=precision, largest=devices)
        preload(deepspeed=engine == "deepspeed")
        for found in Parity().sweep(runs) if phase == "train" else compare_generation(runs):
            rows.append(found.row())
            typer.echo(f"{len(rows)}/{len(runs)} {_parity_line(rows[-1])}")
        if out:
            _write_json(out, rows)
    counts = {
        verdict: sum(row["verdict"] == verdict for row in rows) for verdict in ("equal", "refused", "differs", "failed")
    }
    typer.echo(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    if counts["differs"] or counts["failed"]:
        raise typer.Exit(3)


def _parity_line(row: dict[str, Any]) -> str:
    name = f"{row['family']} {row['layout']} {row['precision']}: {row['verdict']}"
    if row["reason"]:
        return f"{name}: {row['reason']}"
    kinds = [kind for kind in ("loss", "grad_norm", "gradient", "parameter", "logits") if kind in row]
    return f"{name} (largest relative deviations: {', '.join(f'{kind} {row[kind]:.1e}' for kind in kinds)})"


def _must_be_one_of(option: str, given: Iterable[str], legal: Iterable[str]) -> None:
    strange = [value for value in given if value not in legal]
    if strange:
        _fail([f"{option} {strange[0]} is not legal; legal: {', '.join(legal)}"], 2)


RankOption = Annotated[list[int] | None, typer.Option("--rank", help="A rank of the grid (may be repeated).")]


@app.command()
def trace(
    spec: SpecArgument,
    settings: SettingsOption = None,
    rank: RankOption = None,
    roles: Annotated[bool, typer.Option("--roles", help="The first rank of every pipeline stage.")] = False,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write all that was seen as JSON.")] = None,
    chrome: Annotated[
        Path | None, typer.Option("--chrome", metavar="FILE", help="Write one rank's step for ui.perfetto.dev.")
    ] = None,
) -> None:
    """Run one rank of a training step with the real code, but with shapes instead of numbers and nobody else there.

    Any size, no device: what the rank computes, sends and holds, and when it holds most (tier: traced).
    """
    from hybridpar.legality import violations

    for path in filter(None, (out, chrome)):
        _must_be_writable(path)
    with _one_sentence_per_fault():
        run = load_run_spec(spec, settings or ())
        found = violations(run, on_text=False)
        if found:
            _fail([str(violation) for violation in found], 3)
        a_stage = run.strategy.devices // run.strategy.pp
        every = range(0, run.strategy.devices, a_stage) if roles else rank or [0]
        if chrome and len(every) > 1:
            _fail([f"--chrome shows one rank, and {len(every)} were asked for; legal: one --rank"], 2)
        _trace_ranks(run, every, out, chrome)


def _trace_ranks(run: RunSpec, ranks: Iterable[int], out: Path | None, chrome: Path | None) -> None:
    from hybridpar.trace.chrome import chrome_events
    from hybridpar.trace.tracer import NotTracedError, trace_step

    rows = []
    for one in ranks:
        try:
            seen = trace_step(run, one)
        except NotTracedError as error:
            _fail([str(error)], 2)
        rows.append(seen.row())
        typer.echo("\n".join(_trace_lines(seen)))
        if chrome:
            _write_json(chrome, chrome_events(seen))
    if out:
        _write_json(out, rows)


def _trace_lines(seen: Trace) -> Iterator[str]:
    yield f"rank {seen.rank}: {seen.operators} operators, traced in {seen.seconds:.1f} s"
    yield "  FLOPs of matrix products: " + ", ".join(f"{phase} {flops:,}" for phase, flops in seen.flops.items())
    largest = ", ".join(f"{category} {size:,}" for category, size in seen.peak.items())
    yield f"  bytes at the peak, in the {seen.peak_phase}: {sum(seen.peak.values()):,} ({largest})"
    for row in seen.comm:
        yield f"  {row.op} over {row.group}, {row.group_size} ranks: {row.calls} calls, {row.bytes:,} bytes"


@app.command()
def check_theory(
    family: Annotated[list[str] | None, typer.Option(help="One of the four families (may be repeated).")] = None,
    precision: Annotated[str, typer.Option(help="fp64, fp32 or bf16.")] = "fp32",
    devices: Annotated[int, typer.Option(min=1, help="Largest number of devices of a small layout.")] = 8,
    layouts: Annotated[
        int, typer.Option(min=0, help="How many small training layouts of a family to trace; a third as many served.")
    ] = 12,
    drawn: Annotated[int, typer.Option("--random", min=0, help="How many random runs of a family to trace, too.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="What random runs are drawn from.")] = 0,
    measured: Annotated[int, typer.Option(min=0, help="How many of a family to run in real ranks, too.")] = 3,
    full: Annotated[bool, typer.Option("--full", help="All small layouts, and models at their public size.")] = False,
    jobs: Annotated[int, typer.Option(min=0, help="Traces at once; 0: as many as there are cores.")] = 0,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write every comparison (Parquet).")] = None,
) -> None:
    """Compare closed forms with traces of the real program and with real ranks: FLOPs, calls, bytes sent, bytes held.

    With --out an interrupted comparison goes on where it was. Exit code 3 where one deviates, or could not be made.
    """
    from hybridpar.parity_layouts import MODELS
    from hybridpar.theory_sweep import EVERYTHING, Amount, compare_all, grid

    _must_be_one_of("--precision", [precision], ["fp64", "fp32", "bf16"])
    _must_be_one_of("--family", family or [], MODELS)
    if out:
        _must_be_writable(out)
    journal = out.with_name(f"{out.name}.journal") if out else None
    amount = Amount(EVERYTHING if full else layouts, drawn, measured, devices, seed)
    rows: list[dict[str, Any]] = []
    failures = 0
    with _one_sentence_per_fault():
        work = grid(family or list(MODELS), precision, amount, full_size=full)
        for number, compared in enumerate(compare_all(work, jobs or os.cpu_count() or 1, journal), start=1):
            found = [dict(row) for row in compared.rows]
            rows += found
            failures += bool(compared.failure)
            told = f"FAILED: {compared.failure}" if compared.failure else _verdicts(found)
            typer.echo(f"{number}/{len(work)} {compared.work.name}: {told}")
            for row in found:
                if row["verdict"] == "deviates":
                    typer.echo(f"  DEVIATES: rank {row['rank']} {row['quantity']} {row['item']}: {_numbers(row)}")
        if out and not failures:
            _write_rows(out, rows)
        if journal and not failures:
            journal.unlink(missing_ok=True)
    for quantity in sorted({row["quantity"] for row in rows}):
        typer.echo(f"{quantity}: {_verdicts([row for row in rows if row['quantity'] == quantity])}")
    typer.echo(f"all: {_verdicts(rows)}")
    if failures or any(row["verdict"] == "deviates" for row in rows):
        raise typer.Exit(3)


def _verdicts(rows: list[dict[str, Any]]) -> str:
    counts = Counter(row["verdict"] for row in rows)
    kinds = ("exact", "explained", "deviates", "uncovered")
    return f"{len(rows)} comparisons, " + ", ".join(f"{counts[kind]} {kind}" for kind in kinds)


def _numbers(row: dict[str, Any]) -> str:
    return f"predicted {row['predicted']}, {row['tier']} {row['seen']}"


@app.command()
def explain(
    spec: SpecArgument,
    settings: SettingsOption = None,
    rank: Annotated[int, typer.Option("--rank", min=0, help="A rank of the grid.")] = 0,
    quantity: Annotated[list[str] | None, typer.Option(help="memory, flops or comm (may be repeated).")] = None,
    traced: Annotated[bool, typer.Option("--traced", help="Trace the rank, too, and set its numbers beside.")] = False,
) -> None:
    """Show where a predicted number comes from: symbols, formula, terms, and on demand what a trace sees."""
    from hybridpar.explain import QUANTITIES, inputs
    from hybridpar.explain import explain as explained
    from hybridpar.legality import violations

    _must_be_one_of("--quantity", quantity or [], QUANTITIES)
    with _one_sentence_per_fault():
        run = load_run_spec(spec, settings or ())
        found = violations(run, on_text=False)
        if found:
            _fail([str(violation) for violation in found], 3)
        if rank >= run.strategy.devices:
            _fail([f"--rank {rank} is not in the grid; legal: 0 to {run.strategy.devices - 1}"], 2)
        typer.echo(f"{run.model.name} {run.strategy.label}, tier: predicted")
        typer.echo("\n".join(f"  {name} = {value}" for name, value in inputs(run, rank).items()))
        for one in quantity or QUANTITIES:
            for explanation in explained(run, rank, one):
                typer.echo("\n".join(_explanation_lines(explanation)))
        if traced:
            _compare_with_trace(run, rank)


def _explanation_lines(explanation: Explanation) -> Iterator[str]:
    yield f"\n{explanation.title}"
    yield "\n".join(f"  | {line}" for line in explanation.formula.strip().splitlines())
    if explanation.missing:
        yield f"  {explanation.missing}"
    for term in explanation.terms:
        yield f"  {term.value:>24,} {term.unit}  {term.name}"


def _compare_with_trace(run: RunSpec, rank: int) -> None:
    from hybridpar.check_theory import compare_traced
    from hybridpar.trace.tracer import NotTracedError

    try:
        comparisons = compare_traced(run, [rank])
    except NotTracedError as error:
        _fail([str(error)], 2)
    typer.echo("\nbeside a trace of the real program")
    for row in (comparison.row() for comparison in comparisons):
        typer.echo(f"  {row['verdict']:>9}  {row['quantity']} {row['item']}: {_numbers(row)}")


@app.command()
def preflight(path: StudyArgument) -> None:
    """Look at this machine before a study is started: what is missing, and how to mend it."""
    from hybridpar.preflight import inspect

    with _one_sentence_per_fault():
        runs = load_study(path).runs
        world = max(run.strategy.devices for run in runs)
        findings = inspect(world, RUNS_DIR.parent, frozenset(run.strategy.engine for run in runs))
    for finding in findings:
        typer.echo(f"{'ok' if finding.ok else 'NOT OK'}: {finding.name}: {finding.seen}")
    faults = [f"{finding.name}: {finding.remedy}" for finding in findings if not finding.ok]
    if faults:
        _fail(faults)


@app.command()
def collectives(
    out: OutOption,
    world: Annotated[list[int] | None, typer.Option(min=2, help="Numbers of ranks (may be repeated).")] = None,
    size: Annotated[list[int] | None, typer.Option(min=1, help="Bytes of the whole tensor (may be repeated).")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Samples of each.")] = 5,
) -> None:
    """Measure what a collective costs on this machine, by operation, size and number of ranks."""
    from hybridpar.launch.forked import preload
    from hybridpar.measure.collective_bench import bench

    _must_be_writable(out)
    with _one_sentence_per_fault():
        preload()
        rows = []
        for ranks in world or COLLECTIVE_WORLDS:
            typer.echo(f"collectives over {ranks} ranks")
            rows += bench(ranks, size or COLLECTIVE_SIZES, repeats=repeats)
        _write_rows(out, rows)
        typer.echo(f"{out}: {len(rows)} measurements")


@app.command()
def meter_overhead(
    spec: SpecArgument,
    settings: SettingsOption = None,
    rounds: Annotated[int, typer.Option(min=4, help="Turns of metered and plain calls.")] = 30,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write it as JSON.")] = None,
) -> None:
    """Measure what metering every collective costs, a call and as a share of this run's step (real forked ranks)."""
    from hybridpar.legality import violations

    if out:
        _must_be_writable(out)
    with _one_sentence_per_fault():
        run = load_run_spec(spec, settings or ())
        found = violations(run, on_text=False)
        if found:
            _fail([str(violation) for violation in found], 3)
        if run.strategy.engine != "torch" or run.workload.phase != "train" or run.strategy.devices < 2:
            _fail(["a meter's share is told of training by the torch engine on 2 or more devices"], 2)
        from hybridpar.launch.forked import preload
        from hybridpar.measure.meter_overhead import meter_overhead as measured

        preload()
        try:
            seen = measured(run, rounds)
        except RuntimeError as error:
            _fail([str(error)], 3)
    typer.echo(
        f"{seen.model} {seen.layout}: {seen.calls} calls in a step of {seen.step_seconds:.4f} s; metering adds "
        f"{1e6 * seen.seconds_a_call:.1f} us (quartiles {1e6 * seen.low:.1f} to {1e6 * seen.high:.1f}) to "
        f"{1e6 * seen.plain_seconds_a_call:.0f} us a call: {100 * seen.share:.2f} % of the step (tier: measured)"
    )
    if out:
        _write_json(out, seen.row())


@app.command()
def departures(
    out: OutOption,
    only: Annotated[list[str] | None, typer.Option(help="Part of a name, e.g. Ulysses (may be repeated).")] = None,
) -> None:
    """Run every setting known to make DeepSpeed train another model than one device does, and the one that is right.

    One that departs no more is a row that says so: another DeepSpeed may have mended it.
    """
    from hybridpar.departures import departures as known
    from hybridpar.departures import measure, recorded
    from hybridpar.parity import Parity

    chosen = [one for one in known() if not only or any(part in one.name for part in only)]
    if not chosen:
        _fail([f"--only {only[0] if only else ''} names none; names: {', '.join(one.name for one in known())}"], 2)
    _must_be_writable(out)
    rows: list[dict[str, Any]] = []
    with _one_sentence_per_fault():
        parity = Parity()
        for departure in chosen:
            rows.append(measure(departure, parity))
            typer.echo(f"{len(rows)}/{len(chosen)} {_departure_line(rows[-1])}")
        _write_json(out, recorded(rows))


def _departure_line(row: dict[str, Any]) -> str:
    sides = f"{row['departing_verdict']} (right: {row['correct_verdict']})"
    return f"{row['name']}: {sides}{'' if row['reproduced'] else '; NOT REPRODUCED'}"


def _write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    pq.write_table(pa.Table.from_pylist(rows), temporary)
    temporary.replace(path)
