"""Whole parameters and gradients from any layout, by their names in the one-device model.

For parity checks and small models: everything ends on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from hybridpar.comm.process_group import ProcessMesh
from hybridpar.parallel.sharding import tensor_dim
from hybridpar.specs import RunSpec


def gather_dense(run: RunSpec, mesh: ProcessMesh, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Put together what each rank holds: dp shards (DTensor), tp slices, pp stages. Collective."""
    whole_over_dp = {name: _full(tensor).detach().cpu() for name, tensor in held.items()}
    slices: list[dict[str, Tensor]] = [{}] * run.strategy.tp
    dist.all_gather_object(slices, whole_over_dp, group=mesh.group("tp"))
    whole_over_tp = {name: _joined(run, name, [part[name] for part in slices]) for name in whole_over_dp}
    stages: list[dict[str, Tensor]] = [{}] * run.strategy.pp
    dist.all_gather_object(stages, whole_over_tp, group=mesh.group("pp"))
    return {name: tensor for stage in stages for name, tensor in stage.items()}


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def _joined(run: RunSpec, name: str, parts: list[Tensor]) -> Tensor:
    dim = tensor_dim(name, run.model, run.strategy.tp)
    return parts[0] if dim is None else torch.cat(parts, dim=dim)
