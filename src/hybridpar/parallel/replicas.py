"""Who holds the same parameters: the groups over which gradients are averaged and state is sharded.

Dense parameters are the same on all ranks of dp x cp. Experts are dealt out over ep ranks, inside dp, so those of one
rank are the same only across the blocks of ep neighbours, and their gradients come from the tokens of a whole block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from hybridpar.comm.process_group import ProcessMesh
from hybridpar.parallel.pipeline import holds_several_stages
from hybridpar.parallel.sharding import is_expert
from hybridpar.specs import RunSpec


@dataclass(frozen=True)
class Replicas:
    """The groups of one rank. `ep` and what belongs to it is None where ranks hold all experts."""

    run: RunSpec
    device: torch.device
    group: dist.ProcessGroup
    shards: dist.ProcessGroup
    copies: dist.ProcessGroup | None
    ep: dist.ProcessGroup | None
    across_ep: dist.ProcessGroup | None

    @classmethod
    def build(cls, run: RunSpec, mesh: ProcessMesh) -> Replicas:
        """Collective."""
        strategy = run.strategy
        group = mesh.group("dp", "cp")
        shards, copies = group, None
        if 0 < strategy.zero_group < strategy.dp * strategy.cp:
            whole = mesh.grid.groups("dp", "cp")
            size = strategy.zero_group
            shards = mesh.new_group([g[i : i + size] for g in whole for i in range(0, len(g), size)])
            copies = mesh.new_group([g[place::size] for g in whole for place in range(size)])
        ep, across = None, None
        if strategy.ep > 1:
            ep = mesh.new_group(mesh.grid.blocks("dp", strategy.ep))
            across = mesh.new_group(mesh.grid.across_blocks("dp", strategy.ep, "cp"))
        return cls(run, mesh.device, group, shards, copies, ep, across)

    @property
    def averages_stage_by_stage(self) -> bool:
        """Whether pipeline stages average their gradients themselves, as DDP and FSDP2 cannot do it for them."""
        strategy = self.run.strategy
        several = strategy.pp > 1 and holds_several_stages(strategy.schedule)
        return several and strategy.zero < 2 and strategy.overlap and self.group.size() > 1

    @property
    def shards_experts(self) -> bool:
        """Whether FSDP2 shards experts: there is someone to share them with."""
        return self.run.strategy.zero >= 2 and (self.across_ep is None or self.across_ep.size() > 1)

    def is_apart(self, name: str) -> bool:
        """Whether a parameter is not the same on all replicas."""
        return self.ep is not None and is_expert(name)

    def mesh(self) -> DeviceMesh:
        """Of dense parameters, for FSDP2."""
        with _disable_current_modes():  # a mesh is of real numbers, also where all other tensors are fake
            return self._mesh()

    def _mesh(self) -> DeviceMesh:
        if self.copies is None:
            return DeviceMesh.from_group(self.shards, self.device.type)
        ranks = dist.get_process_group_ranks(self.group)
        layout = torch.tensor(ranks).view(-1, self.shards.size())
        return DeviceMesh.from_group(
            [self.copies, self.shards], self.device.type, mesh=layout, mesh_dim_names=("copies", "shards")
        )

    def expert_mesh(self) -> DeviceMesh | None:
        """Of experts, for FSDP2; None where nobody holds the same ones."""
        if self.across_ep is None:
            return self.mesh()
        if not self.shards_experts:
            return None
        with _disable_current_modes():
            return DeviceMesh.from_group(self.across_ep, self.device.type)
