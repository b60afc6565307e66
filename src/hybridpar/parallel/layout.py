"""Builds one rank's part of the model: pipeline stage, tensor shards, initial values.

Everything here is local: no collective is called.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hybridpar.mesh import Coordinate
from hybridpar.models.init import dense_parameter
from hybridpar.models.lm import LanguageModel
from hybridpar.models.precision import DTYPES
from hybridpar.parallel.sharding import part, stage_layers, tensor_dim
from hybridpar.specs import RunSpec


@dataclass(frozen=True)
class Layout:
    """Which slice of which parameter this rank holds."""

    run: RunSpec
    coordinate: Coordinate

    def shard(self, name: str, dense: Tensor) -> Tensor:
        """This rank's tensor-parallel slice of the whole parameter `name`."""
        strategy = self.run.strategy
        dim = tensor_dim(name, self.run.model, strategy.tp)
        if dim is None:
            return dense
        span = part(dense.shape[dim], strategy.tp, self.coordinate.tp)
        return dense.narrow(dim, span.start, span.stop - span.start)


def dense_shapes(run: RunSpec) -> dict[str, torch.Size]:
    """Shape of every parameter of the one-device model, by name."""
    with torch.device("meta"):
        return {name: p.shape for name, p in LanguageModel(run.model).named_parameters()}


def build_part(layout: Layout, device: torch.device) -> LanguageModel:
    """This rank's stage of the model with its tensor-parallel shards, initialised as slices of the dense model."""
    run = layout.run
    with torch.device("meta"):
        lm = LanguageModel(run.model)
    _keep_stage(lm, run, layout.coordinate.pp)
    replaced: dict[int, nn.Parameter] = {}
    for module_name, module in lm.named_modules():
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            name = f"{module_name}.{leaf}"
            if id(parameter) not in replaced:  # tied weights stay one tensor
                dense = dense_parameter(name, parameter.shape, run.model, run.seed)
                local = layout.shard(name, dense).to(device, DTYPES[run.workload.precision], copy=True)
                replaced[id(parameter)] = nn.Parameter(local.contiguous())
            setattr(module, leaf, replaced[id(parameter)])
    return lm


def _keep_stage(lm: LanguageModel, run: RunSpec, stage: int) -> None:
    stages = run.strategy.pp
    kept = {str(layer) for layer in stage_layers(run.model.layers, stages, stage)}
    for layer in [key for key in lm.blocks if key not in kept]:
        del lm.blocks[layer]
    if stage > 0:
        lm.embed = None
    if stage < stages - 1:
        lm.norm = lm.head = None
