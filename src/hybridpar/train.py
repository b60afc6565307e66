"""One RunSpec on one rank: build the engine, take the steps, tell what happened.

A step is timed from the call of the engine to its return, on CUDA with the device drained at both ends; no barrier is
added, so a rank that waits for others shows it. Memory is accounted on the first warm-up step alone, because looking
at every saved tensor slows a step down.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hybridpar.checkpoints import PastStep, latest, past_of
from hybridpar.comm.metered import meter
from hybridpar.events import Emit
from hybridpar.measure.memory import MemoryAccountant
from hybridpar.models.lm import LanguageModel
from hybridpar.parallel.apply import build_engine
from hybridpar.parallel.engine import Engine, Resumable, StepResult

if TYPE_CHECKING:
    from hybridpar.comm.process_group import ProcessMesh
    from hybridpar.corpus import Corpus
    from hybridpar.specs import ModelSpec, RunSpec


class NonFiniteError(ArithmeticError):
    """Training diverged: loss or gradient norm is no finite number."""


def train(run: RunSpec, mesh: ProcessMesh, corpus: Corpus, emit: Emit, checkpoints: Path) -> None:
    """Train `run.workload.steps` optimizer steps as this rank of `mesh`, and emit phases, memory, steps and comm.

    A checkpoint in the folder `checkpoints`, from an earlier try of this run, is taken up: the steps behind it are told
    again, as warm-up, and at least the last step is timed.

    Raises:
        NonFiniteError: naming the step at which loss or gradient norm stopped being a number.
        CheckpointError: what the run should start from does not fit it.
    """
    emit("phase", name="build")
    engine = build_engine(run, mesh)
    first, past = _take_up(run, engine, checkpoints)
    meter().drain()  # what building sent is no step's
    if mesh.rank == 0:
        emit("model", parameters=parameter_count(run.model))
    for earlier in past:
        emit("step", **asdict(earlier), warmup=True)
    last = first - len(past) + run.workload.steps
    timed_from = min(first + run.workload.warmup_steps, last - 1)
    for step in range(first, last):
        warmup = step < timed_from
        if step in (first, timed_from):
            emit("phase", name="warmup" if warmup else "train")
        tokens, targets = replica_batch(run, mesh, corpus, step)
        if warmup and step == first:
            result, seconds = _accounted_step(engine, tokens, targets, mesh.device, emit)
        else:
            result, seconds = _timed_step(engine, tokens, targets, mesh.device)
        rows = meter().drain()
        _check_finite(step, result)
        emit("step", step=step, loss=result.loss, grad_norm=result.grad_norm, seconds=seconds, warmup=warmup)
        for row in () if warmup else rows:
            emit("comm", step=step, **asdict(row))
        past.append(PastStep(step, result.loss, result.grad_norm, seconds))
        _keep(run, engine, checkpoints, step + 1, past, emit)


def _take_up(run: RunSpec, engine: Engine, checkpoints: Path) -> tuple[int, list[PastStep]]:
    """Load where the run goes on; the number of steps behind it, and those that an earlier try of this run took."""
    own, given = latest(checkpoints), run.workload.start_from
    past = past_of(own) if own else []
    if own is None or len(past) >= run.workload.steps:  # a run with nothing left to do has nothing to time
        past = []
        source = Path(given) if given else None
    else:
        source = own
    if source is None:
        return 0, past
    assert isinstance(engine, Resumable)  # legality saw to it
    return engine.load(source), past


def _keep(run: RunSpec, engine: Engine, checkpoints: Path, step: int, past: Sequence[PastStep], emit: Emit) -> None:
    """Write a checkpoint if it is time for one."""
    every = run.workload.checkpoint_every
    if not every or step % every:
        return
    assert isinstance(engine, Resumable)
    start = time.perf_counter()
    engine.save(checkpoints, step, past)
    emit("checkpoint", step=step, seconds=time.perf_counter() - start)


def parameter_count(model: ModelSpec) -> int:
    """Parameters of the whole model, on however many devices it lies."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in LanguageModel(model).parameters())


def replica_batch(run: RunSpec, mesh: ProcessMesh, corpus: Corpus, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets, each (B/dp, S) int64: the rows of the global batch that this rank's replica trains on."""
    workload = run.workload
    batch = corpus.batch(step, workload.global_batch, workload.seq_len, run.seed)
    share = workload.global_batch // run.strategy.dp
    first = mesh.coordinate.dp * share
    tokens, targets = (torch.from_numpy(part[first : first + share]).to(mesh.device) for part in batch)
    return tokens, targets


def _timed_step(
    engine: Engine, tokens: torch.Tensor, targets: torch.Tensor, device: torch.device
) -> tuple[StepResult, float]:
    drain(device)
    start = time.perf_counter()
    result = engine.step(tokens, targets)
    drain(device)
    return result, time.perf_counter() - start


def _accounted_step(
    engine: Engine, tokens: torch.Tensor, targets: torch.Tensor, device: torch.device, emit: Emit
) -> tuple[StepResult, float]:
    accountant = MemoryAccountant(engine.parts)
    with accountant:
        result, seconds = _timed_step(engine, tokens, targets, device)
    emit("memory", **asdict(accountant.peak()))
    return result, seconds


def drain(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _check_finite(step: int, result: StepResult) -> None:
    for name, value in (("loss", result.loss), ("grad_norm", result.grad_norm)):
        if not math.isfinite(value):
            raise NonFiniteError(f"{name} is {value} at step {step}")
