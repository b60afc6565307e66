"""Commands that predict and plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from hybridpar.cli.application import (
    SettingsOption,
    SpecArgument,
    app,
    fail,
    must_be_one_of,
    must_be_writable,
    one_sentence_per_fault,
    write_json,
)
from hybridpar.specs import RunSpec, SpecError, load_run_spec, parse_run_spec

_MODEL_HELP = "A preset (llama-3-70b, mamba2-2.7b, ...), a Hugging Face config.json, or a run spec whose model counts."
_CLUSTER_HELP = "ACCELERATOR:DEVICES, e.g. H100-80G:64; accelerators are the files of data/hardware."
_WORKLOAD_HELP = "What is trained, e.g. seq_len=8192,global_batch=512,precision=bf16."
ClusterOption = Annotated[str, typer.Option("--cluster", metavar="NAME:DEVICES", help=_CLUSTER_HELP)]


@app.command()
def predict(
    spec: SpecArgument,
    accelerator: Annotated[str, typer.Option("--on", metavar="NAME", help="An accelerator of data/hardware.")],
    settings: SettingsOption = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write it as JSON.")] = None,
) -> None:
    """Predict a training step: seconds and their parts, bytes and theirs, the chance of running out of memory.

    Tier: predicted. The run is not checked against what this machine can execute, only against what is legal.
    """
    from hybridpar.cost.hardware import HardwareError
    from hybridpar.cost.hardware import accelerator as of_name
    from hybridpar.plan.report import choice_lines
    from hybridpar.plan.search import Task, one_choice

    if out:
        must_be_writable(out)
    with one_sentence_per_fault():
        run = load_run_spec(spec, settings or ())
        _must_train(run)
        _must_be_legal(run)
        try:
            task = Task(run.model, run.workload, of_name(accelerator), run.strategy.devices)
            choice = one_choice(task, run.strategy, run.workload.micro_batch)
        except HardwareError as error:
            fail([str(error)])
    typer.echo(f"{run.model.name} on {run.strategy.devices} {task.hardware.name} (tier: predicted)")
    typer.echo("\n".join(choice_lines(choice, task)))
    if out:
        write_json(out, {"tier": "predicted", "run_id": run.run_id, "accelerator": task.hardware.name, **choice.row()})


@app.command()
def plan(
    model: Annotated[str, typer.Option("--model", metavar="MODEL", help=_MODEL_HELP)],
    cluster: ClusterOption,
    workload: Annotated[str, typer.Option("--workload", metavar="KEY=VALUE,...", help=_WORKLOAD_HELP)],
    objective: Annotated[str, typer.Option(help="time, memory, or cost (devices may stay idle).")] = "time",
    risk: Annotated[float, typer.Option(min=0, max=1, help="Chance of running out of memory that is taken.")] = 0.1,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="KEY=V1,V2", help="Choose only among these, e.g. --only tp=1,2 --only zero=1."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Do not ask what would change the choice.")] = False,
    out: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all of it as JSON.")] = None,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write it as a page.")] = None,
) -> None:
    """Find the best strategy of all that are legal; say why the others lost, and what would change the choice.

    Tier: predicted. Exit code 3 where nothing fits.
    """
    from dataclasses import replace

    from hybridpar.cost.hardware import HardwareError
    from hybridpar.plan.report import lines, page
    from hybridpar.plan.report import plan as planned
    from hybridpar.plan.search import OBJECTIVES, Task, cheapest_size
    from hybridpar.plan.space import SpaceError

    must_be_one_of("--objective", [objective], OBJECTIVES)
    for option, path in (("--json", out), ("--html", html)):
        if path:
            must_be_writable(path, option)
    with one_sentence_per_fault():
        run = _described(model, workload)
        _must_train(run)
        try:
            hardware, devices = _cluster(cluster)
            task = Task(run.model, run.workload, hardware, devices, _options(only or []), most_risk=risk)
            task = cheapest_size(task) if objective == "cost" else replace(task)
            told = planned(task, objective, changes=not quick)  # type: ignore[arg-type]
        except (HardwareError, SpaceError) as error:
            fail([str(error)])
    typer.echo("\n".join(lines(told)))
    if out:
        write_json(out, told.row())
    if html:
        html.parent.mkdir(parents=True, exist_ok=True)
        html.write_text(page(told), encoding="utf-8")
    if told.best is None:
        raise typer.Exit(3)


def _described(model: str, workload: str) -> RunSpec:
    return parse_run_spec({"model": _model(model), "workload": _pairs("--workload", workload)})


def _model(text: str) -> Any:
    path = Path(text)
    if path.suffix == ".json":
        return {"hf_config": text}
    if path.suffix in (".yaml", ".yml"):
        return load_run_spec(path).model.model_dump()
    return {"preset": text}


def _pairs(option: str, text: str) -> dict[str, Any]:
    found = {}
    for pair in filter(None, text.split(",")):
        key, separator, value = pair.partition("=")
        if not separator or not key.strip():
            raise SpecError([f"{option} {pair!r} is not of the form key=value, e.g. seq_len=4096"])
        try:
            found[key.strip()] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise SpecError([f"{option} {pair!r}: the value is not valid YAML"]) from None
    return found


def _cluster(text: str) -> tuple[Any, int]:
    from hybridpar.cost.hardware import accelerator

    name, separator, count = text.rpartition(":")
    if not separator or not count.isdigit() or not 1 <= int(count) <= _MOST_DEVICES:
        raise SpecError(
            [f"--cluster {text!r} is not legal; legal: ACCELERATOR:DEVICES, 1 to {_MOST_DEVICES:,} devices"]
        )
    return accelerator(name), int(count)


_MOST_DEVICES = 1_000_000


def _options(only: list[str]) -> Any:
    from dataclasses import fields

    from hybridpar.plan.space import Options

    legal = {one.name: getattr(Options(), one.name) for one in fields(Options)}
    given: dict[str, Any] = {}
    for text in only:
        key, separator, values = text.partition("=")
        if not separator or key not in legal:
            raise SpecError([f"--only {text!r} is not legal; legal: KEY=V1,V2 with a key of {', '.join(legal)}"])
        numbers = key in ("tp", "pp", "cp", "ep", "micro_batch", "zero", "virtual")
        given[key] = tuple(_value(text, one, key == "sp", numbers) for one in values.split(","))
    return Options(**given)


def _value(text: str, value: str, is_switch: bool, is_number: bool) -> Any:
    if is_switch:
        if value not in ("true", "false"):
            raise SpecError([f"--only {text!r}: {value!r} is not legal; legal: true, false"])
        return value == "true"
    if is_number and not value.isdigit():
        raise SpecError([f"--only {text!r}: {value!r} is no whole number"])
    return int(value) if is_number else value


def _must_train(run: RunSpec) -> None:
    if run.workload.phase != "train":
        raise SpecError([f"workload.phase={run.workload.phase} cannot be planned yet; legal: train"])


def _must_be_legal(run: RunSpec) -> None:
    """As a strategy: what only this machine's engines lack (a precision, nodes) does not matter to a prediction."""
    from hybridpar.legality import violations

    here = ("workload.precision", "cluster.nodes", "cluster.devices_per_node")
    found = [str(one) for one in violations(run, on_text=False) if one.field not in here]
    if found:
        fail(found, 3)
