"""One inference RunSpec on one rank: prompts of real text are filled in, tokens decoded, times told.

phase prefill   every step fills fresh caches; its time is the time to the first token (TTFT)
phase decode    one prefill (its time is told too), then every step decodes one token a sequence (time per output token)

A step is timed on each rank from its first to its last operation; what is slowest is the run's. Sequences of a replica
are served together, in groups of workload.micro_batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch

from hybridpar.comm.metered import meter
from hybridpar.events import Emit
from hybridpar.measure.memory import HeldBytes, storage_bytes
from hybridpar.parallel.apply import build_generator
from hybridpar.parallel.generation import Generator
from hybridpar.train import drain, parameter_count, replica_batch

if TYPE_CHECKING:
    from hybridpar.comm.process_group import ProcessMesh
    from hybridpar.corpus import Corpus
    from hybridpar.specs import RunSpec


def infer(run: RunSpec, mesh: ProcessMesh, corpus: Corpus, emit: Emit) -> None:
    """Serve `run` as this rank of `mesh`, and emit phases, memory, steps and comm."""
    emit("phase", name="build")
    generator = build_generator(run, mesh)
    meter().drain()  # what building sent is no step's
    if mesh.rank == 0:
        emit("model", parameters=parameter_count(run.model))
    if run.workload.phase == "prefill":
        _prefill_steps(run, mesh, corpus, emit, generator)
    else:
        _decode_steps(run, mesh, corpus, emit, generator)
    emit("memory", **asdict(_held(generator)))


def _prefill_steps(run: RunSpec, mesh: ProcessMesh, corpus: Corpus, emit: Emit, generator: Generator) -> None:
    for step in range(run.workload.steps):
        prompts, _ = replica_batch(run, mesh, corpus, step)

        def fill(prompts: torch.Tensor = prompts) -> None:
            generator.prefill(prompts)
            generator.wait()

        _step(run, mesh, emit, step, fill)


def _decode_steps(run: RunSpec, mesh: ProcessMesh, corpus: Corpus, emit: Emit, generator: Generator) -> None:
    prompts, _ = replica_batch(run, mesh, corpus, 0)

    def fill() -> None:
        generator.prefill(prompts)
        generator.wait()

    _seconds(mesh, fill)  # warms up
    seconds = _seconds(mesh, fill)
    meter().drain()
    emit("prefill", seconds=seconds)
    for step in range(run.workload.steps):
        _step(run, mesh, emit, step, generator.decode)
    generator.wait()


def _step(run: RunSpec, mesh: ProcessMesh, emit: Emit, step: int, work: Callable[[], object]) -> None:
    warmup = step < run.workload.warmup_steps
    if step in (0, run.workload.warmup_steps):
        emit("phase", name="warmup" if warmup else run.workload.phase)
    seconds = _seconds(mesh, work)
    rows = meter().drain()
    emit("step", step=step, loss=None, grad_norm=None, seconds=seconds, warmup=warmup)
    for row in () if warmup else rows:
        emit("comm", step=step, **asdict(row))


def _seconds(mesh: ProcessMesh, work: Callable[[], object]) -> float:
    drain(mesh.device)
    start = time.perf_counter()
    work()
    drain(mesh.device)
    return time.perf_counter() - start


def _held(generator: Generator) -> HeldBytes:
    """Nothing is saved for a backward pass; what lives only within an operator is not seen."""
    return HeldBytes(
        parameters=storage_bytes(generator.parameter_tensors()),
        gradients=0,
        optimizer=0,
        activations=0,
        buffers=0,
        host=0,
        cache=storage_bytes(generator.cache_tensors()),
    )
