"""Expert parallelism: routed experts are dealt out over ep ranks, and tokens travel to them and back.

Source: GShard, Lepikhin et al. 2020, arXiv 2006.16668, section 3.1. Each layer sends three all-to-alls forward (how
many tokens go where, the tokens, their answers) and two backward; nothing is padded, whatever the router does.
Symbols: R tokens (counted once a choice), d hidden, E experts, n ranks of the ep group.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from hybridpar.models.block import AttentionBlock
from hybridpar.models.lm import LanguageModel
from hybridpar.models.moe import MoE
from hybridpar.parallel.collectives import exchanged
from hybridpar.parallel.sharding import part


def split_experts(lm: LanguageModel, experts: int, group: dist.ProcessGroup) -> None:
    """Let the experts of a model whose expert parameters are already shards serve all ranks of `group`; in place."""
    spans = [part(experts, group.size(), rank) for rank in range(group.size())]
    owned = [span.stop - span.start for span in spans]
    for moe in moe_layers(lm):
        local = moe.experts.forward
        moe.experts.forward = partial(_answers_from_owners, local, owned, group)  # type: ignore[method-assign]


def moe_layers(lm: LanguageModel) -> list[MoE]:
    """The expert layers of a model or a stage."""
    blocks = (block.mlp for block in lm.blocks.values() if isinstance(block, AttentionBlock))
    return [mlp for mlp in blocks if isinstance(mlp, MoE)]


def _answers_from_owners(
    local: Callable[[Tensor, Tensor], Tensor], owned: list[int], group: dist.ProcessGroup, x: Tensor, counts: Tensor
) -> Tensor:
    """Tokens sorted by expert (R, d), counts (E,) -> their experts' answers (R, d)."""
    mine = owned[group.rank()]
    arriving = counts.new_empty(group.size() * mine)
    dist.all_to_all_single(arriving, counts.contiguous(), [mine] * group.size(), owned, group=group)
    arriving = arriving.view(group.size(), mine)  # from whom, for which of this rank's experts
    sent = [int(part.sum()) for part in counts.split(owned)]
    received = arriving.sum(1).tolist()
    visitors = exchanged(x, group, sent, received)
    expert = torch.arange(mine, device=x.device).repeat(group.size()).repeat_interleave(arriving.flatten())
    order = expert.argsort(stable=True)
    home = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=x.device))
    answers = local(visitors[order], arriving.sum(0))[home]
    return exchanged(answers, group, received, sent)
