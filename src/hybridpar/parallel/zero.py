"""Sharding over data replicas: ZeRO-1 (optimizer), FSDP2 kept unsharded (ZeRO-2) or resharded (ZeRO-3).

Sources: Rajbhandari et al. 2020, arXiv 1910.02054; Zhao et al. 2023, arXiv 2304.11277 (HSDP: section 3.2.2).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from hybridpar.models.lm import LanguageModel
from hybridpar.parallel.experts import moe_layers
from hybridpar.specs import WorkloadSpec


def shard_parameters(
    lm: LanguageModel,
    replicas: DeviceMesh,
    expert_replicas: DeviceMesh | None,
    *,
    reshard_after_forward: bool,
    on_host: bool,
) -> None:
    """FSDP2: one group per block, one for the rest; in place.

    Args:
        lm: a model or a stage.
        replicas: ranks that hold the same dense parameters, in one dim; for HSDP in two, copies by shards.
        expert_replicas: ranks that hold the same experts; None leaves the experts alone.
        reshard_after_forward: let go of gathered parameters between forward and backward (ZeRO-3).
        on_host: keep shards in host memory.
    """
    options: dict[str, Any] = (
        {"offload_policy": CPUOffloadPolicy(pin_memory=torch.cuda.is_available())} if on_host else {}
    )
    experts = [moe.experts for moe in moe_layers(lm)]
    alone = {p for module in experts for p in module.parameters()} if expert_replicas is None else set()
    for module in experts if expert_replicas is not None else ():
        fully_shard(module, mesh=expert_replicas, reshard_after_forward=reshard_after_forward, **options)
    for block in lm.blocks.values():
        ignored = {p for p in block.parameters() if p in alone}
        fully_shard(
            block, mesh=replicas, reshard_after_forward=reshard_after_forward, ignored_params=ignored, **options
        )
    # The root's parameters are used last in the forward and first in the backward: resharding between is waste.
    fully_shard(lm, mesh=replicas, reshard_after_forward=False, ignored_params=alone, **options)


def build_optimizer(
    parameters: Iterable[nn.Parameter], workload: WorkloadSpec, shard_over: dist.ProcessGroup | None
) -> torch.optim.Optimizer:
    """AdamW or SGD; with `shard_over` each of its ranks keeps the state of, and updates, a part of the parameters."""
    kind: type[torch.optim.Optimizer]
    options: dict[str, Any] = {"lr": workload.learning_rate, "weight_decay": workload.weight_decay}
    kind = torch.optim.AdamW if workload.optimizer == "adamw" else torch.optim.SGD
    held: Sequence[nn.Parameter] = list(parameters)
    if shard_over is None:
        return kind(held, **options)
    return ZeroRedundancyOptimizer(held, optimizer_class=kind, process_group=shard_over, **options)
