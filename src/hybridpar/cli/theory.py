"""Commands that trace, explain, and hold closed forms against the program."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hybridpar.cli.application import (
    SettingsOption,
    SpecArgument,
    app,
    fail,
    must_be_one_of,
    must_be_writable,
    one_sentence_per_fault,
    write_json,
    write_rows,
)
from hybridpar.specs import RunSpec, load_run_spec

if TYPE_CHECKING:
    from hybridpar.explain import Explanation
    from hybridpar.trace.tracer import Trace

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

    for option, path in (("--out", out), ("--chrome", chrome)):
        if path:
            must_be_writable(path, option)
    with one_sentence_per_fault():
        run = load_run_spec(spec, settings or ())
        found = violations(run, on_text=False)
        if found:
            fail([str(violation) for violation in found], 3)
        a_stage = run.strategy.devices // run.strategy.pp
        every = range(0, run.strategy.devices, a_stage) if roles else rank or [0]
        if chrome and len(every) > 1:
            fail([f"--chrome shows one rank, and {len(every)} were asked for; legal: one --rank"], 2)
        _trace_ranks(run, every, out, chrome)


def _trace_ranks(run: RunSpec, ranks: Iterable[int], out: Path | None, chrome: Path | None) -> None:
    from hybridpar.trace.chrome import chrome_events
    from hybridpar.trace.tracer import NotTracedError, trace_step

    rows = []
    for one in ranks:
        try:
            seen = trace_step(run, one)
        except NotTracedError as error:
            fail([str(error)], 2)
        rows.append(seen.row())
        typer.echo("\n".join(_trace_lines(seen)))
        if chrome:
            write_json(chrome, chrome_events(seen))
    if out:
        write_json(out, rows)


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

    must_be_one_of("--precision", [precision], ["fp64", "fp32", "bf16"])
    must_be_one_of("--family", family or [], MODELS)
    if out:
        must_be_writable(out)
    journal = out.with_name(f"{out.name}.journal") if out else None
    amount = Amount(EVERYTHING if full else layouts, drawn, measured, devices, seed)
    rows: list[dict[str, Any]] = []
    failures = 0
    with one_sentence_per_fault():
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
            write_rows(out, rows)
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

    must_be_one_of("--quantity", quantity or [], QUANTITIES)
    with one_sentence_per_fault():
        run = load_run_spec(spec, settings or ())
        found = violations(run, on_text=False)
        if found:
            fail([str(violation) for violation in found], 3)
        if rank >= run.strategy.devices:
            fail([f"--rank {rank} is not in the grid; legal: 0 to {run.strategy.devices - 1}"], 2)
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
        fail([str(error)], 2)
    typer.echo("\nbeside a trace of the real program")
    for row in (comparison.row() for comparison in comparisons):
        typer.echo(f"  {row['verdict']:>9}  {row['quantity']} {row['item']}: {_numbers(row)}")
