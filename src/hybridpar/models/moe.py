"""Mixture of experts: a router sends every token to its top k of E SwiGLU experts, beside experts that all pass.

Sources: top-k gating renormalised over the chosen, Mixtral (Jiang et al. 2024, arXiv 2401.04088, section 2.1), which
for k = 1 would leave the router without a gradient, so that there the probability itself is the weight, as in Switch
(Fedus et al. 2021, arXiv 2101.03961, eq. 2); load-balancing loss, Switch eq. 4-6; capacity and the order in which
tokens take their places (first choices before second ones), GShard (Lepikhin et al. 2020, arXiv 2006.16668, alg. 1);
shared experts, DeepSeekMoE (Dai et al. 2024, arXiv 2401.06066, eq. 3).

Symbols: b sequences, S tokens each, T = b*S, d hidden, f ffn_hidden of one expert, E experts, k top_k, R = T*k places.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from hybridpar.models.mlp import SwiGLU, gated
from hybridpar.models.norm import statistics_dtype
from hybridpar.specs import ModelSpec


@dataclass(frozen=True)
class Routing:
    """Where tokens go. `expert` (T, k) int64; `weight` (T, k), zero where the expert was full; `kept` (T, k) bool."""

    expert: Tensor
    weight: Tensor
    kept: Tensor


class Experts(nn.Module):
    """E SwiGLU experts as stacked matrices."""

    def __init__(self, experts: int, hidden: int, ffn_hidden: int) -> None:
        super().__init__()
        self.w_gate = nn.Parameter(torch.empty(experts, ffn_hidden, hidden))
        self.w_up = nn.Parameter(torch.empty(experts, ffn_hidden, hidden))
        self.w_down = nn.Parameter(torch.empty(experts, hidden, ffn_hidden))

    def forward(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Tokens sorted by expert (R, d), the first counts[0] of them for the first expert -> (R, d)."""
        weights = zip(self.w_gate.unbind(), self.w_up.unbind(), self.w_down.unbind(), strict=True)
        parts = x.split(list(counts))
        # An expert without tokens takes part all the same, so that every parameter has a gradient on every rank.
        return torch.cat(
            [
                functional.linear(gated(functional.linear(part, gate), functional.linear(part, up)), down)
                for part, (gate, up, down) in zip(parts, weights, strict=True)
            ]
        )


class _Attach(Function):
    """Hang a loss on a tensor that takes part in the real one: its gradient is added wherever the graph is cut."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.scale, ctx.like = scale, loss.new_empty(())
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        return grads[0], torch.full_like(ctx.like, ctx.scale), None


def attach_loss(x: Tensor, loss: Tensor, scale: float) -> Tensor:
    """x unchanged; in the backward pass `scale * loss` counts as part of what is minimised."""
    return _Attach.apply(x, loss, scale)


class MoE(nn.Module):
    """sum over the top k of weight_e * expert_e(x), plus the shared experts.

    What looks at all tokens of a sequence (the balance of the load, the queue before a full expert) is an attribute,
    because the tokens of a sequence may lie in several places.
    """

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.top_k, self.capacity_factor = model.top_k, model.capacity_factor
        self.router = nn.Linear(model.hidden, model.experts, bias=False)
        self.experts = Experts(model.experts, model.hidden, model.ffn_hidden)
        self.shared = SwiGLU(model.hidden, model.ffn_hidden * model.shared_experts) if model.shared_experts else None
        self.balance_weight = model.aux_loss
        self.mean_over_tokens: Callable[[Tensor], Tensor] = _as_it_is
        self.places_before: Callable[[Tensor], Tensor] = first_places
        self.sequence_length: Callable[[int], int] = _as_long

    def forward(self, x: Tensor) -> Tensor:
        """x (b, S, d) -> (b, S, d)."""
        probability = self.router(x).to(statistics_dtype(x)).softmax(-1)
        routing = self.route(probability)
        out = self.apply_experts(x.flatten(0, 1), routing).view_as(x)
        if self.shared is not None:
            out = out + self.shared(x)
        if not self.balance_weight or not torch.is_grad_enabled():
            return out
        return attach_loss(out, self.balance(probability, routing), self.balance_weight)

    def route(self, probability: Tensor) -> Routing:
        """probability (b, S, E) -> routing of the T tokens."""
        weight, expert = probability.topk(self.top_k, dim=-1)
        if self.top_k > 1:
            weight = weight / weight.sum(-1, keepdim=True)
        kept = torch.ones_like(expert, dtype=torch.bool)
        if self.capacity_factor:
            kept = self._has_place(expert, probability.shape[-1])
            weight = weight * kept
        return Routing(*(t.flatten(0, 1) for t in (expert, weight, kept)))

    def apply_experts(self, x: Tensor, routing: Routing) -> Tensor:
        """x (T, d) -> (T, d)."""
        kept = routing.kept.flatten()
        expert = routing.expert.flatten().masked_fill(~kept, self.router.out_features)  # after all others
        order = expert.argsort(stable=True)
        counts = tally(expert, self.router.out_features)
        sent = order[: sum(counts)]
        answers = self.experts(x[sent // self.top_k], counts)
        # Back to the order of the tokens by a gather, whose sums have one order whatever the layout.
        back = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
        if sent.numel() < order.numel():
            answers = torch.cat((answers, answers.new_zeros(1, answers.shape[-1])))
            back = back.clamp(max=sent.numel())
        answers = answers[back].view(-1, self.top_k, x.shape[-1])
        return (answers * routing.weight.to(x.dtype).unsqueeze(-1)).sum(1)

    def balance(self, probability: Tensor, routing: Routing) -> Tensor:
        """E * sum_e f_e P_e: f_e share of places that chose e, P_e mean probability of e; 1 when even."""
        experts = probability.shape[-1]
        ones = torch.ones_like(routing.expert.flatten(), dtype=probability.dtype)
        chosen = ones.new_zeros(experts).index_add_(0, routing.expert.flatten(), ones)
        share = self.mean_over_tokens(chosen / routing.expert.numel())
        return experts * (share * self.mean_over_tokens(probability.flatten(0, 1).mean(0))).sum()

    def _has_place(self, expert: Tensor, experts: int) -> Tensor:
        """Which choices (b, S, k) come before their expert is full; a sequence has its own places with each expert."""
        _, length, top_k = expert.shape
        whole = self.sequence_length(length)
        capacity = math.ceil(self.capacity_factor * whole * top_k / experts)
        wanted = functional.one_hot(expert.transpose(1, 2), experts)  # (b, k, S, E)
        return (self.places_before(wanted) * wanted).sum(-1).transpose(1, 2) < capacity


def tally(expert: Tensor, experts: int) -> list[int]:
    """How many of the choices (R,) fell on each expert; a choice of expert number `experts` is none."""
    return torch.bincount(expert, minlength=experts + 1)[:-1].tolist()


def first_places(wanted: Tensor) -> Tensor:
    """How many places were asked for before, choice by choice and token by token: (b, k, S, E) -> (b, k, S, E)."""
    batch, top_k, length, experts = wanted.shape
    flat = wanted.reshape(batch, top_k * length, experts)
    return (flat.cumsum(1) - flat).view_as(wanted)


def _as_it_is(statistic: Tensor) -> Tensor:
    return statistic


def _as_long(length: int) -> int:
    return length
