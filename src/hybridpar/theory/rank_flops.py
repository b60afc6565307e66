"""FLOPs of matrix products that one rank runs in a training step, by phase, in closed form. No torch here.

Not model FLOPs (`hybridpar.theory.model_flops`) but what the device is given: a fused attention's backward pass makes
the scores again, recomputation counts, and what several ranks each do (a router, B and C of Mamba-2) counts on each.

Symbols: b sequences of a micro-batch, S tokens of a rank's sequence, T = b*S, m micro-batches, n cp ranks, d hidden,
t tp; of a rank: H heads, K key/value heads, f ffn_hidden, V vocab, J = E*d/(P*t) Mamba heads of width P, G groups; h
head_dim, N state, C chunk, Q chunks, X experts, k top_k, s shared_experts.

    attention      forward 4*T*d*h*(H+K) for the projections, and the core: 2 products of b*H*S^2*h, backward 5
                   (Dao et al. 2022, arXiv 2205.14135, algorithm 4). Ring attention: a whole block and n-1 halves;
                   Ulysses: H/n heads over n*S tokens
    SwiGLU         6*T*d*f; experts 2*T*d*X + 6*A*d*f for the A choices that arrive, shared experts 6*T*d*f*s
    Mamba-2        see `hybridpar.theory.model_flops.mamba2_flops`
    head           2*T*d*V
    backward       twice the forward, but for the core of attention; and where a sequence is one chunk without a state
                   before it, three products of T*N*J*P less: of C with an empty state one gradient of two, of B X none
    recompute      full: the forward of each block, but for a matrix product that ends it, whose result is not saved;
                   selective: the cores of attention (but ring) and the SSD
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from hybridpar.mesh import RankGrid
from hybridpar.parallel.sharding import layers_of_stage, part, stages_of
from hybridpar.segments import segments_per_rank
from hybridpar.specs import RunSpec
from hybridpar.theory.coverage import check_training
from hybridpar.theory.routing import arriving_choices

PHASES = ("forward", "backward", "recompute")


@dataclass(frozen=True)
class Products:
    """FLOPs of one layer for one micro-batch: forward and backward of what is linear, of the core of attention or the
    SSD, and of the last product, whose result no backward pass needs."""

    linear: int = 0
    core: int = 0
    core_backward: int = 0
    last: int = 0
    core_again: bool = True

    def phases(self, recompute: str) -> Counter[str]:
        """By phase."""
        found = Counter(forward=self.linear + self.core, backward=2 * self.linear + self.core_backward)
        if recompute == "full":
            found["recompute"] = self.linear + self.core - self.last
        elif recompute == "selective" and self.core_again:
            found["recompute"] = self.core
        return found


def flops_of_step(run: RunSpec, rank: int) -> Mapping[str, int]:
    """FLOPs of `rank` in an optimizer step by phase; where experts are dealt out, under an even load.

    Raises:
        NotCoveredError: see `hybridpar.theory.coverage`.
    """
    check_training(run)
    forms = _Forms(run, rank, run.workload.seq_len // run.strategy.cp)
    total: Counter[str] = Counter()
    for kind in forms.kinds:
        total.update(forms.layer(kind).phases(run.strategy.recompute))
    if forms.is_last:
        total.update(Products(linear=forms.head()).phases("none"))
    return {phase: total[phase] * run.micro_batches for phase in PHASES if total[phase]}


def layer_products(run: RunSpec, rank: int, kind: str, length: int, keys: int | None) -> int:
    """FLOPs of one layer's pass over one group of sequences in serving.

    Args:
        run: the whole run.
        rank: whose.
        kind: of the layer, A, E or M.
        length: new tokens of each sequence on this rank.
        keys: tokens that each of them sees, the new ones among them, where they follow others (a decoded token sees
            this rank's share of keys); None where the new ones are a prompt.
    """
    found = _Forms(run, rank, length, keys, serves=True).layer(kind)
    return found.linear + found.core


class _Forms:
    def __init__(self, run: RunSpec, rank: int, length: int, keys: int | None = None, *, serves: bool = False) -> None:
        model, strategy = run.model, run.strategy
        self.run, self.model = run, model
        self.place = RankGrid.of(strategy).coordinate(rank)
        self.tp, self.cp = strategy.tp, strategy.cp
        self.b = run.workload.micro_batch
        self.s, self.keys, self.serves = length, keys, serves
        self.t = self.b * self.s
        stages = stages_of(strategy, self.place.pp)
        self.is_last = strategy.stages - 1 in stages
        self.kinds = [model.layer_kinds[i] for stage in stages for i in layers_of_stage(model, strategy, stage)]

    def layer(self, kind: str) -> Products:
        """One layer of a kind."""
        return self.mamba2() if kind == "M" else self.attention(kind)

    def attention(self, kind: str) -> Products:
        """Attention with an MLP (A) or experts (E)."""
        model, d, h = self.model, self.model.hidden, self.model.head_dim
        heads, kv_heads = model.heads // self.tp, max(1, model.kv_heads // self.tp)
        projections = 4 * self.t * d * h * (heads + kv_heads)
        product = 2 * self.b * heads * h * self._scores()
        core, backward = 2 * product, 5 * product
        again = self.cp == 1 or self.run.strategy.cp_kind == "ulysses"
        feed_forward, last = self._mlp(model.ffn_hidden) if kind == "A" else self._moe()
        return Products(projections + feed_forward, core, backward, last, core_again=again)

    def _scores(self) -> int:
        """Scores of a head that is never divided: S^2; over cp ranks a rank's even share in products, not in tokens."""
        if self.keys is not None:
            return self.s * self.keys
        if self.cp == 1:
            return self.s**2
        if self.run.strategy.cp_kind == "ulysses":
            return self.cp * self.s**2  # 1/n of the heads over n*S tokens
        return self.s**2 + (self.cp - 1) * self.s * (self.s // 2)

    def _mlp(self, width: int) -> tuple[int, int]:
        last = 2 * self.t * self.model.hidden * self._columns(width)
        return 3 * last, last

    def _columns(self, width: int) -> int:
        span = part(width, self.tp, self.place.tp)
        return span.stop - span.start

    def _moe(self) -> tuple[int, int]:
        model = self.model
        router = 2 * self.t * model.hidden * model.experts
        chosen = arriving_choices(self.run, self.place, self.t * model.top_k)
        routed = 6 * chosen * model.hidden * self._columns(model.ffn_hidden)
        if not model.shared_experts:
            return router + routed, 0  # what an expert answers is weighted, and so saved
        shared, last = self._mlp(model.ffn_hidden * model.shared_experts)
        return router + routed + shared, 0 if model.aux_loss else last  # the balance comes after, and is saved

    def mamba2(self) -> Products:
        """A Mamba-2 layer; the pieces of a sequence that lie on cp ranks are sequences of their own."""
        model = self.model
        inner, heads = model.ssm_inner // self.tp, model.ssm_heads // self.tp
        shared_groups = model.ssm_groups % self.tp != 0
        groups = model.ssm_groups if shared_groups else model.ssm_groups // self.tp
        state, width = model.ssm_state, model.ssm_head_dim
        pieces = 1 if self.keys is not None else segments_per_rank(model, self.run.strategy)
        sequences, length = self.b * pieces, self.s // pieces
        chunk = min(model.ssm_chunk, length) if self.cp > 1 or self.serves else model.ssm_chunk
        chunks = -(-length // chunk)
        states = 2 * chunks * chunk * state * heads * width  # B X, or C h
        core = chunks * 2 * chunk**2 * (groups * state + heads * width) + 2 * states
        core += heads * 2 * (chunks - 1) ** 2 * state * width
        skipped = 3 * states if chunks == 1 and self.cp == 1 else 0
        last = 2 * self.t * inner * model.hidden
        linear = 2 * self.t * model.hidden * (2 * inner + 2 * groups * state + heads) + last
        # A norm shared by tp ranks divides after the last product, whose result it saves.
        return Products(linear, sequences * core, sequences * (2 * core - skipped), 0 if shared_groups else last)

    def head(self) -> int:
        """Logits of the rank's slice of the vocabulary."""
        return 2 * self.t * self.model.hidden * self._columns(self.model.vocab)
