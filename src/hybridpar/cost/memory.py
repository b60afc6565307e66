"""What a rank holds at its peak in training, on arrays of strategies. No torch here.

The forms of `hybridpar.theory.gpu_memory`, equal to them number for number (but for their rounding to whole bytes), and
two that have no scalar form there:

    Mamba-2 layer   kept for the backward pass, kernels fused: input of the norm 2Th and of the projections 2Th, inputs
                    of the convolution and of the gate 2T(2E + 2N)/t, of the scan 2T(E + 2N)/t and of the output
                    projection 2TE/t, steps 4TJ/t, states between chunks 4TE*n/(C*t) (E inner width, N groups times
                    state n, J heads, C chunk); full recomputation: its input
    zb-v, dualpipe-v  as much in flight as 1F1B on its first rank, on every rank (Qi et al. 2023, section 6; DeepSeek-AI
                    2025: half a micro-batch more)

The fullest rank is the first or the last of a pipeline, where all layers are of one kind; of a mixture every rank is
taken to have the model's mean.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from hybridpar.cost.shape import Load, Num, Shape, Software
from hybridpar.cost.space import OFFLOADS, RECOMPUTES, SCHEDULES, Candidates
from hybridpar.cost.step import layers_of_ranks

_FULL, _SELECTIVE = float(RECOMPUTES.index("full")), float(RECOMPUTES.index("selective"))
_CODE = {name: float(code) for code, name in enumerate(SCHEDULES)}
_OFFLOAD_ALL = float(OFFLOADS.index("parameters"))


@dataclass(frozen=True)
class Held:
    """Bytes of the fullest rank at its peak, by category as in `hybridpar.theory.gpu_memory.GpuMemory`."""

    weights: Num
    gradients: Num
    optimizer: Num
    gathered: Num
    buffers: Num
    activations: Num
    transient: Num

    @property
    def total(self) -> Num:
        """All of it."""
        return sum(getattr(self, name) for name in CATEGORIES)


CATEGORIES: tuple[str, ...] = tuple(one.name for one in fields(Held))


def held(s: Shape, w: Load, soft: Software, c: Candidates) -> Held:
    """The fuller of the first and the last rank of the pipeline."""
    most, last = layers_of_ranks(s.layers, c)
    folded = c.schedule >= _CODE["zb-v"]
    alone = (c.pp == 1) | folded
    common = _common(s, w, soft, c)
    first = _place(s, w, soft, c, common, most, 1.0, np.where(alone, 1.0, 0.0), 0.0)
    if bool(np.all(alone)):
        return first
    end = _place(s, w, soft, c, common, last, np.where(alone, 1.0, 0.0), 1.0, np.where(alone, 0.0, c.pp - 1))
    larger = end.total > first.total
    return Held(**{name: np.where(larger, getattr(end, name), getattr(first, name)) for name in CATEGORIES})


@dataclass(frozen=True)
class _Common:
    """What both ends of a pipeline share: tokens, and of the mean layer parameters and activations."""

    tokens: Num
    split: Num
    plain: Num
    experts: Num
    largest: Num
    layer: Num
    working: Num
    vocab: Num


def _up(number: Num, parts: Num) -> Num:
    return np.ceil(number / parts)


def _common(s: Shape, w: Load, soft: Software, c: Candidates) -> _Common:
    h, t = s.hidden, c.tp
    context = _up(w.seq, c.cp)
    tokens = c.micro_batch * context
    split = np.where(c.sp > 0, t, 1.0)
    layers = np.maximum(s.layers, 1)
    dense, routed, scan = s.dense / layers, s.routed / layers, s.scan / layers

    # Parameters of one layer of each kind, on the first tp rank: it has the larger part where a width does not divide.
    q, parts = _up(s.queries, t), np.minimum(t, np.maximum(s.kv_heads, 1))
    ends_of_norms = 2 * h * s.norm_vectors
    attention = 2 * h * q + 2 * h * _up(s.keys, parts) + ends_of_norms
    attention = attention + s.biases * (_up(s.queries + 2 * s.keys + s.ffn, t) + 2 * h)
    mlp = s.matrices * h * _up(s.ffn, t)
    router = s.experts * h + s.matrices * h * _up(s.shared_ffn, t)
    experts = _up(s.experts, c.ep) * s.matrices * h * _up(s.expert_ffn, t)
    shared = s.scan_groups * s.scan_state
    inner, heads = _up(s.inner, t), _up(s.scan_heads, t)
    states = 2 * shared
    scans = h * (3 * inner + heads + states) + h + 3 * heads + inner + (s.scan_conv + 1) * (inner + states)
    plain = dense * (attention + mlp) + routed * (attention + router) + scan * scans
    largest = np.maximum((dense > 0) * (attention + mlp), (routed > 0) * (attention + router + experts))
    largest = np.maximum(largest, (scan > 0) * scans)

    whole = tokens * h * (8 + 2 * s.dropout) / split
    core = tokens * (4 * s.queries + 4 * np.maximum(s.kv_heads, t) * s.head_dim) / t
    scores = s.fused * 4 * s.heads * tokens / t
    scores = scores + (1 - s.fused) * (2 + 3 * s.dropout) * s.heads * tokens * context / t
    gelu = s.matrices == 2
    saved, alive = np.where(gelu, 4, soft.mlp_saved), np.where(gelu, 4, soft.mlp_backward)
    of_mlp = tokens * saved * s.ffn / t
    of_experts = tokens * s.top_k * (4 * h + saved * s.expert_ffn / t) + tokens * saved * s.shared_ffn / t
    of_experts = of_experts + 8 * tokens * s.experts
    kept_scores = np.where(c.recompute == 0, scores, 0.0)
    full = c.recompute == _FULL
    input_only = 2 * tokens * h / split
    chunks = 4 * tokens * s.inner * s.scan_state / np.maximum(s.scan_chunk, 1)
    of_scan = 4 * tokens * h / split + (tokens * (8 * s.inner + 8 * shared + 4 * s.scan_heads) + chunks) / t

    def layer(kept: Num) -> Num:
        attends = whole + core + kept
        return dense * (attends + of_mlp) + routed * (attends + of_experts) + scan * of_scan

    def inside(width: Num, of_feed_forward: Num) -> Num:
        gradients = alive * tokens * width / t
        again = np.where(full, whole + core + scores + of_feed_forward, 0.0)
        return np.maximum(gradients, np.where(c.recompute == _SELECTIVE, scores, 0.0)) + again

    working = np.maximum(
        (s.dense > 0) * inside(s.ffn, of_mlp), (s.routed > 0) * inside(s.expert_ffn * s.top_k, of_experts)
    )
    working = np.maximum(working, (s.scan > 0) * (6 * tokens * s.inner / t + np.where(full, of_scan, 0.0)))
    per_layer = np.where(full, input_only, layer(kept_scores))
    return _Common(tokens, split, plain, routed * experts, largest, per_layer, working, _up(s.vocab, t))


def _place(
    s: Shape, w: Load, soft: Software, c: Candidates, one: _Common, layers: Num, first: Num, last: Num, place: Num
) -> Held:
    h = s.hidden
    ends = first * (one.vocab + s.positions) * h + last * h * s.norm_vectors
    ends = ends + last * one.vocab * h * (1 - s.tied * first)
    plain, experts = one.plain * layers + ends, one.experts * layers
    count = plain + experts
    ranks = c.dp * c.cp
    shared = plain / ranks + experts / (ranks / c.ep)
    flying = _in_flight(w, c, place)
    kept = flying * one.layer * layers
    embedded = first * flying * one.tokens * (8 + s.dropout * h / one.split)
    once = embedded + last * 4 * one.tokens * h / one.split
    logits = last * soft.logit * one.tokens * s.vocab / c.tp
    begin = kept + once + np.maximum(logits, one.working * (layers > 0))
    rest = np.maximum(0.0, flying - 1) * one.layer * layers
    end = rest + soft.passing * count * w.trains
    activations = np.where(begin >= end, kept + once, rest)
    weights = soft.weights * np.where(c.zero >= 3, shared, count)
    gathers = soft.gather_buffers * 2 * one.tokens * h * (one.split > 1)
    return Held(
        weights=weights * np.where(c.offload >= _OFFLOAD_ALL, 0.0, 1.0),
        gradients=w.trains * soft.gradients * np.where(c.zero >= 2, shared, count),
        optimizer=w.trains * soft.optimizer * np.where(c.zero >= 1, shared, count) * (c.offload == 0),
        gathered=np.where((c.zero >= 3) | (c.offload >= _OFFLOAD_ALL), soft.gathered * (ends + 2 * one.largest), 0.0),
        buffers=gathers + w.trains * ((c.zero == 0) & (c.dp > 1)) * soft.buckets * count,
        activations=activations,
        transient=np.maximum(begin, end) - activations,
    )


def _in_flight(w: Load, c: Candidates, place: Num) -> Num:
    m, p, v = np.floor(w.batch / (c.dp * c.micro_batch)), c.pp, c.virtual
    one = np.minimum(m, p - place)
    interleaved = np.minimum(m * v, (v - 1) * p + 2 * (p - 1 - place) + 1) / v
    found = np.where(c.schedule == _CODE["gpipe"], m, one)
    found = np.where(c.schedule == _CODE["interleaved"], interleaved, found)
    found = np.where(c.schedule == _CODE["zb-v"], np.minimum(m, p), found)
    found = np.where(c.schedule == _CODE["dualpipe-v"], np.minimum(m, p + 0.5), found)
    return np.where(p == 1, 1.0, found)
