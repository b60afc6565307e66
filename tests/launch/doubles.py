"""Engines that behave or misbehave on purpose; they stand in for `train.build_engine` before ranks are forked."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from hybridpar.comm.process_group import ProcessMesh
from hybridpar.parallel.engine import Parts, StepResult
from hybridpar.specs import RunSpec, parse_run_spec

Fault = Callable[[int, int], None]
LARGEST_LOSS = 5.5


def toy_run(data: Path, *, dp: int = 2, steps: int = 3, deadline_s: float = 60.0, seed: int = 0) -> RunSpec:
    """A legal run of a toy model on a local text."""
    return parse_run_spec(
        {
            "model": {"preset": "llama-toy"},
            "workload": {"seq_len": 16, "global_batch": 8, "steps": steps, "data": str(data)},
            "strategy": {"dp": dp},
            "cluster": {"deadline_s": deadline_s, "device": "cpu"},
            "seed": seed,
        }
    )


class ToyEngine:
    """Sums a number over all ranks in each step, after whatever `fault(rank, step)` does."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault
        self._step = 0
        self._weight = torch.ones(8)

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> StepResult:
        self._fault(dist.get_rank(), self._step)
        total = torch.ones(())
        dist.all_reduce(total)
        self._step += 1
        return StepResult(loss=LARGEST_LOSS / self._step, grad_norm=float(total))

    def parts(self) -> Parts:
        return Parts(parameters=[self._weight], gradients=[], optimizer=[], buffers=[])


def engine_with(fault: Fault) -> Callable[[RunSpec, ProcessMesh], ToyEngine]:
    """A `build_engine` whose engine has the fault."""
    return lambda run, mesh: ToyEngine(fault)


def sound(rank: int, step: int) -> None:
    """No fault."""


def raises(rank: int, step: int) -> None:
    """Rank 1 raises at step 1."""
    if (rank, step) == (1, 1):
        raise ValueError("the weights went for a walk")


def killed(rank: int, step: int) -> None:
    """Rank 1 is killed at step 1, as by `kill -9`."""
    if (rank, step) == (1, 1):
        os.kill(os.getpid(), signal.SIGKILL)


def hangs(rank: int, step: int) -> None:
    """Rank 1 never comes back from step 1."""
    if (rank, step) == (1, 1):
        time.sleep(600)


def out_of_memory(rank: int, step: int) -> None:
    """Rank 1 asks the allocator for more than any machine has."""
    if (rank, step) == (1, 1):
        torch.empty(1 << 60, dtype=torch.uint8)
