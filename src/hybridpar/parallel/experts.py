"""Expert parallelism: routed experts are dealt out over ep ranks, and tokens travel to them and back.

Source: GShard, Lepikhin et al. 2020, arXiv 2006.16668, section 3.1. Each layer sends three all-to-alls forward (how
many tokens go where, the tokens, their answers) and two backward; nothing is padded, whatever the router does.
Symbols: R tokens (counted once a choice), d hidden, E experts, n ranks of the ep group.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
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
    local: Callable[[Tensor, Sequence[int]], Tensor],
    owned: Sequence[int],
    group: dist.ProcessGroup,
    x: Tensor,
    counts: Sequence[int],
) -> Tensor:
    """Tokens sorted by expert (R, d), how many for each of the E experts -> their experts' answers (R, d)."""
    arriving = exchanged_counts(counts, owned, group, x.device)
    sent = [sum(part) for part in _split(counts, owned)]
    received = [sum(part) for part in arriving]
    visitors = exchanged(x, group, sent, received)
    runs = [torch.full((count,), index, device=x.device) for part in arriving for index, count in enumerate(part)]
    order = torch.cat(runs).argsort(stable=True)
    home = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=x.device))
    answers = local(visitors[order], [sum(column) for column in zip(*arriving, strict=True)])[home]
    return exchanged(answers, group, received, sent)


def exchanged_counts(
    counts: Sequence[int], owned: Sequence[int], group: dist.ProcessGroup, device: torch.device
) -> list[list[int]]:
    """How many tokens arrive from each rank for each of this rank's experts, as must be known before they come."""
    mine, leaving = owned[group.rank()], torch.tensor(counts, device=device)
    arriving = leaving.new_empty(group.size() * mine)
    dist.all_to_all_single(arriving, leaving, [mine] * group.size(), list(owned), group=group)
    return read_counts(arriving.view(group.size(), mine), counts, owned, group.rank())


def read_counts(arriving: Tensor, counts: Sequence[int], owned: Sequence[int], rank: int) -> list[list[int]]:
    """From the device; what this rank sends, and to whom, is given beside, for whoever must guess what arrives."""
    return arriving.tolist()


def _split(values: Sequence[int], sizes: Sequence[int]) -> list[Sequence[int]]:
    ends = list(itertools.accumulate(sizes))
    return [values[end - size : end] for size, end in zip(sizes, ends, strict=True)]
