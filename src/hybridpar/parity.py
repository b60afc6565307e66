"""Sharded equals dense: a layout's losses, gradients and parameters against one device.

A layout trains the same model on the same batches as one device does; then every number that a user could see is
compared. The relative deviation of a tensor is max|a - b| / max(|b|max, s), where s is `_FLOOR` times the largest
magnitude among all tensors of its kind: below that, differences are rounding of sums that cancel.
The calling process forks the ranks, so it computes no tensor itself.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hybridpar.launch.forked import fork_ranks, preload, values
from hybridpar.legality import infeasible_reason
from hybridpar.specs import RunSpec, Strategy, WorkloadSpec

_FLOOR = 1e-3
_DEADLINE_S = 60.0
_RUNS_PER_WORLD = 6  # each keeps groups and their threads until the world ends

# Largest relative deviation allowed. Orders of summation differ between layouts, so rounding (2e-16, 6e-8, 4e-3) is
# amplified by sums over tokens. bf16 has 8 bits: its limits only catch gross faults.
TOLERANCES: Mapping[str, Mapping[str, float]] = {
    "fp64": {"loss": 1e-9, "grad_norm": 1e-9, "gradient": 1e-9, "parameter": 1e-9},
    "fp32": {"loss": 1e-5, "grad_norm": 1e-5, "gradient": 1e-5, "parameter": 1e-5},
    "bf16": {"loss": 2e-2, "grad_norm": 5e-2, "gradient": 2e-1, "parameter": 5e-2},
}

# AdamW divides a gradient by its own size, so one that nearly cancels moves its parameter by a full step whichever way
# rounding turned it: deviations grow about 5000-fold (seen in fp64: 2e-16 to 1e-12), and with them what is computed
# from those parameters. In short formats such a check is blunt; the layouts below therefore use SGD there.
_AFTER_ADAMW: Mapping[str, Mapping[str, float]] = {
    "fp32": {"grad_norm": 1e-4, "gradient": 3e-3, "parameter": 3e-3},
    "bf16": {"gradient": 1.0, "parameter": 1.0},
}


def tolerances(workload: WorkloadSpec) -> Mapping[str, float]:
    """Largest relative deviation allowed, by kind."""
    sharp = TOLERANCES[workload.precision]
    return sharp if workload.optimizer == "sgd" else {**sharp, **_AFTER_ADAMW.get(workload.precision, {})}


@dataclass(frozen=True)
class Trajectory:
    """What a layout did: one loss and norm a step, gradients of the last step, parameters after it, by dense name."""

    loss: tuple[float, ...]
    grad_norm: tuple[float, ...]
    gradients: dict[str, np.ndarray]
    parameters: dict[str, np.ndarray]


@dataclass(frozen=True)
class ParityReport:
    """One layout against one device. `refused` is the reason of an illegal layout, `failed` that of a broken run."""

    run: RunSpec
    deviations: Mapping[str, float]
    worst: Mapping[str, str]
    refused: str | None = None
    failed: str | None = None

    @property
    def equal(self) -> bool:
        """Every deviation is within the tolerance of the run's precision and optimizer."""
        limits = tolerances(self.run.workload)
        return bool(self.deviations) and all(self.deviations[kind] <= limit for kind, limit in limits.items())

    @property
    def verdict(self) -> str:
        """equal, differs, refused or failed."""
        if self.refused:
            return "refused"
        if self.failed:
            return "failed"
        return "equal" if self.equal else "differs"

    def row(self) -> dict[str, Any]:
        """Plain data for a table."""
        return {
            "family": self.run.model.family,
            "model": self.run.model.name,
            "layout": self.run.strategy.label,
            "devices": self.run.strategy.devices,
            "precision": self.run.workload.precision,
            "verdict": self.verdict,
            **{kind: self.deviations.get(kind) for kind in TOLERANCES["fp64"]},
            "worst_gradient": self.worst.get("gradient"),
            "worst_parameter": self.worst.get("parameter"),
            "reason": self.refused or self.failed,
        }


class Parity:
    """Compares layouts with one device, whose trajectory is computed once per model, workload and seed."""

    def __init__(self) -> None:
        self._dense: dict[RunSpec, Trajectory] = {}

    def compare(self, run: RunSpec) -> ParityReport:
        """Run one layout in forked ranks and compare it."""
        refused = infeasible_reason(run, on_text=False)
        if refused:
            return ParityReport(run, {}, {}, refused=refused)
        try:
            return _report(run, trajectories([run])[0], self._one_device(run))
        except RuntimeError as error:
            return ParityReport(run, {}, {}, failed=str(error))

    def sweep(self, runs: Iterable[RunSpec]) -> Iterator[ParityReport]:
        """Compare many, in the order given. Neighbours on as many devices share a world of ranks, which saves most of
        the time; where one of them fails, each is run alone, so that a failure is its own."""
        for together in _batched(runs):
            yield from self._together(together)

    def _together(self, runs: Sequence[RunSpec]) -> list[ParityReport]:
        if len(runs) > 1:
            with contextlib.suppress(RuntimeError):
                pairs = zip(runs, trajectories(runs), strict=True)
                return [_report(run, sharded, self._one_device(run)) for run, sharded in pairs]
        return [self.compare(run) for run in runs]

    def _one_device(self, run: RunSpec) -> Trajectory:
        dense = run.model_copy(update={"strategy": Strategy()})
        if dense not in self._dense:
            self._dense[dense] = trajectories([dense])[0]
        return self._dense[dense]


def _batched(runs: Iterable[RunSpec]) -> Iterator[list[RunSpec]]:
    """Runs that may share a world. DeepSpeed keeps state of its own per process, so each of its runs has its own."""

    def world(run: RunSpec) -> object:
        alone = run.strategy.engine != "torch" or infeasible_reason(run, on_text=False)
        return object() if alone else run.strategy.devices

    for _, neighbours in itertools.groupby(runs, key=world):
        while batch := list(itertools.islice(neighbours, _RUNS_PER_WORLD)):
            yield batch


def trajectories(runs: Sequence[RunSpec]) -> list[Trajectory]:
    """Train each of `runs`, all on the same number of devices, in the same forked ranks, on random tokens that depend
    on its seed alone.

    Raises:
        RuntimeError: a rank failed; the message holds the end of its log.
    """
    preload(deepspeed=any(run.strategy.engine == "deepspeed" for run in runs))
    world = runs[0].strategy.devices
    folder = Path(tempfile.mkdtemp(prefix="hybridpar-parity-"))
    try:
        exits = fork_ranks(
            world, lambda rank: _rank(runs, rank, folder), deadline_s=_DEADLINE_S * len(runs), log_dir=folder
        )
        result: list[Trajectory] = values(exits)[0]
        return result
    finally:
        shutil.rmtree(folder)


def _rank(runs: Sequence[RunSpec], rank: int, folder: Path) -> list[Trajectory] | None:
    import torch

    from hybridpar.comm.process_group import start, stop

    torch.set_num_threads(runs[0].cluster.threads_per_rank)
    start(rank, runs[0].strategy.devices, folder / "store", "cpu", _DEADLINE_S)
    found = [_train(run) for run in runs]
    stop()
    return found if rank == 0 else None


def _train(run: RunSpec) -> Trajectory:
    import torch

    from hybridpar.comm.process_group import ProcessMesh
    from hybridpar.parallel.apply import build_engine

    mesh = ProcessMesh.build(run.strategy)
    engine = build_engine(run, mesh)
    engine.keep_gradients()
    share = run.workload.global_batch // run.strategy.dp
    mine = slice(mesh.coordinate.dp * share, (mesh.coordinate.dp + 1) * share)
    results = []
    for tokens in _batches(run):
        batch = torch.from_numpy(tokens[mine])
        results.append(engine.step(batch[:, :-1].contiguous(), batch[:, 1:].contiguous()))
    return Trajectory(
        tuple(result.loss for result in results),
        tuple(result.grad_norm for result in results),
        {name: tensor.double().numpy() for name, tensor in engine.dense_gradients().items()},
        {name: tensor.detach().double().numpy() for name, tensor in engine.dense_parameters().items()},
    )


def _batches(run: RunSpec) -> Iterator[np.ndarray]:
    generator = np.random.default_rng(run.seed)
    shape = (run.workload.global_batch, run.workload.seq_len + 1)
    for _ in range(run.workload.steps):
        yield generator.integers(0, run.model.vocab, shape)


def _report(run: RunSpec, sharded: Trajectory, dense: Trajectory) -> ParityReport:
    gradient, worst_gradient = _worst(sharded.gradients, dense.gradients)
    parameter, worst_parameter = _worst(sharded.parameters, dense.parameters)
    deviations = {
        "loss": _largest_relative(sharded.loss, dense.loss),
        "grad_norm": _largest_relative(sharded.grad_norm, dense.grad_norm),
        "gradient": gradient,
        "parameter": parameter,
    }
    return ParityReport(run, deviations, {"gradient": worst_gradient, "parameter": worst_parameter})


def _largest_relative(sharded: tuple[float, ...], dense: tuple[float, ...]) -> float:
    ours, theirs = np.array(sharded), np.array(dense)
    return float(np.max(np.abs(ours - theirs) / np.abs(theirs)))  # not a number where one of them is none


def _worst(sharded: Mapping[str, np.ndarray], dense: Mapping[str, np.ndarray]) -> tuple[float, str]:
    """The largest relative deviation and the name of its tensor; a missing or extra name, another shape, or a value
    that is no number is infinitely wrong."""
    strange = sorted(set(sharded) ^ set(dense))
    if strange:
        return float("inf"), strange[0]
    floor = _FLOOR * max(_largest(array) for array in dense.values())
    deviations = {name: _deviation(sharded[name], array, floor) for name, array in dense.items()}
    name = max(deviations, key=deviations.__getitem__)
    return deviations[name], name


def _deviation(sharded: np.ndarray, dense: np.ndarray, floor: float) -> float:
    if sharded.shape != dense.shape or not np.isfinite(sharded).all():
        return float("inf")
    return _largest(sharded - dense) / max(_largest(dense), floor)


def _largest(array: np.ndarray) -> float:
    return float(np.abs(array).max())
