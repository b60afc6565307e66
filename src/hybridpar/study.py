"""A study as data: `data/studies/*.yaml` -> the runs to make, each once. No torch here.

    name: smoke
    defaults: {workload: {...}, cluster: {...}}     # for every run
    sweeps:
      - name: single                                # which question the runs answer
        models: [llama-toy, {preset: mamba2-toy, layers: 2}]
        workload: {...}                             # over the defaults
        workloads: [{seq_len: 64}, {seq_len: 256}]  # each of them over that, if given
        strategies: [{dp: 2}, {tp: 2, sp: true}]    # as written
        factorisations:                             # and every product of degrees, legal or not
          - {devices: [4, 8], axes: [dp, tp, pp], strategy: {zero: 1}}
        repeats: 3
    theory: {layouts: 4, random: 1, measured: 2}    # how many runs of a family are compared with closed forms

What is illegal stays in the study and becomes a row with outcome `infeasible`. A run that several sweeps name is made
once. Runs are ordered by repeat first, so that the repeats of one cell lie apart in time and a drift of the machine
falls on all cells alike.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hybridpar.specs import RunSpec, SpecError, parse_run_spec, read_yaml, sentences

# Runs that one launcher makes before the workflow looks up; an interrupt loses only the current run in any case.
LARGEST_BATCH = 24

Degree = Annotated[int, Field(ge=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Factorisation(_Strict):
    """Every way to write each number of devices as an ordered product of the axes' degrees."""

    devices: list[Degree] = Field(description="numbers of devices", min_length=1)
    axes: list[Literal["dp", "tp", "pp", "cp"]] = Field(description="axes to split over", min_length=1)
    strategy: dict[str, Any] = Field(default={}, description="options that all of them share")

    @model_validator(mode="after")
    def _check(self) -> Factorisation:
        twice = sorted({axis for axis in self.axes if self.axes.count(axis) > 1})
        if twice:
            raise SpecError([f"factorisations: axes={self.axes} names {', '.join(twice)} twice; name each axis once"])
        fixed = [axis for axis in self.axes if axis in self.strategy]
        if fixed:
            raise SpecError([f"factorisations: strategy sets {', '.join(fixed)}, which axes={self.axes} varies"])
        return self


class Sweep(_Strict):
    """Models x workloads x strategies x repeats."""

    name: str = Field(description="label of the sweep", min_length=1)
    models: list[str | dict[str, Any]] = Field(description="presets, or model fields", min_length=1)
    workload: dict[str, Any] = Field(default={}, description="workload fields, over the defaults")
    workloads: list[dict[str, Any]] = Field(default=[{}], description="each over workload", min_length=1)
    cluster: dict[str, Any] = Field(default={}, description="cluster fields, over the defaults")
    strategies: list[dict[str, Any]] = Field(default=[], description="strategies as written")
    factorisations: list[Factorisation] = Field(default=[], description="generated strategies")
    repeats: Degree = Field(1, description="how often each run is made")
    seed: Annotated[int, Field(ge=0)] = Field(0, description="seed of parameters and data")

    @model_validator(mode="after")
    def _check(self) -> Sweep:
        if not self.strategies and not self.factorisations:
            raise SpecError([f"sweep {self.name} has no run: give it strategies, factorisations or both"])
        return self


class Defaults(_Strict):
    """What holds for every run unless its sweep says otherwise."""

    workload: dict[str, Any] = Field(default={}, description="workload fields")
    cluster: dict[str, Any] = Field(default={}, description="cluster fields")


class Theory(_Strict):
    """How much of `hybridpar check-theory` the study runs: small models of each family."""

    layouts: Annotated[int, Field(ge=0)] = Field(4, description="layouts of a family to trace, evenly spaced")
    random: Annotated[int, Field(ge=0)] = Field(1, description="random runs of a family to trace, too")
    measured: Annotated[int, Field(ge=0)] = Field(2, description="layouts of a family to run in real ranks, too")


class StudyFile(_Strict):
    """The file as written."""

    name: str = Field(description="name of the study, a folder name", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    defaults: Defaults = Field(default=Defaults(), description="fields for every run")
    sweeps: list[Sweep] = Field(description="the runs", min_length=1)
    theory: Theory = Field(default=Theory(), description="what closed forms are compared with")

    @model_validator(mode="after")
    def _check(self) -> StudyFile:
        names = [sweep.name for sweep in self.sweeps]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise SpecError([f"sweep {name} is there twice; give each sweep its own name" for name in twice])
        return self


@dataclass(frozen=True)
class Cell:
    """One run and the sweeps that name it."""

    run: RunSpec
    sweeps: tuple[str, ...]


@dataclass(frozen=True)
class Study:
    """All runs of a study, each once, in the order in which they are made."""

    name: str
    cells: tuple[Cell, ...]
    theory: Theory

    @property
    def runs(self) -> tuple[RunSpec, ...]:
        """The runs alone."""
        return tuple(cell.run for cell in self.cells)


def load_study(path: Path) -> Study:
    """Read and expand a study file.

    Raises:
        SpecError: one sentence per fault, in the file itself or in a run it describes.
    """
    content = read_yaml(path)
    if not isinstance(content, Mapping):
        raise SpecError([f"{path} holds {content!r}; a study is a mapping with the keys name, defaults, sweeps"])
    try:
        study = StudyFile.model_validate(content)
    except ValidationError as error:
        raise SpecError([f"{path}: {fault}" for fault in sentences(error, StudyFile)]) from None
    return _expand(path, study)


def _expand(path: Path, study: StudyFile) -> Study:
    sweeps_of: dict[RunSpec, list[str]] = {}
    faults: list[str] = []
    for sweep in study.sweeps:
        for content in _contents(study, sweep):
            try:
                sweeps_of.setdefault(parse_run_spec(content), []).append(sweep.name)
            except SpecError as error:
                faults += [f"{path}: sweep {sweep.name}: {fault}" for fault in error.faults]
    if faults:
        raise SpecError(list(dict.fromkeys(faults)))
    cells = [Cell(run, tuple(dict.fromkeys(names))) for run, names in sweeps_of.items()]
    return Study(study.name, tuple(sorted(cells, key=lambda cell: cell.run.repeat)), study.theory)


def _contents(study: StudyFile, sweep: Sweep) -> Iterator[dict[str, Any]]:
    for repeat in range(sweep.repeats):
        for model in sweep.models:
            for workload, strategy in itertools.product(sweep.workloads, _strategies(sweep)):
                yield {
                    "model": {"preset": model} if isinstance(model, str) else model,
                    "workload": {**study.defaults.workload, **sweep.workload, **workload},
                    "strategy": strategy,
                    "cluster": {**study.defaults.cluster, **sweep.cluster},
                    "seed": sweep.seed,
                    "repeat": repeat,
                }


def _strategies(sweep: Sweep) -> Iterator[dict[str, Any]]:
    yield from sweep.strategies
    for factorisation in sweep.factorisations:
        for devices in factorisation.devices:
            for degrees in factorise(devices, len(factorisation.axes)):
                yield {**factorisation.strategy, **dict(zip(factorisation.axes, degrees, strict=True))}


def factorise(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ordered ways to write `number` as a product of `parts` factors."""
    if parts == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            yield from ((first, *rest) for rest in factorise(number // first, parts - 1))


@dataclass(frozen=True)
class Batch:
    """Runs of one engine on one number of ranks, which one launcher makes one after the other from one warm parent."""

    name: str
    runs: tuple[RunSpec, ...]

    @property
    def digest(self) -> str:
        """A hash of all that the runs are; a workflow that keys on it sees every change of content, and no other."""
        return digest(self.runs)


def digest(runs: Iterable[RunSpec]) -> str:
    """Sixteen hex digits for the whole specs of `runs`, in their order."""
    return hashlib.sha256("\n".join(run.canonical_json() for run in runs).encode()).hexdigest()[:16]


def batches(study: Study, largest: int = LARGEST_BATCH) -> tuple[Batch, ...]:
    """Group the runs by engine (DeepSpeed's import is paid only where it is used) and number of ranks (which a queue
    must know to give a batch its devices), at most `largest` a batch, in the order of the study.

    A changed run changes the digest of its batch alone; the batch's other runs are found finished and not made again.
    """
    grouped: dict[tuple[str, int], list[RunSpec]] = {}
    for run in study.runs:
        grouped.setdefault((run.strategy.engine, run.strategy.devices), []).append(run)
    return tuple(
        Batch(f"{engine}-{devices}-{number:03d}", tuple(runs[start : start + largest]))
        for (engine, devices), runs in grouped.items()
        for number, start in enumerate(range(0, len(runs), largest))
    )
