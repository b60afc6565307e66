"""Starting and leaving the world of ranks, and the groups of the rank grid."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hybridpar.comm import metered
from hybridpar.mesh import AXES, Axis, Coordinate, RankGrid
from hybridpar.specs import Strategy

# Ranks of one machine need no look-up of its name, which may lead nowhere.
_LOOPBACK = ("GLOO_SOCKET_IFNAME", "lo")


def start(rank: int, world: int, store_path: Path, device: str, deadline_s: float) -> None:
    """Join the world of `world` ranks that meet in the file `store_path`.

    Args:
        rank: this process.
        world: number of ranks.
        store_path: a file that does not exist yet, in a folder all ranks see.
        device: "cpu" (gloo) or "cuda" (NCCL).
        deadline_s: seconds after which a collective that a peer never joins fails instead of hanging.
    """
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    else:
        os.environ.setdefault(*_LOOPBACK)
    dist.init_process_group(
        _backend(device),
        store=FileStore(str(store_path), world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=deadline_s),
    )


def start_from_environment(device: str, deadline_s: float) -> None:
    """Join the world that torchrun describes in RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        os.environ.setdefault(*_LOOPBACK)
    dist.init_process_group(_backend(device), timeout=timedelta(seconds=deadline_s))


def start_alone(rank: int, world: int) -> None:
    """Be one rank of a world in which nobody else exists: collectives return at once, with whatever was there."""
    metered.register()
    metered.meter().place(None)
    dist.init_process_group(metered.FAKE, store=HashStore(), rank=rank, world_size=world)


def _backend(device: str) -> str:
    metered.register()
    metered.meter().place(None)  # a process that was in another world brings none of it
    return metered.NCCL if device == "cuda" else metered.GLOO


def stop() -> None:
    """Wait for all ranks, then leave: a rank that leaves early hangs its peers.

    A rank that is done has no complaint to make about peers that died: whoever started them sees their ends.
    """
    with contextlib.suppress(RuntimeError):
        dist.barrier()
    dist.destroy_process_group()


@dataclass(frozen=True)
class ProcessMesh:
    """The rank grid with a process group for each axis, and the same as torch's DeviceMesh."""

    grid: RankGrid
    rank: int
    device: torch.device
    device_mesh: DeviceMesh
    _joint_groups: Mapping[tuple[Axis, ...], dist.ProcessGroup]

    @classmethod
    def build(cls, strategy: Strategy) -> ProcessMesh:
        """Collective: every rank of the world calls it.

        Raises:
            ValueError: the strategy's devices are not the ranks that were started.
        """
        grid = RankGrid.of(strategy)
        if grid.size != dist.get_world_size():
            raise ValueError(
                f"the strategy {strategy.label} asks for {grid.size} devices; {dist.get_world_size()} ranks started"
            )
        kind = "cuda" if dist.get_backend() == metered.NCCL else "cpu"
        device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")
        device_mesh = init_device_mesh(kind, grid.shape, mesh_dim_names=AXES)
        metered.meter().place(grid)
        return cls(grid, dist.get_rank(), device, device_mesh, _joint_groups(grid, dist.get_rank()))

    @property
    def coordinate(self) -> Coordinate:
        """Where this rank stands."""
        return self.grid.coordinate(self.rank)

    def group(self, *axes: Axis) -> dist.ProcessGroup:
        """This rank's group along one axis, or along several together; local, whatever other ranks do."""
        wide = _wide(self.grid, axes)
        if len(wide) > 1:
            return self._joint_groups[wide]
        return self.device_mesh.get_group(wide[0] if wide else axes[0])

    def new_group(self, partition: Sequence[tuple[int, ...]]) -> dist.ProcessGroup:
        """This rank's group of a partition of all ranks that no axis names. Collective, in one order on all ranks."""
        made = {ranks: dist.new_group(list(ranks)) for ranks in partition}
        return next(group for ranks, group in made.items() if self.rank in ranks)


def _wide(grid: RankGrid, axes: Iterable[Axis]) -> tuple[Axis, ...]:
    """Those of the axes that divide anything, in the order of AXES."""
    asked = set(axes)
    return tuple(axis for axis in AXES if axis in asked and getattr(grid, axis) > 1)


def _joint_groups(grid: RankGrid, rank: int) -> dict[tuple[Axis, ...], dist.ProcessGroup]:
    """A group for every two or more wide axes. All ranks make all groups in one order, as torch demands."""
    wide = _wide(grid, AXES)
    joint: dict[tuple[Axis, ...], dist.ProcessGroup] = {}
    for count in range(2, len(wide)):
        for axes in itertools.combinations(wide, count):
            made = {ranks: dist.new_group(list(ranks)) for ranks in grid.groups(*axes)}
            joint[axes] = made[grid.group_of(rank, *axes)]
    if len(wide) > 1:
        joint[wide] = dist.distributed_c10d._get_default_group()
    return joint
