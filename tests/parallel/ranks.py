"""Forked ranks that meet on a rank grid, for tests that look at what one rank does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hybridpar import parity_layouts
from hybridpar.comm.process_group import ProcessMesh, start, stop
from hybridpar.launch.forked import fork_ranks, values
from hybridpar.specs import RunSpec, Strategy


def parity_run(family: str, **strategy: Any) -> RunSpec:
    """The small model of a family under a strategy, in float64."""
    return parity_layouts.parity_run(family, strategy)


def on_ranks(strategy: Strategy, folder: Path, body: Callable[[ProcessMesh], Any]) -> list[Any]:
    """What `body` returns on each rank of the strategy's grid."""

    def rank(index: int) -> Any:
        torch.set_num_threads(1)
        start(index, strategy.devices, folder / "store", "cpu", 60.0)
        found = body(ProcessMesh.build(strategy))
        stop()
        return found

    return values(fork_ranks(strategy.devices, rank, deadline_s=90.0, log_dir=folder))


def batch_of(run: RunSpec, dp_rank: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens and targets of one replica, (B/dp, S) each."""
    generator = torch.Generator().manual_seed(seed)
    shape = (run.workload.global_batch, run.workload.seq_len + 1)
    tokens = torch.randint(0, run.model.vocab, shape, generator=generator)
    mine = tokens.chunk(run.strategy.dp)[dp_rank]
    return mine[:, :-1].contiguous(), mine[:, 1:].contiguous()
