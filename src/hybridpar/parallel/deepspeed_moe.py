"""Experts dealt out over replicas by DeepSpeed's MoE, which gates, sends tokens away and answers back.

Its experts are our SwiGLU, its gate is our router; nothing is dropped. Its load-balancing loss joins ours as the
one-device model's does. Symbols: b sequences, S tokens, d hidden, E experts.
"""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE as DeepSpeedMoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.utils import groups
from torch import Tensor, nn

from hybridpar.models.lm import LanguageModel
from hybridpar.models.mlp import SwiGLU
from hybridpar.models.moe import MoE, attach_loss
from hybridpar.parallel.deepspeed_pieces import Pieces
from hybridpar.parallel.sharding import part
from hybridpar.specs import RunSpec

_EXPERT = re.compile(
    r"(?P<layer>.*\.mlp)\.routed\.deepspeed_moe\.experts\.deepspeed_experts\.(?P<index>\d+)\.(?P<leaf>\w+)\.weight"
)
_GATE = ".routed.deepspeed_moe.gate.wg.weight"


class _Dealt(nn.Module):
    """A block's experts: DeepSpeed's routed ones, beside our shared ones."""

    def __init__(self, ours: MoE, run: RunSpec, rank: int) -> None:
        super().__init__()
        hidden, ffn = run.model.hidden, run.model.ffn_hidden
        self.balance_weight = ours.balance_weight
        self.shared = ours.shared
        self.routed = DeepSpeedMoE(
            hidden,
            SwiGLU(hidden, ffn),
            num_experts=run.model.experts,
            ep_size=run.strategy.ep,
            k=run.model.top_k,
            min_capacity=0,
            drop_tokens=False,
            use_rts=False,
            top2_2nd_expert_sampling=False,
        )
        self._copy_weights(ours, part(run.model.experts, run.strategy.ep, rank))

    @torch.no_grad()
    def _copy_weights(self, ours: MoE, own: slice) -> None:
        self.routed.deepspeed_moe.gate.wg.weight.copy_(ours.router.weight)
        experts = self.routed.deepspeed_moe.experts.deepspeed_experts
        for index, expert in zip(range(own.start, own.stop), experts, strict=True):
            for leaf in ("w_gate", "w_up", "w_down"):
                getattr(expert, leaf).weight.copy_(getattr(ours.experts, leaf)[index])

    def forward(self, x: Tensor) -> Tensor:
        """x (b, S, d) -> (b, S, d)."""
        out, balance, _ = self.routed(x)
        if self.shared is not None:
            out = out + self.shared(x)
        return attach_loss(out, balance, self.balance_weight) if self.balance_weight else out


def deal_experts(lm: LanguageModel, run: RunSpec, rank: int) -> None:
    """Replace the experts of `lm` by DeepSpeed's, with the same weights; in place. `rank` is that in the ep group."""
    for block in lm.blocks.values():
        if isinstance(ours := getattr(block, "mlp", None), MoE):
            block.mlp = _Dealt(ours, run, rank)


def parameter_groups(lm: nn.Module) -> Any:
    """What an optimizer is built on: dealt-out experts in groups of their own, as ZeRO wants them."""
    return split_params_into_different_moe_groups_for_optimizer({"params": list(lm.parameters()), "name": "all"})


def pieces_of_experts(lm: nn.Module, ep: int) -> Pieces:
    """A rank's own experts, and how all are stacked; after deepspeed.initialize, which makes their groups."""
    names = [name for name, _ in lm.named_parameters()]
    group = groups._get_expert_parallel_group(f"ep_size_{ep}")

    def assemble(held: dict[str, Tensor]) -> dict[str, Tensor]:
        whole: dict[str, Tensor] = {}
        stacks: dict[str, dict[int, Tensor]] = {}
        for name, tensor in held.items():
            if found := _EXPERT.fullmatch(name):
                stacks.setdefault(f"{found['layer']}.experts.{found['leaf']}", {})[int(found["index"])] = tensor
            else:
                whole[name.replace(_GATE, ".router.weight")] = tensor
        return whole | {name: _all_experts(own, group) for name, own in stacks.items()}

    def cut(dense: dict[str, Tensor]) -> dict[str, Tensor]:
        held = {}
        for name in names:
            if found := _EXPERT.fullmatch(name):
                experts = dense[f"{found['layer']}.experts.{found['leaf']}"].chunk(group.size())[group.rank()]
                held[name] = experts[int(found["index"])]
            else:
                held[name] = dense[name.replace(_GATE, ".router.weight")]
        return held

    return Pieces(group, frozenset(name for name in names if _EXPERT.fullmatch(name)), assemble, cut)


def _all_experts(own: dict[int, Tensor], group: dist.ProcessGroup) -> Tensor:
    stack = torch.stack([own[index] for index in sorted(own)])
    parts = [torch.empty_like(stack) for _ in range(group.size())]
    dist.all_gather(parts, stack, group=group)
    return torch.cat(parts)
