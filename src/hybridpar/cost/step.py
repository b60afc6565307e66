"""Seconds of a training step, part by part, on arrays. No torch here.

A rank has T = b*S/c tokens of a micro-batch; t tensor-parallel, p pipeline, v stages a rank, m micro-batches. Times
are those of the slowest stage; all parts together are the step (`Seconds.total`).

Products: 2*m*n*k FLOPs at the best measured rate, and beside it their operands through device memory, (mn + mk + nk)
numbers; the form is the same for the forward product and both of the backward pass. Attention: in one kernel, causal
FLOPs 2*T*S*q forward and 2.5 times that backward (Dao 2023, arXiv 2307.08691, section 3); stored, 4*T*S*q and the
scores through memory at every operation on them. Elementwise work: bytes over memory bandwidth.

The host launches kernels one by one: a layer takes its device's time or its host's, whichever is longer (softly: the
fourth root of the sum of fourth powers). What the host adds is the part `launch`.

Communication: latency, and bytes over bandwidth. Groups lie on the grid of `hybridpar.mesh`, tp innermost, then cp, dp
and pp; of a group with k ranks on each node, rings across nodes use k network cards.

Pipeline: m micro-batches through the slowest stage, and a bubble: for 1F1B and GPipe the other stages once; a v-th of
that interleaved (Narayanan et al. 2021, section 2.2); with backward passes in two parts F+B-W and F+B-2W of F+B+W (Qi
et al. 2023, arXiv 2401.10241, table 1), half of the latter for DualPipeV.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from hybridpar.cost.coefficients import Coefficients
from hybridpar.cost.shape import Load, Machine, Num, Shape, Software
from hybridpar.cost.space import CP_KINDS, OFFLOADS, RECOMPUTES, SCHEDULES, Candidates

_BYTES = 2.0  # of an activation or a weight at work
_FULL, _SELECTIVE = float(RECOMPUTES.index("full")), float(RECOMPUTES.index("selective"))
_INTERLEAVED, _ZERO_BUBBLE = float(SCHEDULES.index("interleaved")), float(SCHEDULES.index("zero-bubble"))
_ZB_V, _DUALPIPE_V = float(SCHEDULES.index("zb-v")), float(SCHEDULES.index("dualpipe-v"))
_ULYSSES = float(CP_KINDS.index("ulysses"))
_OFFLOAD_ALL = float(OFFLOADS.index("parameters"))
# Bytes a second between device and host: PCIe 4 x16, as data sheets give it, for offloading.
HOST_RATE = 25e9
# Bytes that elementwise kernels move in a forward pass, by what they work on: each number of the residual stream (two
# norms, two additions; with dropout its mask and result too), of queries, keys and values (rotation or transposition),
# of the MLP's inner width (activation: read and written; of a gated one two are read), of the scores where stored
# (softmax read and written, with dropout again with a mask), of a scan's inner width (convolution, gate, norm, steps).
_RESIDUAL, _RESIDUAL_DROPOUT = 20.0, 30.0
_HEADS = 4.0
_INNER = 2.0  # times the matrices of the MLP
_SCORES, _SCORES_DROPOUT = 6.0, 11.0
_SCAN = 24.0
_LOGITS = 16.0  # fp32 softmax and its gradient, both passes


@dataclass(frozen=True)
class Seconds:
    """Parts of a step. `*_hidden` run beside computation and add nothing; all others add up to the step.

    Units: seconds, arrays of one length.
    """

    projections: Num
    mlp: Num
    attention: Num
    experts: Num
    scan: Num
    head: Num
    elementwise: Num
    recompute: Num
    launch: Num
    tensor: Num
    context: Num
    exchange: Num
    pipe: Num
    gradients: Num
    gathers: Num
    bubble: Num
    optimizer: Num
    offload: Num
    stragglers: Num
    fixed: Num
    tensor_hidden: Num
    context_hidden: Num
    gradients_hidden: Num
    gathers_hidden: Num

    @property
    def total(self) -> Num:
        """The step."""
        found = self.projections
        for name in ADDED[1:]:
            found = found + getattr(self, name)
        return found


PARTS: tuple[str, ...] = tuple(one.name for one in fields(Seconds))
ADDED: tuple[str, ...] = tuple(name for name in PARTS if not name.endswith("_hidden"))
COMPUTED = ("projections", "mlp", "attention", "experts", "scan", "head", "elementwise", "recompute", "launch")
SENT = ("tensor", "context", "exchange", "pipe", "gradients", "gathers")


@dataclass(frozen=True)
class _Network:
    """What collectives get: bandwidths and latencies."""

    link: Num
    nic: Num
    node: Num
    in_switch: Num
    link_latency: float
    nic_latency: Num


def _network(machine: Machine, k: Coefficients) -> _Network:
    slow = machine.slow_fabric
    return _Network(
        machine.link * k.link,
        machine.nic * k.nic,
        machine.node,
        machine.in_switch,
        k.link_latency,
        k.nic_latency * (1 - slow) + k.slow_latency * slow,
    )


@dataclass(frozen=True)
class _Route:
    """What a group's collectives cost: seconds of a byte that is gathered or scattered, of one that is reduced on all
    ranks, and seconds of a call; `far` and `near` seconds of a byte exchanged."""

    gathered: Num
    reduced: Num
    wait: Num
    exchanged: Num

    def gather(self, size: Num, calls: Num = 1.0) -> Num:
        """A gather, or a reduction to parts, of `size` bytes in all."""
        return self.gathered * size + self.wait * calls

    def reduce(self, size: Num, calls: Num = 1.0) -> Num:
        """An all-reduce. It waits no longer than a gather across nodes, as trees take over from rings."""
        return self.reduced * size + self.wait * calls

    def exchange(self, size: Num) -> Num:
        """An all-to-all in which each rank has `size` bytes for all together."""
        return self.exchanged * size + self.wait


def _route(net: _Network, ranks: Num, stride: Num) -> _Route:
    """Over `ranks` ranks that lie `stride` apart."""
    inside = np.minimum(np.maximum(1.0, np.floor(net.node / stride)), ranks)
    across = ranks > inside
    several = ranks > 1
    slow = np.minimum(net.link, inside * net.nic)
    share = (ranks - 1) / ranks
    return _Route(
        share / np.where(across, slow, net.link),
        2 * share / np.where(across, slow, net.link * net.in_switch),
        np.where(across, net.nic_latency * (ranks - 1), net.link_latency * several),
        ((ranks - inside) / net.nic + (inside - 1) / net.link) / ranks,
    )


def _absent(count: Num) -> bool:
    """Whether a kind of layer is in no model: nothing need be computed for it."""
    return not isinstance(count, np.ndarray) and count == 0


def _rate(m: Machine, k: Coefficients) -> Num:
    """FLOP/s of large products under sustained load."""
    return m.peak * m.ceiling * k.matmul * np.maximum(m.density, 1e-3) ** -k.throttle


def _traffic(m: Machine, k: Coefficients) -> Num:
    """FLOPs that a product could do in the time that one number takes to or from memory."""
    return m.operand * k.matmul_traffic * m.peak / m.memory_rate


@dataclass(frozen=True)
class _Layer:
    """Seconds of the mean layer in one pass over one micro-batch, by kind."""

    projections: Num
    mlp: Num
    attention: Num
    attention_back: Num
    experts: Num
    scan: Num
    elementwise: Num


def _layer(s: Shape, w: Load, m: Machine, soft: Software, c: Candidates, k: Coefficients, tokens: Num) -> _Layer:
    t = c.tp
    h, q, keys = s.hidden, s.queries, s.keys
    rate = _rate(m, k)
    numbers = _traffic(m, k)
    held = keys / np.minimum(t, np.maximum(s.kv_heads, 1.0))  # of keys (and of values), on a rank
    split = np.where(c.sp > 0, t, 1.0)
    layers = np.maximum(s.layers, 1)
    attends, dense, routed, scans = (s.dense + s.routed) / layers, s.dense / layers, s.routed / layers, s.scan / layers

    def product(weights: Num, width: Num) -> Num:
        return (2 * tokens * weights + numbers * (weights + tokens * width)) / rate

    wide = 2 * q / t + 2 * held
    projections = attends * product(h * wide, wide + 2 * h)
    mlp = dense * product(s.matrices * h * s.ffn / t, s.matrices * s.ffn / t + 2 * h)
    experts: Num = 0.0
    if not _absent(s.routed):
        experts = routed * _experts(s, c, k, tokens, rate, numbers)
        shared = routed * product(s.matrices * h * s.shared_ffn / t, (s.matrices * s.shared_ffn / t + 2 * h))
        mlp = mlp + shared * (s.shared_ffn > 0)
    scan: Num = 0.0
    if not _absent(s.scan):
        scan = scans * _scan(s, t, tokens, rate, numbers, m.attention_peak * k.scan)

    memory = m.memory_rate * k.memory
    forward, backward = _attention(s, w, m, c, k, tokens, rate, numbers, memory, held)
    inner = dense * s.ffn + routed * (s.expert_ffn * s.top_k + s.shared_ffn)
    residual = _RESIDUAL + (_RESIDUAL_DROPOUT - _RESIDUAL) * s.dropout
    moved = h * residual * (1 - 0.5 * scans) / split + _HEADS * attends * (q / t + 2 * held)
    moved = moved + (_INNER * s.matrices * inner + _SCAN * scans * s.inner) / t + routed * s.top_k * h * 8 / split
    return _Layer(projections, mlp, attends * forward, attends * backward, experts, scan, tokens * moved / memory)


def _experts(s: Shape, c: Candidates, k: Coefficients, tokens: Num, rate: Num, numbers: Num) -> Num:
    width = s.matrices * s.expert_ffn / c.tp
    passed = tokens * s.top_k
    held = s.experts / c.ep
    flops = 2 * passed * s.hidden * width
    moved = held * s.hidden * width + passed * (width + 2 * s.hidden)
    return (flops + numbers * moved) / (rate * k.grouped)


def _scan(s: Shape, t: Num, tokens: Num, rate: Num, numbers: Num, chunk_rate: Num) -> Num:
    shared = s.scan_groups * s.scan_state
    width = (3 * s.inner + s.scan_heads) / t + 2 * shared
    weights = s.hidden * width
    flops = 2 * s.scan_chunk * (shared + s.inner / t) + 4 * s.inner / t * s.scan_state
    return (2 * tokens * weights + numbers * (weights + tokens * (width + 2 * s.hidden))) / rate + (
        tokens * flops / chunk_rate
    )


def _attention(
    s: Shape,
    w: Load,
    m: Machine,
    c: Candidates,
    k: Coefficients,
    tokens: Num,
    rate: Num,
    numbers: Num,
    memory: Num,
    held: Num,
) -> tuple[Num, Num]:
    t, q, width = c.tp, s.queries, np.maximum(s.head_dim, 1)
    pairs = tokens * w.seq
    fused = pairs * (2 * q / (m.attention_peak * k.attention * width / (width + k.head_half))) / t
    if not isinstance(s.fused, np.ndarray) and s.fused == 1:
        return fused, 2.5 * fused
    scores = pairs * s.heads / t
    products = (4 * pairs * q / t + 2 * numbers * (k.scores * scores + tokens * (q / t + held))) / rate
    moved = k.scores * scores * (_SCORES + (_SCORES_DROPOUT - _SCORES) * s.dropout) / memory
    stored = products + moved
    return s.fused * fused + (1 - s.fused) * stored, s.fused * 2.5 * fused + (1 - s.fused) * 2 * stored


def _softly(device: Num, host: Num) -> Num:
    """The larger of two, with a smooth corner."""
    a, b = device * device, host * host
    return np.sqrt(np.sqrt(a * a + b * b))


def layers_of_ranks(layers: Num, c: Candidates) -> tuple[Num, Num]:
    """Layers of the fullest rank and of the rank that has the last stage."""
    parts = c.pp * c.virtual
    each = np.floor(layers / parts)
    extra = layers - each * parts
    # Early stages take what is left over; a rank has every p-th stage, but in a V the first and the last.
    looped = each * c.virtual + np.ceil(extra / c.pp)
    last = each * c.virtual + np.floor(extra / c.pp)
    folded = c.schedule >= _ZB_V
    most = np.where(folded, each * c.virtual + np.minimum(extra, 2), looped)
    last = np.where(folded, each * c.virtual + np.minimum(extra, 1), last)
    told = c.most_layers > 0
    return np.where(told, c.most_layers, most), np.where(told, c.last_layers, last)


def parameters_of_rank(s: Shape, c: Candidates, layers: Num) -> tuple[Num, Num, Num]:
    """Parameters of a rank with so many layers: of layers without experts, of experts, of one end (embedding, head).

    Numbers that do not divide are not rounded here: see `hybridpar.cost.memory` for what a rank holds to the byte.
    """
    t = c.tp
    held = s.keys / np.minimum(t, np.maximum(s.kv_heads, 1.0))
    share = layers / np.maximum(s.layers, 1)
    attention = (s.dense + s.routed) * s.hidden * (2 * s.queries / t + 2 * held)
    mlps = s.matrices * s.hidden * (s.dense * s.ffn + s.routed * s.shared_ffn) / t
    routers = s.routed * s.hidden * s.experts
    scans = s.scan * s.hidden * ((3 * s.inner + s.scan_heads) / t + 2 * s.scan_groups * s.scan_state)
    plain = (attention + mlps + routers + scans) * share
    if _absent(s.routed):
        return plain, 0.0, s.hidden * s.vocab / t
    experts = s.routed * s.experts / c.ep * s.matrices * s.hidden * s.expert_ffn / t
    return plain, experts * share, s.hidden * s.vocab / t


def seconds(s: Shape, w: Load, m: Machine, soft: Software, c: Candidates, k: Coefficients) -> Seconds:
    """All parts for all candidates."""
    t, p, v = c.tp, c.pp, c.virtual
    tokens = c.micro_batch * w.seq / c.cp
    micro = np.maximum(w.batch / (c.dp * c.micro_batch), 1.0)
    net = _network(m, k)
    layer = _layer(s, w, m, soft, c, k, tokens)
    trained = w.trains
    full, selective = c.recompute == _FULL, c.recompute == _SELECTIVE
    back = 1.0 + trained  # products of the backward pass for one of the forward pass

    # One layer, one micro-batch: what each pass computes and sends.
    products = layer.projections + layer.mlp + layer.experts + layer.scan
    forward = products + layer.attention + layer.elementwise
    again = full * forward + selective * layer.attention
    backward = back * products + layer.attention_back + 2 * layer.elementwise

    layers = np.maximum(s.layers, 1)
    reduced = (2 * (s.dense + s.routed) + s.scan) / layers
    hidden_state = _BYTES * tokens * s.hidden
    # All-reduced, or with sequence parallelism gathered and reduced, then inputs gathered again for weight gradients.
    by_tensor = _route(net, t, 1.0)
    half = by_tensor.gather(hidden_state)
    once = np.where(c.sp > 0, 2 * half, by_tensor.reduce(hidden_state))
    there = reduced * once * (1 + full)
    back_again = reduced * (once + half * (c.sp > 0) * trained)
    tensor_hidden = np.minimum(back_again, products) * k.tp_hidden * (soft.hides_tp > 0)
    tensor_hidden = tensor_hidden + np.minimum(there, products) * k.tp_hidden * (soft.hides_tp > 0.5)
    tensor = there + back_again - tensor_hidden

    context, context_hidden = _context(s, c, k, net, layer, tokens, full)
    exchange: Num = 0.0
    if not _absent(s.routed):
        dealt = _BYTES * tokens * s.top_k * s.hidden / np.where(c.sp > 0, t, 1.0)
        exchange = s.routed / layers * _route(net, c.ep, t * c.cp).exchange(dealt) * 2 * (2 + full) * (c.ep > 1)

    sent = tensor + context + exchange
    launched = soft.kernels + soft.routed_kernels * s.routed / layers
    kernels = k.kernel * launched * (3 + full) + k.contention * m.slow_fabric * t * ((p > 1) & (t > 1))
    device = forward + backward + again + sent
    launch = _softly(device, kernels) - device
    whole = device + launch

    # The head, on the last stage.
    rate = _rate(m, k)
    numbers = _traffic(m, k)
    weights, width = s.hidden * s.vocab / t, s.vocab / t + s.hidden
    head = (2 + trained) * (2 * tokens * weights + numbers * (weights + tokens * width)) / rate
    head = head + tokens * s.vocab / t * _LOGITS / (m.memory_rate * k.memory)

    most, last = layers_of_ranks(s.layers, c)
    ends_last = last * whole + head >= most * whole
    on = np.where(ends_last, last, most)
    headed = np.where(ends_last, 1.0, 0.0)
    slowest = on * whole + headed * head
    share_forward = (forward + 0.5 * sent) / np.maximum(device, 1e-30)

    # The pipeline: what passes from stage to stage, and the bubble.
    size = hidden_state / np.where((c.sp > 0) | (soft.shards_pipe > 0), t, 1.0)
    far = c.devices > m.node
    hop = np.where(far, size / net.nic + net.nic_latency, size / net.link + net.link_latency) * (p > 1)
    # Interleaved schedules send while they compute; what remains is the way through the empty pipeline.
    beside = (c.schedule == _INTERLEAVED) & (c.overlap > 0)
    pipe = 2 * hop * (np.where(beside, 0.0, (1 - k.pipe_hidden) * micro * v) + p - 1)
    pipe = pipe + k.turn * (micro * v + p - 1) * (p > 1)
    others = s.layers * whole + head - slowest
    split_off = back - 1.0  # W in units of the forward products
    fill = np.where(c.schedule == _INTERLEAVED, 1 / v, 1.0)
    thirds = np.maximum(0.0, 1 - 2 * (split_off * products) / np.maximum(whole, 1e-30))
    twice = np.maximum(0.0, 1 - 3 * (split_off * products) / np.maximum(whole, 1e-30))
    fill = np.where(c.schedule == _ZERO_BUBBLE, thirds, fill)
    fill = np.where(c.schedule == _ZB_V, twice, np.where(c.schedule == _DUALPIPE_V, 0.5 * twice, fill))
    bubble = np.maximum(others, 0.0) * fill * (p > 1)

    plain, routed, end = parameters_of_rank(s, c, on)
    ends = end * np.where(p > 1, 1.0, 2.0 - s.tied)
    plain = plain + ends
    gradients, gathers, gradients_hidden, gathers_hidden = _data_parallel(
        c, net, soft, k, plain, routed, np.maximum(1.0, soft.calls * on), micro, slowest, share_forward, trained
    )
    held_here = plain / np.where(c.zero > 0, c.dp * c.cp, 1.0)
    held_here = held_here + routed / np.where(c.zero > 0, np.maximum(c.dp * c.cp / c.ep, 1.0), 1.0)
    memory = m.memory_rate * k.memory
    updates = held_here * (2 * soft.optimizer + soft.gradients + 2 * soft.weights)
    cleared = (plain + routed) / np.where(c.zero > 2, c.dp * c.cp, 1.0) * 2 * soft.gradients
    optimizer = trained * (updates + cleared) / memory
    offload = trained * (c.offload > 0) * held_here * (soft.gradients + 2.0) / HOST_RATE
    offload = offload + (c.offload >= _OFFLOAD_ALL) * micro * 2 * held_here * 2.0 / HOST_RATE

    each = micro * on
    nodes = np.maximum(1.0, c.devices / m.node)
    computed = micro * slowest + bubble
    zero = np.zeros_like(slowest)
    return Seconds(
        projections=each * (1 + back) * layer.projections,
        mlp=each * (1 + back) * layer.mlp,
        attention=each * (layer.attention + layer.attention_back),
        experts=each * (1 + back) * layer.experts,
        scan=each * (1 + back) * layer.scan,
        head=micro * headed * head,
        elementwise=each * 3 * layer.elementwise,
        recompute=each * again,
        launch=each * launch,
        tensor=each * tensor,
        context=each * context,
        exchange=each * exchange,
        pipe=pipe,
        gradients=gradients,
        gathers=gathers,
        bubble=bubble,
        optimizer=optimizer,
        offload=offload,
        stragglers=computed * k.stragglers * np.log2(nodes),
        fixed=k.step + zero,
        tensor_hidden=each * tensor_hidden,
        context_hidden=each * context_hidden,
        gradients_hidden=gradients_hidden,
        gathers_hidden=gathers_hidden,
    )


def _context(
    s: Shape, c: Candidates, k: Coefficients, net: _Network, layer: _Layer, tokens: Num, full: Num
) -> tuple[Num, Num]:
    """What a layer sends around its sequence, exposed and hidden: keys and values in a ring beside the attention, or
    all of queries, keys and values exchanged for heads; the states of a scan."""
    if not np.any(c.cp > 1):
        return 0.0, 0.0
    t, layers = c.tp, np.maximum(s.layers, 1)
    route = _route(net, c.cp, t)
    held = s.keys / np.minimum(t, np.maximum(s.kv_heads, 1.0))
    attends = (s.dense + s.routed) / layers
    ring = attends * route.gather(2 * _BYTES * tokens * c.cp * held) * (3 + full)
    swapped = attends * route.exchange(_BYTES * tokens * (s.queries / t + held)) * 2 * (2 + full)
    around = c.cp_kind < _ULYSSES
    hidden = np.minimum(ring, layer.attention + layer.attention_back) * k.gather_hidden * c.overlap * around
    exposed = np.where(around, ring, swapped) - hidden
    if not _absent(s.scan):
        exposed = (
            exposed + s.scan / layers * route.gather(_BYTES * c.micro_batch * c.cp * s.inner / t * s.scan_state) * 2
        )
    several = c.cp > 1
    return exposed * several, hidden * several


def _data_parallel(
    c: Candidates,
    net: _Network,
    soft: Software,
    k: Coefficients,
    plain: Num,
    routed: Num,
    calls: Num,
    micro: Num,
    slowest: Num,
    share_forward: Num,
    trained: Num,
) -> tuple[Num, Num, Num, Num]:
    """Exposed reductions of gradients, exposed gathers of weights, and what of both is hidden.

    ZeRO 0: an all-reduce of gradients after the last backward pass; 1 and 2: reduced, then the updated weights are
    gathered; 3: weights are gathered for each pass of each micro-batch, gradients reduced after each.
    """
    ranks = c.dp * c.cp
    route = _route(net, ranks, c.tp)
    reduced = route.gather(soft.gradients * plain, calls) * trained
    gathered = route.gather(_BYTES * plain, calls)
    if not isinstance(routed, float):
        fewer = np.maximum(ranks / c.ep, 1.0)
        among = _route(net, fewer, c.tp * c.ep)
        present = (routed > 0) * (fewer > 1)
        reduced = reduced + among.gather(soft.gradients * routed, calls) * trained * present
        gathered = gathered + among.gather(_BYTES * routed, calls) * present
    sharded = c.zero >= 3
    window = (1 - share_forward) * slowest
    after = reduced * np.where(c.zero == 0, 2.0, 1.0)
    hidden = np.minimum(after, window) * k.gradient_hidden * c.overlap
    once = gathered * (c.zero > 0) * trained
    early = np.minimum(once, share_forward * slowest) * k.gradient_hidden * c.overlap
    each = 2 * gathered + reduced
    beside = np.minimum(each, slowest) * k.gather_hidden * c.overlap
    return (
        np.where(sharded, 0.0, after - hidden),
        np.where(sharded, micro * (each - beside), once - early),
        np.where(sharded, 0.0, hidden),
        np.where(sharded, micro * beside, early),
    )
