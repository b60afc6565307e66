"""Tensor parallelism on plain tensors, after Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053, section 3).

Every block keeps its code and its parameter names; its weights become shards, its head counts the local ones, and the
borders of the parallel region are hooks. A layer communicates twice forward and twice backward per Transformer block
(after attention, after the MLP), once each per Mamba-2 block.

Symbols: b batch, S tokens, d hidden, V vocab, t = tp ranks, G ssm_groups.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from hybridpar.models.block import AttentionBlock, MambaBlock
from hybridpar.models.lm import LanguageModel
from hybridpar.models.mamba2 import Before, Mamba2
from hybridpar.models.norm import statistics_dtype
from hybridpar.parallel.collectives import TensorRegion, all_reduced


def split_tensor_parallel(lm: LanguageModel, region: TensorRegion, first_token: int) -> None:
    """Turn a model whose parameters are already shards into one rank's part; in place.

    Args:
        lm: whole, or a pipeline stage.
        region: borders of the parallel region.
        first_token: start of this rank's slice of the vocabulary.
    """
    tp = region.group.size()
    for block in lm.blocks.values():
        if isinstance(block, AttentionBlock):
            block.attention.heads //= tp
            block.attention.kv_heads = max(1, block.attention.kv_heads // tp)  # too few are held by several ranks
            _bound(block.attention, region)
            _bound(block.mlp, region)
        if isinstance(block, MambaBlock):
            _split_mamba(block.mamba, region, tp)
    if lm.embed is not None:
        lm.embed.forward = partial(_embed, lm.embed, region, first_token)
    if lm.head is not None:
        lm.head.register_forward_pre_hook(lambda _, args: (region.enter(args[0]),))


def _bound(module: nn.Module, region: TensorRegion) -> None:
    module.register_forward_pre_hook(lambda _, args: (region.enter(args[0]), *args[1:]))
    module.register_forward_hook(lambda _, args, out: region.leave(out))


def _split_mamba(mamba: Mamba2, region: TensorRegion, tp: int) -> None:
    mamba.heads //= tp
    if mamba.groups % tp == 0:
        mamba.groups //= tp
        mamba.norm.groups //= tp
        _bound(mamba, region)
        return
    mamba.forward = partial(_mamba_with_shared_norm, mamba, region)  # type: ignore[method-assign]


def _mamba_with_shared_norm(mamba: Mamba2, region: TensorRegion, x: Tensor, before: Before | None = None) -> Tensor:
    """A Mamba-2 layer whose one norm group spans the tp ranks, with a single all-reduce.

    The norm divides a token's channels by one number, which commutes with the output projection:
    W_out (w * u / r) = (W_out (w * u)) / r. So the partial projections and the partial sums of squares are reduced
    together, as d + 1 columns, and the division comes after. Exact; one collective instead of two.
    """
    x = region.enter(x)
    gated = mamba.norm.gate(mamba.mix(x, before), mamba.w_z(x))
    projected = mamba.w_out(gated.to(x.dtype) * mamba.norm.weight)
    squares = mamba.norm.sum_of_squares(gated).flatten(-2)
    both = region.leave(torch.cat((projected.to(squares.dtype), squares), dim=-1))
    return (both[..., :-1] * mamba.norm.scale(both[..., -1:])).to(x.dtype)


def _embed(embed: nn.Module, region: TensorRegion, first_token: int, tokens: Tensor) -> Tensor:
    """Vocabulary-parallel embedding: tokens of other ranks' slices give zeros; the sum is the whole.

    With sequence parallelism `leave` hands each rank its tokens only.
    """
    weight: Tensor = embed.weight  # type: ignore[assignment]
    local = tokens - first_token
    absent = (local < 0) | (local >= weight.shape[0])
    rows = functional.embedding(local.masked_fill(absent, 0), weight)
    return region.leave(rows.masked_fill(absent.unsqueeze(-1), 0.0))


class _VocabParallelCrossEntropy(Function):
    """Per-token negative log-likelihood of logits split over the vocabulary (arXiv 1909.08053, section 3)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, first: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dtype = logits.dtype
        largest = logits.amax(-1).to(statistics_dtype(logits))
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        shifted = logits - largest.unsqueeze(-1)  # in the wider format; from here on in place: logits are large
        local = targets - first
        absent = (local < 0) | (local >= logits.shape[-1])
        index = local.masked_fill(absent, 0).unsqueeze(-1)
        at_target = shifted.gather(-1, index).squeeze(-1).masked_fill(absent, 0.0)
        exponentials = shifted.exp_()
        both = all_reduced(torch.stack((at_target, exponentials.sum(-1))), group)
        ctx.save_for_backward(exponentials.div_(both[1].unsqueeze(-1)), index, absent)
        return both[1].log() - both[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, index, absent = ctx.saved_tensors
        grad = probabilities.clone()
        grad.scatter_add_(-1, index, absent.to(grad.dtype).unsqueeze(-1) - 1)
        return grad.mul_(grads[0].unsqueeze(-1)).to(ctx.dtype), None, None, None


def vocab_parallel_loss(logits: Tensor, targets: Tensor, *, first: int, group: dist.ProcessGroup) -> Tensor:
    """Mean negative log-likelihood over all tokens, in at least float32.

    Args:
        logits: this rank's slice of the vocabulary, (b, S, V/t).
        targets: (b, S).
        first: first token of the slice.
        group: the tp group.

    Returns:
        scalar, the same on every rank of the group.
    """
    return _VocabParallelCrossEntropy.apply(logits, targets, first, group).mean()
