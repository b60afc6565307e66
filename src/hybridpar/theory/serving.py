"""What one rank computes, sends and keeps when it serves: a prefill, or one decoded token a sequence. No torch here.

Symbols: b sequences of a group, m groups of a replica, S tokens of a prompt on this rank (S_all/n), n cp ranks, i
tokens decoded before (of each sequence), d hidden, t tp, e bytes of a number, u bytes of a statistic (at least 4); of a
rank: H heads, K key/value heads, V vocab, J Mamba heads of width P, G groups; h head_dim, N state, w convolution.

    FLOPs       a prefill's layers are those of a training step's forward pass (`hybridpar.theory.rank_flops`), chunks
                no longer than the prompt; logits of the last token only, 2*b*d*V. A decoded token is a prompt of one,
                but its attention sees the keys this rank has kept: 4*b*H*h a key
    cache       attention 2*b*K*h*e for each of the tokens it has room for: the prompt's and those to be decoded, both
                divided by n; Mamba-2 b*(w-1)*(J*P + 2*G*N)*e + b*N*J*P*u however long the context is (Dao & Gu 2024,
                arXiv 2405.21060, section 1)
    traffic     forward halves of what training sends (`hybridpar.theory.traffic`): tp 1 all-reduce of b*S*d after each
                of a layer's 2 borders (Mamba-2: 1) and after the embedding, and a gather of each rank's best logit;
                cp the ring, the exchanges or the states of a prompt, then for each decoded token a gather of partial
                softmaxes, b*H*(h+1)*u from each rank (Dao et al. 2023, "Flash-Decoding"); pp hidden states on, tokens
                back to the first stage
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hybridpar.mesh import Axis, RankGrid
from hybridpar.parallel.sharding import layers_of_stage, part
from hybridpar.segments import segments_per_rank
from hybridpar.specs import RunSpec
from hybridpar.theory.coverage import NotCoveredError
from hybridpar.theory.parameters import BYTES, held_parameters
from hybridpar.theory.rank_flops import layer_products
from hybridpar.theory.replicas import Replicas
from hybridpar.theory.routing import arriving_choices
from hybridpar.theory.traffic import SentCall, Traffic, summed_traffic

_TOKEN = 8  # bytes of a token's number, of a count, and of the float64 that a best logit and its token are packed in


@dataclass(frozen=True)
class Served:
    """A prefill, or decoding step `step` (the first is 0) of a rank; bytes are held after it."""

    flops: Mapping[str, int]
    traffic: tuple[Traffic, ...]
    parameters: int
    cache: int


def served(run: RunSpec, rank: int, step: int = 0) -> Served:
    """The forms of one rank; `step` counts decoded tokens, and means nothing in a prefill. Where experts are dealt out,
    the load is even (`hybridpar.theory.routing`).

    Raises:
        NotCoveredError: the run trains.
    """
    if run.workload.phase == "train":
        raise NotCoveredError("workload.phase=train is no serving; legal: prefill, decode")
    forms = _Rank(run, rank, step)
    return Served(
        flops={"forward": forms.flops()},
        traffic=summed_traffic(forms.grid, forms.calls()),
        parameters=forms.e * sum(one.elements for one in held_parameters(run.model, run.strategy, forms.place)),
        cache=forms.cache(),
    )


class _Rank:
    def __init__(self, run: RunSpec, rank: int, step: int) -> None:
        model, strategy, workload = run.model, run.strategy, run.workload
        self.run, self.model, self.strategy, self.rank, self.step = run, model, strategy, rank, step
        self.grid = RankGrid.of(strategy)
        self.place = self.grid.coordinate(rank)
        self.decodes = workload.phase == "decode"
        self.e = BYTES[workload.precision]
        self.u = max(4, self.e)
        self.b, self.m = workload.micro_batch, run.micro_batches
        self.prompt = workload.seq_len // strategy.cp
        self.s = 1 if self.decodes else self.prompt
        self.t = self.b * self.s
        self.is_first, self.is_last = self.place.pp == 0, self.place.pp == strategy.pp - 1
        self.kinds = [model.layer_kinds[i] for i in layers_of_stage(model, strategy, self.place.pp)]
        self.heads, self.kv_heads = model.heads // strategy.tp, max(1, model.kv_heads // strategy.tp)
        self.inner = model.ssm_inner // strategy.tp
        self.shares_norm = model.ssm_groups % strategy.tp != 0
        self.ssm_groups = model.ssm_groups if self.shares_norm else model.ssm_groups // strategy.tp
        self.hidden = self.t * model.hidden * self.e  # bytes of a group's hidden states

    # FLOPs

    def flops(self) -> int:
        """Of all groups."""
        total = sum(layer_products(self.run, self.rank, kind, self.s, self._keys()) for kind in self.kinds)
        if self.is_last:
            span = part(self.model.vocab, self.strategy.tp, self.place.tp)
            total += 2 * self.b * self.model.hidden * (span.stop - span.start)
        return self.m * total

    def _keys(self) -> int | None:
        """Keys that a decoded token finds on this rank, itself among them if they stay here; None in a prefill."""
        if not self.decodes:
            return None
        n, r = self.strategy.cp, self.place.cp
        return self.prompt + (self.step - r) // n + 1  # new tokens go round: rank (S_all + i) mod n = i mod n

    # Cache

    def cache(self) -> int:
        """Of all groups."""
        return self.m * sum(self._states() if kind == "M" else self._keys_and_values() for kind in self.kinds)

    def _keys_and_values(self) -> int:
        room = self.prompt + math.ceil(self.run.workload.steps / self.strategy.cp)
        return 2 * self.b * self.kv_heads * room * self.model.head_dim * self.e

    def _states(self) -> int:
        model = self.model
        channels = self.inner + 2 * self.ssm_groups * model.ssm_state
        return self.b * ((model.ssm_conv - 1) * channels * self.e + model.ssm_state * self.inner * self.u)

    # Traffic

    def calls(self) -> Iterator[SentCall]:
        """Everything, in no order."""
        yield from self._tensor()
        if self.strategy.cp > 1:
            yield from self._decoded_context() if self.decodes else self._prompt_context()
        yield from self._experts()
        yield from self._pipeline()

    def _group(self, *axes: Axis) -> tuple[int, ...]:
        return self.grid.group_of(self.rank, *axes)

    def _tensor(self) -> Iterator[SentCall]:
        if self.strategy.tp == 1:
            return
        group, model = self._group("tp"), self.model
        shared = self.kinds.count("M") if self.shares_norm else 0
        borders = sum(1 if kind == "M" else 2 for kind in self.kinds) - shared + self.is_first
        yield SentCall("all_reduce", group, self.hidden, self.m * borders)
        yield SentCall("all_reduce", group, self.t * (model.hidden + model.ssm_groups) * self.u, self.m * shared)
        if self.is_last:
            yield SentCall("all_gather", group, len(group) * self.b * 2 * _TOKEN, self.m)

    def _prompt_context(self) -> Iterator[SentCall]:
        for kind in self.kinds:
            if kind == "M":
                yield from self._passed_states()
            elif self.strategy.cp_kind == "ring":
                yield from self._ring()
            else:
                yield from self._ulysses()
        if self.is_last and self.s > 1:  # the last token's hidden state lies on one rank
            yield SentCall("broadcast", self._group("cp"), self.b * self.model.hidden * self.e, self.m)

    def _ring(self) -> Iterator[SentCall]:
        group = self._group("cp")
        size = 2 * self.t * self.kv_heads * self.model.head_dim * self.e
        place = group.index(self.rank)
        for op, peer in (("send", group[(place + 1) % len(group)]), ("recv", group[place - 1])):
            yield SentCall(op, (self.rank, peer), size, self.m * (len(group) - 1))

    def _ulysses(self) -> Iterator[SentCall]:
        group = self._group("cp")
        repeated = self.kv_heads * len(group) // math.gcd(len(group), self.kv_heads)
        for heads in (self.heads + 2 * repeated, self.heads):
            yield SentCall("all_to_all", group, self.t * heads * self.model.head_dim * self.e, self.m)

    def _passed_states(self) -> Iterator[SentCall]:
        model, group, pieces = self.model, self._group("cp"), segments_per_rank(self.model, self.strategy)
        tail = (model.ssm_conv - 1) * (self.inner + 2 * self.ssm_groups * model.ssm_state)
        state = (model.ssm_state + 1) * self.inner
        for numbers, size in ((tail, self.e), (state, self.u)):
            yield SentCall("all_gather", group, len(group) * self.b * pieces * numbers * size, self.m)

    def _decoded_context(self) -> Iterator[SentCall]:
        """Every rank has all states; of attention each has a share of the keys."""
        group, attentions = self._group("cp"), len(self.kinds) - self.kinds.count("M")
        size = len(group) * self.b * self.heads * (self.model.head_dim + 1) * self.u
        yield SentCall("all_gather", group, size, self.m * attentions)

    def _experts(self) -> Iterator[SentCall]:
        model, layers = self.model, self.kinds.count("E")
        if self.strategy.ep == 1 or not layers:
            return
        group = Replicas(self.strategy, self.rank).ep
        leaving = self.t * model.top_k
        yield SentCall("all_to_all", group, model.experts * _TOKEN, self.m * layers)
        for choices in (leaving, arriving_choices(self.run, self.place, leaving)):
            yield SentCall("all_to_all", group, choices * model.hidden * self.e, self.m * layers)

    def _pipeline(self) -> Iterator[SentCall]:
        """Hidden states go on; a chosen token goes to the first stage, which waits for it before the next pass (after a
        prefill: at its end, so that the first decoded token has it already)."""
        if self.strategy.pp == 1:
            return
        ring, tokens = self._group("pp"), self.b * _TOKEN
        before, after = ring[self.place.pp - 1], ring[(self.place.pp + 1) % len(ring)]
        if not self.is_first:
            yield SentCall("recv", (self.rank, before), self.hidden, self.m)
        if not self.is_last:
            yield SentCall("send", (self.rank, after), self.hidden, self.m)
        if self.is_last:
            yield SentCall("send", (self.rank, ring[0]), tokens, self.m)
        if self.is_first and not (self.decodes and self.step == 0):
            yield SentCall("recv", (self.rank, ring[-1]), tokens, self.m)
