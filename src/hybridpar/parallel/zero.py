"""Sharding over data replicas: ZeRO-1 (optimizer), FSDP2 kept unsharded (ZeRO-2) or resharded (ZeRO-3).

Sources: Rajbhandari et al. 2020, arXiv 1910.02054; Zhao et al. 2023, arXiv 2304.11277.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from hybridpar.models.lm import LanguageModel
from hybridpar.specs import WorkloadSpec


def shard_parameters(lm: LanguageModel, dp_mesh: DeviceMesh, *, reshard_after_forward: bool) -> None:
    """FSDP2 over the dp axis: one group per block, one for the rest; in place."""
    for block in lm.blocks.values():
        fully_shard(block, mesh=dp_mesh, reshard_after_forward=reshard_after_forward)
    # The root's parameters are used last in the forward and first in the backward: resharding between is waste.
    fully_shard(lm, mesh=dp_mesh, reshard_after_forward=False)


def build_optimizer(
    parameters: Iterable[nn.Parameter], workload: WorkloadSpec, shard_over: dist.ProcessGroup | None
) -> torch.optim.Optimizer:
    """AdamW or SGD; with `shard_over` each of its ranks keeps the state of, and updates, a part of the parameters."""
    kind: type[torch.optim.Optimizer]
    options: dict[str, Any] = {"lr": workload.learning_rate, "weight_decay": workload.weight_decay}
    kind = torch.optim.AdamW if workload.optimizer == "adamw" else torch.optim.SGD
    if shard_over is None:
        return kind(parameters, **options)
    return ZeroRedundancyOptimizer(list(parameters), optimizer_class=kind, process_group=shard_over, **options)
