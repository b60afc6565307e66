"""Whole parameters and gradients from any layout, by their names in the one-device model.

For parity checks and small models: everything ends on every rank, in main memory, by one collective of the world.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from hybridpar.comm.metered import meter
from hybridpar.comm.process_group import ProcessMesh
from hybridpar.mesh import Coordinate
from hybridpar.parallel.clip import local_tensor
from hybridpar.parallel.sharding import tensor_dim
from hybridpar.specs import RunSpec


def gather_dense(run: RunSpec, mesh: ProcessMesh, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Put together what each rank holds: dp shards (DTensor), tp slices, pp stages. Collective.

    Raises:
        RuntimeError: ranks that should hold the same tensor do not.
    """
    pieces: dict[str, dict[tuple[int, int], Tensor]] = defaultdict(dict)
    for coordinate, tensors in _from_all_ranks(mesh, held):
        for (name, sharded), tensor in tensors.items():
            tp = coordinate.tp if tensor_dim(name, run.model, run.strategy.tp) is not None else 0
            dp = coordinate.dp if sharded else 0
            _check_replica(name, tensor, pieces[name].setdefault((tp, dp), tensor))
    return {name: _joined(found, tensor_dim(name, run.model, run.strategy.tp)) for name, found in pieces.items()}


def _from_all_ranks(
    mesh: ProcessMesh, held: Mapping[str, Tensor]
) -> list[tuple[Coordinate, dict[tuple[str, bool], Tensor]]]:
    """Of each rank its place and its tensors, by name and whether dp shards them."""
    mine = {
        (name, isinstance(tensor, DTensor)): local_tensor(tensor.detach()).cpu().clone()
        for name, tensor in held.items()
    }
    received = [(mesh.coordinate, mine)] * mesh.grid.size
    with meter().paused():
        dist.all_gather_object(received, (mesh.coordinate, mine))
    return received


def _check_replica(name: str, replica: Tensor, first: Tensor) -> None:
    """Replicas do the same sums in the same order, so only kernels that are not deterministic set them apart."""
    if replica is first or not first.numel():
        return
    drift = (replica - first).abs().max().item()
    if not drift <= torch.finfo(first.dtype).eps ** 0.5 * first.abs().max().item():
        raise RuntimeError(f"{name} differs between ranks that should hold the same, by {drift:.3g}")


def _joined(pieces: Mapping[tuple[int, int], Tensor], tensor_parallel_dim: int | None) -> Tensor:
    """Pieces by (tp, dp): FSDP2 shards dim 0 in the order of dp, tensor parallelism its own dim in the order of tp."""
    slices = [
        torch.cat([pieces[key] for key in sorted(pieces) if key[0] == tp]) for tp in sorted({tp for tp, _ in pieces})
    ]
    return slices[0] if tensor_parallel_dim is None else torch.cat(slices, dim=tensor_parallel_dim)
