"""Commands that hold the program against one device, itself and this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hybridpar.cli.application import (
    OutOption,
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
from hybridpar.specs import load_run_spec

COLLECTIVE_WORLDS = (2, 4, 8)


COLLECTIVE_SIZES = tuple(4**exponent for exponent in range(5, 12))  # 1 KiB to 4 MiB


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

    must_be_one_of("--engine", [engine], ["torch", "deepspeed"])
    must_be_one_of("--precision", [precision], TOLERANCES)
    must_be_one_of("--phase", [phase], ["train", "decode"])
    must_be_one_of("--family", family or [], MODELS)
    rows: list[dict[str, Any]] = []
    if out:
        must_be_writable(out)
    with one_sentence_per_fault():
        runs = runs_to_compare(family or list(MODELS), engine, phase, precision=precision, largest=devices)
        preload(deepspeed=engine == "deepspeed")
        for found in Parity().sweep(runs) if phase == "train" else compare_generation(runs):
            rows.append(found.row())
            typer.echo(f"{len(rows)}/{len(runs)} {_parity_line(rows[-1])}")
        if out:
            write_json(out, rows)
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
        fail([f"--only {only[0] if only else ''} names none; names: {', '.join(one.name for one in known())}"], 2)
    must_be_writable(out)
    rows: list[dict[str, Any]] = []
    with one_sentence_per_fault():
        parity = Parity()
        for departure in chosen:
            rows.append(measure(departure, parity))
            typer.echo(f"{len(rows)}/{len(chosen)} {_departure_line(rows[-1])}")
        write_json(out, recorded(rows))


def _departure_line(row: dict[str, Any]) -> str:
    sides = f"{row['departing_verdict']} (right: {row['correct_verdict']})"
    return f"{row['name']}: {sides}{'' if row['reproduced'] else '; NOT REPRODUCED'}"


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

    must_be_writable(out)
    with one_sentence_per_fault():
        preload()
        rows = []
        for ranks in world or COLLECTIVE_WORLDS:
            typer.echo(f"collectives over {ranks} ranks")
            rows += bench(ranks, size or COLLECTIVE_SIZES, repeats=repeats)
        write_rows(out, rows)
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
        must_be_writable(out)
    with one_sentence_per_fault():
        run = load_run_spec(spec, settings or ())
        found = violations(run, on_text=False)
        if found:
            fail([str(violation) for violation in found], 3)
        if run.strategy.engine != "torch" or run.workload.phase != "train" or run.strategy.devices < 2:
            fail(["a meter's share is told of training by the torch engine on 2 or more devices"], 2)
        from hybridpar.launch.forked import preload
        from hybridpar.measure.meter_overhead import meter_overhead as measured

        preload()
        try:
            seen = measured(run, rounds)
        except RuntimeError as error:
            fail([str(error)], 3)
    typer.echo(
        f"{seen.model} {seen.layout}: {seen.calls} calls in a step of {seen.step_seconds:.4f} s; metering adds "
        f"{1e6 * seen.seconds_a_call:.1f} us (quartiles {1e6 * seen.low:.1f} to {1e6 * seen.high:.1f}) to "
        f"{1e6 * seen.plain_seconds_a_call:.0f} us a call: {100 * seen.share:.2f} % of the step (tier: measured)"
    )
    if out:
        write_json(out, seen.row())
