"""What the metered process group costs: its time on top of the backend's own, a call and as a share of a step.

The same small all-reduce goes through the metered group and through plain gloo (NCCL) over the same ranks, in turns, so
that whatever else the machine does meets both; and a step of a run tells how many calls it makes and how long it takes.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybridpar.comm.metered import meter
from hybridpar.comm.process_group import ProcessMesh, start, stop
from hybridpar.launch.forked import fork_ranks, values
from hybridpar.parallel.apply import build_engine
from hybridpar.specs import RunSpec

_DEADLINE_S = 300.0
_CALLS = 40  # in a row; a difference of single calls would drown in noise
_STEPS = 5


@dataclass(frozen=True)
class MeterOverhead:
    """`seconds_a_call` is the median over rounds of metered minus plain; `low` and `high` its quartiles. `share` is
    that of `calls` calls in a step of `step_seconds`. All of the slowest rank."""

    run_id: str
    model: str
    layout: str
    calls: int
    step_seconds: float
    plain_seconds_a_call: float
    seconds_a_call: float
    low: float
    high: float
    tier: str = "measured"

    @property
    def share(self) -> float:
        """Of the step."""
        return self.calls * self.seconds_a_call / self.step_seconds

    def row(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "share": self.share}


def meter_overhead(run: RunSpec, rounds: int, device: str = "cpu") -> MeterOverhead:
    """Measure it in forked ranks.

    Args:
        run: a legal training run of the torch engine on two or more devices.
        rounds: turns of both groups, at least 4.
        device: "cpu" (gloo) or "cuda" (NCCL).

    Raises:
        ValueError: one device, or too few rounds.
        RuntimeError: a rank failed.
    """
    if run.strategy.devices < 2:
        raise ValueError("a run on 1 device sends nothing; legal: a strategy of 2 or more devices")
    if rounds < 4:
        raise ValueError(f"rounds={rounds} is not legal; it must be at least 4")
    with tempfile.TemporaryDirectory(prefix="hybridpar-meter-") as folder:
        exits = fork_ranks(
            run.strategy.devices,
            lambda rank: _rank(run, rank, rounds, Path(folder) / "store", device),
            deadline_s=_DEADLINE_S,
            log_dir=Path(folder) / "logs",
        )
        return max(values(exits), key=lambda seen: seen.share)


def _rank(run: RunSpec, rank: int, rounds: int, store: Path, device: str) -> MeterOverhead:
    torch.set_num_threads(1)
    start(rank, run.strategy.devices, store, device, _DEADLINE_S)
    mesh = ProcessMesh.build(run.strategy)
    step_seconds, calls = _a_step(run, mesh)
    differences, plain = _differences(mesh, rounds, "nccl" if device == "cuda" else "gloo")
    stop()
    low, middle, high = statistics.quantiles(differences, n=4)
    return MeterOverhead(
        run.run_id, run.model.name, run.strategy.label, calls, step_seconds, statistics.median(plain), middle, low, high
    )


def _a_step(run: RunSpec, mesh: ProcessMesh) -> tuple[float, int]:
    """Median seconds of a step on random tokens, and the calls that it makes."""
    engine = build_engine(run, mesh)
    shape = (run.workload.global_batch // run.strategy.dp, run.workload.seq_len + 1)
    tokens = torch.randint(0, run.model.vocab, shape, generator=torch.Generator().manual_seed(mesh.coordinate.dp))
    inputs, targets = tokens[:, :-1].contiguous().to(mesh.device), tokens[:, 1:].contiguous().to(mesh.device)
    for _ in range(2):  # DDP lays its buckets out anew in the second
        engine.step(inputs, targets)
    seconds = []
    for _ in range(_STEPS):
        meter().drain()
        seconds.append(_seconds(lambda: engine.step(inputs, targets), mesh.device))
    return statistics.median(seconds), sum(row.calls for row in meter().drain())


def _differences(mesh: ProcessMesh, rounds: int, backend: str) -> tuple[list[float], list[float]]:
    """Seconds a call of metered minus plain, and of plain, in each round."""
    plain_group, number = dist.new_group(backend=backend), torch.ones(1, device=mesh.device)

    def calls(group: dist.ProcessGroup | None) -> float:
        def several() -> None:
            for _ in range(_CALLS):
                dist.all_reduce(number.fill_(1), group=group)

        dist.barrier()
        return _seconds(several, mesh.device) / _CALLS

    calls(plain_group), calls(None)
    differences, plain = [], []
    for turn in range(rounds):  # who goes first changes
        first, second = (calls(None), calls(plain_group)) if turn % 2 else (calls(plain_group), calls(None))
        metered, own = (first, second) if turn % 2 else (second, first)
        differences.append(metered - own)
        plain.append(own)
    return differences, plain


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    start_time = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start_time
