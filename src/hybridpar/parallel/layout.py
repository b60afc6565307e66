"""Builds one rank's part of the model: pipeline stages, tensor and expert shards, initial values.

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
from hybridpar.parallel.sharding import held_box, layers_of_stage
from hybridpar.specs import RunSpec

# The head's own copy of a tied weight, where the stage with the embedding is another one.
HEAD_COPY = "head.weight"
_EMBEDDING = "embed.weight"


@dataclass(frozen=True)
class Layout:
    """Which slice of which parameter this rank holds."""

    run: RunSpec
    coordinate: Coordinate

    def box(self, name: str, shape: torch.Size) -> tuple[slice, ...]:
        """This rank's part of the whole parameter `name` as its model computes with it, one slice a dim."""
        return held_box(name, shape, self.run.model, self.run.strategy, self.coordinate)

    def shard(self, name: str, dense: Tensor) -> Tensor:
        """This rank's slice of the whole parameter `name`."""
        return dense[self.box(name, dense.shape)]


def dense_shapes(run: RunSpec) -> dict[str, torch.Size]:
    """Shape of every parameter of the one-device model, by name."""
    with torch.device("meta"):
        return {name: p.shape for name, p in LanguageModel(run.model).named_parameters()}


def dense_name(name: str, run: RunSpec) -> str:
    """The name in the one-device model of a parameter on a stage: a tied head is the embedding."""
    return _EMBEDDING if name == HEAD_COPY and run.model.tied_embeddings else name


def build_part(layout: Layout, device: torch.device, stage: int = 0) -> LanguageModel:
    """One stage of the model with this rank's shards, initialised as slices of the dense model."""
    run = layout.run
    with torch.device("meta"):
        lm = LanguageModel(run.model)
    _keep_stage(lm, run, stage)
    replaced: dict[int, nn.Parameter] = {}
    for module_name, module in lm.named_modules():
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            name = dense_name(f"{module_name}.{leaf}", run)
            if id(parameter) not in replaced:  # tied weights of one stage stay one tensor
                dense = dense_parameter(name, parameter.shape, run.model, run.seed)
                local = layout.shard(name, dense).to(device, DTYPES[run.workload.precision], copy=True)
                replaced[id(parameter)] = nn.Parameter(local.contiguous())
            setattr(module, leaf, replaced[id(parameter)])
    return lm


def _keep_stage(lm: LanguageModel, run: RunSpec, stage: int) -> None:
    stages = run.strategy.stages
    kept = {str(layer) for layer in layers_of_stage(run.model, run.strategy, stage)}
    for layer in [key for key in lm.blocks if key not in kept]:
        del lm.blocks[layer]
    if stage > 0:
        lm.embed = None
    if stage < stages - 1:
        lm.norm = lm.head = None
