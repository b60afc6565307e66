"""A world of forked ranks for one test."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hybridpar.comm import process_group
from hybridpar.launch.forked import fork_ranks, values
from hybridpar.specs import Strategy

DEADLINE_S = 60.0


def in_world(strategy: Strategy, body: Callable[[process_group.ProcessMesh], Any]) -> list[Any]:
    """What `body` returns on each rank of the strategy's mesh."""

    def rank_body(rank: int, store: Path) -> Any:
        torch.set_num_threads(1)
        process_group.start(rank, strategy.devices, store, "cpu", DEADLINE_S)
        value = body(process_group.ProcessMesh.build(strategy))
        process_group.stop()
        return value

    with tempfile.TemporaryDirectory(prefix="hybridpar-world-") as folder:
        store = Path(folder) / "store"
        exits = fork_ranks(
            strategy.devices,
            lambda rank: rank_body(rank, store),
            deadline_s=DEADLINE_S,
            log_dir=Path(folder) / "logs",
        )
    return values(exits)
