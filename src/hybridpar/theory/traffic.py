"""What one rank of the torch engine sends in an optimizer step, in closed form: calls and bytes. No torch here.

Symbols: b sequences of a micro-batch, S tokens of a rank's sequence before tp cuts it (S_all/c), d hidden, V vocab,
m micro-batches, e bytes of a number, u bytes of a statistic (at least 4), t tp, c cp, n ranks of the group at hand,
H, K heads and key/value heads of a rank, h head_dim; E*d inner width of Mamba-2, G groups, N state, w convolution;
X experts, k top_k.

A layer of attention and MLP sends under tensor parallelism, in each micro-batch, 2 all-reduces of b*S*d forward and 2
backward (Shoeybi et al. 2019, arXiv 1909.08053, section 3), with sequence parallelism 4 all-gathers and 4
reduce-scatters of as much (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2); a layer of Mamba-2 half of that.
The loss over a split vocabulary adds 3*b*S statistics. Ring attention passes 2*b*K*S*h numbers n-1 times forward,
n-1 times backward and as many statistics n times (Liu et al. 2023, arXiv 2310.01889); Ulysses exchanges
b*(H+2K)*S*h and b*H*S*h numbers, each way (Jacobs et al. 2023, arXiv 2309.14509). ZeRO: Rajbhandari et al. 2020,
arXiv 1910.02054, section 7. Experts: Lepikhin et al. 2020, arXiv 2006.16668, section 3.1.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from hybridpar.mesh import Axis, Coordinate, RankGrid
from hybridpar.parallel.sharding import (
    has_partial_gradient,
    holder_of_stage,
    holders,
    layers_of_stage,
    stages_of,
)
from hybridpar.segments import segments_per_rank
from hybridpar.specs import RunSpec
from hybridpar.theory.coverage import check_training
from hybridpar.theory.gathering import gathering
from hybridpar.theory.parameters import BYTES, Held, held_parameters
from hybridpar.theory.replicas import Replicas
from hybridpar.theory.routing import arriving_choices
from hybridpar.theory.state import sharded_units, units_of

_COUNT = 8  # bytes of an int64, and of the float64 that norms are summed in


@dataclass(frozen=True)
class Traffic:
    """All calls of one operation over one kind of group on one rank in a step; as `hybridpar.comm.metered.CommRow`.

    `bytes` is the whole tensor: the input of a reduction or an exchange, the output of a gather.
    """

    op: str
    group: str
    group_size: int
    calls: int
    bytes: int


@dataclass(frozen=True)
class SentCall:
    """`times` calls of an operation among `ranks`, each of `bytes`."""

    op: str
    ranks: tuple[int, ...]
    bytes: int
    times: int = 1


def traffic_of_step(run: RunSpec, rank: int) -> tuple[Traffic, ...]:
    """What `rank` sends in one optimizer step, sorted by operation, group and size.

    Where experts are dealt out, how many tokens leave for their experts is known, how many arrive is not: here the load
    is even (`hybridpar.theory.routing`), which is exact for all ranks together where nothing is dropped.

    Raises:
        NotCoveredError: see `hybridpar.theory.coverage`.
    """
    forms = _Rank(run, rank)
    return summed_traffic(forms.grid, forms.calls())


def summed_traffic(grid: RankGrid, sent: Iterable[SentCall]) -> tuple[Traffic, ...]:
    """By operation and kind of group; a rank that is alone sends nothing."""
    calls: Counter[tuple[str, str, int]] = Counter()
    sizes: Counter[tuple[str, str, int]] = Counter()
    for call in sent:
        if len(call.ranks) < 2 or not call.times:
            continue
        key = (call.op, grid.label(call.ranks), len(call.ranks))
        calls[key] += call.times
        sizes[key] += call.times * call.bytes
    return tuple(Traffic(*key, calls[key], sizes[key]) for key in sorted(calls))


class _Rank:
    """The calls of one rank, mechanism by mechanism."""

    def __init__(self, run: RunSpec, rank: int) -> None:
        check_training(run)
        self.run, self.rank = run, rank
        self.grid = RankGrid.of(run.strategy)
        self.place: Coordinate = self.grid.coordinate(rank)
        self.replicas = Replicas(run.strategy, rank)
        self.held = held_parameters(run.model, run.strategy, self.place)
        self.stages = stages_of(run.strategy, self.place.pp)
        workload, strategy = run.workload, run.strategy
        self.e = BYTES[workload.precision]
        self.u = max(4, self.e)
        self.m = run.micro_batches
        self.b = workload.micro_batch
        self.s = workload.seq_len // strategy.cp
        self.hidden = self.b * self.s * run.model.hidden * self.e  # bytes of the hidden states of a micro-batch
        self.kinds = [
            kind
            for stage in self.stages
            for kind in (run.model.layer_kinds[layer] for layer in layers_of_stage(run.model, strategy, stage))
        ]
        self.is_first, self.is_last = 0 in self.stages, strategy.stages - 1 in self.stages

    def calls(self) -> Iterator[SentCall]:
        """Everything, in no order."""
        yield from self._tensor()
        yield from self._context()
        yield from self._experts()
        yield from self._pipeline()
        yield from self._sharded_parameters()
        yield from self._averages()
        yield from self._shared_gradients()
        yield from self._norm()
        yield from self._updated_elsewhere()

    def _group(self, *axes: Axis) -> tuple[int, ...]:
        return self.grid.group_of(self.rank, *axes)

    def _mine(self, partition: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        return next(ranks for ranks in partition if self.rank in ranks)

    # Mechanisms

    def _tensor(self) -> Iterator[SentCall]:
        strategy = self.run.strategy
        if strategy.tp == 1:
            return
        group = self._group("tp")
        again = strategy.recompute == "full"
        enter = leave = repeated_enter = repeated_leave = 0
        for kind in self.kinds:
            borders = 1 if kind == "M" else 2
            shared_norm = kind == "M" and self.run.model.ssm_groups % strategy.tp != 0
            enter += borders
            leave += borders - shared_norm
            repeated_enter += borders * again
            repeated_leave += (borders - 1) * again  # the last one ends the block: nothing saved depends on it
            if shared_norm:
                yield from self._shared_norm(group, again)
        leave += self.is_first
        enter += self.is_last
        if strategy.sp:
            yield SentCall("all_gather", group, self.hidden, self.m * (enter + leave + repeated_enter))
            yield SentCall("reduce_scatter", group, self.hidden, self.m * (enter + leave + repeated_leave))
        else:
            yield SentCall("all_reduce", group, self.hidden, self.m * (enter + leave + repeated_leave))
        if self.is_last:
            yield SentCall("all_reduce", group, self.b * self.s * self.u, self.m)  # the largest logit of each token
            yield SentCall("all_reduce", group, 2 * self.b * self.s * self.u, self.m)  # sum of exponentials, target

    def _shared_norm(self, group: tuple[int, ...], again: bool) -> Iterator[SentCall]:
        """A Mamba-2 layer whose norm groups span ranks reduces d columns and its sums of squares in one call."""
        model = self.run.model
        both = self.b * self.s * (model.hidden + model.ssm_groups) * self.u
        if self.run.strategy.sp:
            yield SentCall("reduce_scatter", group, both, self.m * (1 + again))
            yield SentCall("all_gather", group, both, self.m)
        else:
            yield SentCall("all_reduce", group, both, self.m * (1 + again))

    def _context(self) -> Iterator[SentCall]:
        strategy = self.run.strategy
        if strategy.cp == 1:
            return
        again = strategy.recompute == "full"
        for kind in self.kinds:
            if kind == "M":
                yield from self._passed_states(again)
            elif strategy.cp_kind == "ring":
                yield from self._ring(again)
            else:
                yield from self._ulysses(again)
            if kind == "E":
                yield from self._sequence_statistics(1 + again)

    def _ring(self, again: bool) -> Iterator[SentCall]:
        group, ranks = self._group("cp"), self.run.strategy.cp
        numbers = 2 * self.b * self._kv_heads * self.s * self.run.model.head_dim
        place = group.index(self.rank)
        for op, peer in (("send", group[(place + 1) % ranks]), ("recv", group[place - 1])):
            ends = (self.rank, peer)
            yield SentCall(op, ends, numbers * self.e, self.m * (ranks - 1) * (2 + again))
            yield SentCall(op, ends, numbers * self.u, self.m * ranks)

    def _ulysses(self, again: bool) -> Iterator[SentCall]:
        group, ranks, h = self._group("cp"), self.run.strategy.cp, self.run.model.head_dim
        heads, kv_heads = self.run.model.heads // self.run.strategy.tp, self._kv_heads
        kv_heads *= ranks // math.gcd(ranks, kv_heads)  # repeated until every rank has one
        for count in (heads + 2 * kv_heads, heads):
            yield SentCall("all_to_all", group, self.b * count * self.s * h * self.e, self.m * (2 + again))

    def _passed_states(self, again: bool) -> Iterator[SentCall]:
        model, strategy = self.run.model, self.run.strategy
        group, pieces = self._group("cp"), segments_per_rank(model, strategy)
        inner, groups = model.ssm_inner // strategy.tp, self._ssm_groups
        tail = (model.ssm_conv - 1) * (inner + 2 * groups * model.ssm_state)
        state = (model.ssm_state + 1) * inner  # what a piece adds, and by how much it decays what was before
        scan_again = strategy.recompute != "none"  # the states are exchanged within the scan, the tails before it
        for numbers, size, repeated in ((tail, self.e, again), (state, self.u, scan_again)):
            whole = strategy.cp * self.b * pieces * numbers * size
            yield SentCall("all_gather", group, whole, self.m * (1 + repeated))
            yield SentCall("reduce_scatter", group, whole, self.m)

    def _sequence_statistics(self, times: int) -> Iterator[SentCall]:
        """What a router must know of the tokens on other ranks."""
        model, group = self.run.model, self._group("cp")
        if model.aux_loss:
            yield SentCall("all_reduce", group, model.experts * self.u, self.m * 2 * times)
        if model.capacity_factor:
            pieces = segments_per_rank(model, self.run.strategy)
            asked = len(group) * self.b * model.top_k * pieces * model.experts * _COUNT
            yield SentCall("all_gather", group, asked, self.m * times)

    def _experts(self) -> Iterator[SentCall]:
        strategy, model = self.run.strategy, self.run.model
        layers = self.kinds.count("E")
        if strategy.ep == 1 or not layers:
            return
        again = strategy.recompute == "full"
        leaving = self.b * self.s * model.top_k
        arriving = arriving_choices(self.run, self.place, leaving)
        times = self.m * layers
        yield SentCall("all_to_all", self.replicas.ep, model.experts * _COUNT, times * (1 + again))
        # Tokens leave and their gradients come back; answers to those that arrived leave, and theirs come back.
        for choices, calls in ((leaving, 1 + again + 1), (arriving, 1 + again + 1)):
            yield SentCall("all_to_all", self.replicas.ep, choices * model.hidden * self.e, times * calls)

    def _pipeline(self) -> Iterator[SentCall]:
        """Hidden states to the stage after this one and their gradients back, where it is on another rank."""
        strategy = self.run.strategy
        if strategy.pp == 1:
            return
        ring = self._group("pp")
        size = self.hidden // strategy.tp if strategy.sp else self.hidden
        for stage in self.stages:
            for neighbour in (stage - 1, stage + 1):
                if not 0 <= neighbour < strategy.stages:
                    continue
                peer = ring[holder_of_stage(strategy, neighbour)]
                if peer != self.rank:
                    yield SentCall("send", (self.rank, peer), size, self.m)
                    yield SentCall("recv", (self.rank, peer), size, self.m)

    def _sharded_parameters(self) -> Iterator[SentCall]:
        """FSDP2: each block, its experts and what is left are gathered before use, their gradients scattered."""
        units = sharded_units(self.run, self.held, self.replicas)
        times = gathering(self.run, self.place.pp, units).times
        members = units_of(self.held)
        for unit in units:
            ranks = self.replicas.sharding(members[unit.name][0])
            yield SentCall("all_gather", ranks, unit.bytes, times[unit.name])
            yield SentCall("reduce_scatter", ranks, unit.bytes)
            if ranks == self.replicas.shards:
                yield SentCall("all_reduce", self.replicas.copies, unit.bytes // len(ranks))

    def _averages(self) -> Iterator[SentCall]:
        """Gradients of whole replicas: all of a stage in one call, or in the buckets of DDP."""
        strategy = self.run.strategy
        if strategy.zero < 2:
            for stage in self.stages:
                sizes = [
                    one.elements * self.e for one in self.held if one.stage == stage and not self.replicas.is_apart(one)
                ]
                by_ddp = strategy.overlap and (strategy.pp == 1 or strategy.schedule in ("1f1b", "gpipe"))
                for bucket in ddp_buckets(sizes[::-1]) if by_ddp else [sum(sizes)]:
                    yield SentCall("all_reduce", self.replicas.all, bucket)
        experts = sum(one.elements for one in self.held if self.replicas.is_apart(one)) * self.e
        if experts and strategy.zero < 2:
            yield SentCall("all_reduce", self.replicas.across_ep, experts)

    def _shared_gradients(self) -> Iterator[SentCall]:
        """Parameters that several tp ranks hold, each with a part of the gradient; an embedding on two stages."""
        strategy, model = self.run.strategy, self.run.model
        by_holders: Counter[int] = Counter()
        for one in self.held:
            if has_partial_gradient(one.name, model, strategy.tp, sequence_parallel=strategy.sp):
                by_holders[holders(one.name, model, strategy.tp)] += self._gradient_elements(one)
        for count, elements in by_holders.items():
            yield SentCall("all_reduce", self._mine(self.grid.blocks("tp", count)), elements * self.e)
        if not model.tied_embeddings or strategy.pp == 1:
            return
        ring = self._group("pp")
        ends = tuple(sorted({ring[holder_of_stage(strategy, stage)] for stage in (0, strategy.stages - 1)}))
        for one in self.held:
            if one.name in ("embed.weight", "head.weight") and self.rank in ends:
                yield SentCall("all_reduce", ends, self._gradient_elements(one) * self.e)

    def _gradient_elements(self, one: Held) -> int:
        ranks = self.replicas.sharding(one)
        return one.shard(len(ranks), ranks.index(self.rank)) if ranks else one.elements

    def _norm(self) -> Iterator[SentCall]:
        """The squares of the global norm: one number over each group whose ranks hold different parts."""
        strategy = self.run.strategy
        groups = [self.replicas.shards] if strategy.zero >= 2 else []
        if strategy.ep > 1:
            groups += [self.replicas.ep, *([self.replicas.across_ep] if strategy.zero >= 2 else [])]
        groups += [self._group("tp"), self._group("pp")]
        for group in groups:
            yield SentCall("all_reduce", group, _COUNT)

    def _updated_elsewhere(self) -> Iterator[SentCall]:
        """ZeRO-1: every parameter comes from the rank that updated it."""
        if self.run.strategy.zero != 1:
            return
        for one in self.held:
            group = self.replicas.across_ep if self.replicas.is_apart(one) else self.replicas.all
            yield SentCall("broadcast", group, one.elements * self.e)

    @property
    def _kv_heads(self) -> int:
        return max(1, self.run.model.kv_heads // self.run.strategy.tp)

    @property
    def _ssm_groups(self) -> int:
        groups, tp = self.run.model.ssm_groups, self.run.strategy.tp
        return groups // tp if groups % tp == 0 else groups


def ddp_buckets(sizes: Sequence[int], first: int = 2**20, others: int = 25 * 2**20) -> list[int]:
    """Bytes of DDP's buckets: a bucket takes gradients, in the order in which they come, until it is full.

    Source: torch.nn.parallel.DistributedDataParallel (bucket_cap_mb of 25, a first bucket of 1 MiB); Li et al. 2020,
    arXiv 2006.15704, section 3.2.3.
    """
    buckets: list[int] = []
    size = 0
    for one in sizes:
        size += one
        if size >= (others if buckets else first):
            buckets.append(size)
            size = 0
    return buckets + [size] * bool(size)
