"""From a real cluster and a run on it to a scale model with the same dimensionless numbers. Pure; no torch here.

The lengths hidden, ffn, head width, vocabulary, sequence, and Mamba's state, head width and chunk shrink by one factor
k; layers, heads, experts, batch, degrees and topology stay. Then

    work of matrix products    k^3   (b*S*d^2, b*S^2*d)
    bytes moved                k^2   (gradients d^2, activations b*S*d)
    bytes held                 k^2

and with rate F [FLOP/s], link B [B/s], latency a [s], memory M [B], e bytes of a number, and a prime for the model:

    communication / compute    kept by  B'/F' = (B/F) / k * e'/e
    memory pressure            kept by  M' = k^2 * M * e'/e
    latency / compute          kept by  a' * F' = k^3 * a * F

This is Buckingham's theorem (Buckingham 1914, "On physically similar systems") with the quantities of a training step.
What it does not keep is named and counted by `groups`: what rounding of lengths costs; terms of lower order; work on
single elements (norms, softmax, optimizer), which shrinks by k^2 only; and, once a testbed is measured, its rates and
latencies instead of those asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hybridpar.comm.wire import wire_bytes
from hybridpar.legality import infeasible_reason
from hybridpar.mesh import AXES, RankGrid
from hybridpar.specs import ClusterSpec, ModelSpec, RunSpec, Strategy
from hybridpar.testbed.clusters import RealCluster
from hybridpar.testbed.plan import Plan
from hybridpar.theory.activations import peak_activations
from hybridpar.theory.coverage import NotCoveredError
from hybridpar.theory.model_flops import model_flops_per_step
from hybridpar.theory.parameters import BYTES
from hybridpar.theory.rank_flops import flops_of_step
from hybridpar.theory.state import state_of_rank
from hybridpar.theory.traffic import traffic_of_step

if TYPE_CHECKING:
    from hybridpar.testbed.check import Check

REAL_PRECISION = "bf16"
_LEAST_VOCABULARY = 256  # bytes of text


class SimilarityError(ValueError):
    """No scale model can be made of this; one sentence, naming the field, its value and what is legal."""


@dataclass(frozen=True)
class Rates:
    """What a cluster or a testbed does: FLOP/s of a device, B/s of its link and of its share of the node's uplink
    (each direction), bytes of its memory, seconds a message takes however short; None: not known."""

    flops_per_s: float
    intra_bytes_s: float
    inter_bytes_s: float
    memory_bytes: float
    intra_latency_s: float | None = None
    inter_latency_s: float | None = None


@dataclass(frozen=True)
class ScaleModel:
    """A real run and its model; `latency` of `asked` is what similarity wants, which no testbed of ours sets."""

    factor: float
    real: RunSpec
    model: RunSpec
    real_rates: Rates
    asked: Rates
    nodes: int
    devices_per_node: int

    def plan(self, device_share: float) -> Plan:
        """The testbed: rates as asked, and devices of this share of a core.

        Args:
            device_share: the CPU time over wall time at which a rank reaches `asked.flops_per_s` on products of the
                model's size, which only a measurement tells (`hybridpar.testbed.check.efficiency_by_side`).

        Raises:
            PlanError: what is asked is beyond what a testbed can do.
        """
        return Plan(
            nodes=self.nodes,
            devices_per_node=self.devices_per_node,
            intra_bit_s=round(8 * self.asked.intra_bytes_s),
            inter_bit_s=round(8 * self.asked.inter_bytes_s * self.devices_per_node),
            device_share=device_share,
            device_memory_bytes=round(self.asked.memory_bytes),
        )


@dataclass(frozen=True)
class Group:
    """One dimensionless number of the real run and of the model; None where it is not known, and `note` why, or what
    keeps the two apart."""

    name: str
    real: float | None
    model: float | None
    note: str = ""

    @property
    def departure(self) -> float | None:
        """Model over real, less one: 0 where they match."""
        if self.real is None or self.model is None:
            return None
        if self.real == 0:
            return 0.0 if self.model == 0 else None
        return self.model / self.real - 1


def scale(run: RunSpec, cluster: RealCluster, factor: float, device_flops_per_s: float) -> ScaleModel:
    """The scale model of a run.

    Args:
        run: at full size. Its cluster gives nodes and devices a node; its precision is what the model computes in. The
            real one computes in bf16, the precision of the cluster's rates.
        cluster: what it would run on.
        factor: k, above 0 and at most 1.
        device_flops_per_s: F', what a device of the testbed does on products of the model's size [FLOP/s].

    Raises:
        SimilarityError: the factor is out of range or leaves nothing of a length, the ranks do not fill the nodes, or
            the strategy is illegal for the model.
    """
    if not 0 < factor <= 1:
        raise SimilarityError(f"factor={factor:g} is not legal; legal: above 0, at most 1")
    if not device_flops_per_s > 0:
        raise SimilarityError(f"device_flops_per_s={device_flops_per_s:g} is not legal; legal: above 0")
    nodes, per_node = _topology(run)
    real = run.model_copy(update={"workload": run.workload.model_copy(update={"precision": REAL_PRECISION})})
    model = _scaled_run(run, factor)
    bytes_ratio = BYTES[run.workload.precision] / BYTES[REAL_PRECISION]
    real_rates = Rates(
        flops_per_s=cluster.flops_per_s,
        intra_bytes_s=cluster.intra_bytes_s,
        inter_bytes_s=cluster.uplink_bytes_s(per_node) / per_node,
        memory_bytes=cluster.memory_bytes,
        intra_latency_s=cluster.intra_latency_s,
        inter_latency_s=cluster.inter_latency_s,
    )
    return ScaleModel(
        factor=factor,
        real=real,
        model=model,
        real_rates=real_rates,
        asked=_asked(real_rates, factor, device_flops_per_s, bytes_ratio),
        nodes=nodes,
        devices_per_node=per_node,
    )


def _topology(run: RunSpec) -> tuple[int, int]:
    nodes, world = run.cluster.nodes, run.strategy.devices
    per_node = run.cluster.devices_per_node or -(-world // nodes)
    if nodes * per_node != world:
        raise SimilarityError(
            f"cluster.nodes={nodes} with {per_node} devices each are not the {world} devices of strategy "
            f"{run.strategy.label}; legal: nodes times devices_per_node equal to {world}"
        )
    return nodes, per_node


def _asked(real: Rates, k: float, flops_per_s: float, bytes_ratio: float) -> Rates:
    slower = flops_per_s / real.flops_per_s
    return Rates(
        flops_per_s=flops_per_s,
        intra_bytes_s=real.intra_bytes_s * slower / k * bytes_ratio,
        inter_bytes_s=real.inter_bytes_s * slower / k * bytes_ratio,
        memory_bytes=real.memory_bytes * k**2 * bytes_ratio,
        intra_latency_s=_times(real.intra_latency_s, k**3 / slower),
        inter_latency_s=_times(real.inter_latency_s, k**3 / slower),
    )


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


# Lengths


def _scaled_run(run: RunSpec, k: float) -> RunSpec:
    strategy = run.strategy
    # ring attention cuts a sequence into two pieces a cp rank, sequence parallelism each piece over tp ranks
    seq_len = _length("workload.seq_len", run.workload.seq_len, k, 2 * strategy.cp * strategy.tp)
    workload = run.workload.model_copy(update={"seq_len": seq_len})
    model = ModelSpec.model_validate(_scaled_model(run.model, strategy, k))
    scaled = run.model_copy(update={"model": model, "workload": workload})
    # of model, workload and strategy only: how many nodes there may be is the launcher's to say
    reason = infeasible_reason(scaled.model_copy(update={"cluster": ClusterSpec()}))
    if reason:
        raise SimilarityError(f"factor={k:g} leaves no legal model: {reason}")
    return scaled


def _scaled_model(model: ModelSpec, strategy: Strategy, k: float) -> dict[str, Any]:
    tp = strategy.tp
    new = model.model_dump()
    new["name"] = f"{model.name}-scaled-{1 / k:g}"
    new["vocab"] = max(_LEAST_VOCABULARY, _length("model.vocab", model.vocab, k, tp))
    new["hidden"] = _length("model.hidden", model.hidden, k, 2)
    if model.head_dim:
        new["head_dim"] = _length("model.head_dim", model.head_dim, k, 2)
        new["ffn_hidden"] = _length("model.ffn_hidden", model.ffn_hidden, k, tp)
    if model.ssm_state:
        for name in ("ssm_state", "ssm_head_dim", "ssm_chunk"):
            new[name] = _length(f"model.{name}", getattr(model, name), k, 1)
        # the number of Mamba heads, which tp divides, stays: it and the width of a head make the width of the model
        new["hidden"] = max(1, model.ssm_heads * new["ssm_head_dim"] // model.ssm_expand)
    return new


def _length(name: str, value: int, k: float, multiple: int) -> int:
    """k times the length, to the nearest multiple that is not zero."""
    if value * k < 0.5:
        raise SimilarityError(f"factor={k:g} leaves nothing of {name}={value}; legal: at least {0.5 / value:.2g}")
    return max(1, round(value * k / multiple)) * multiple


# Groups


def rates_of(found: Check, asked: Rates) -> Rates:
    """What a check of the testbed found, for `groups`; what it could not see (links of a node with one device) is taken
    as asked. The share of an uplink is what each device had while all of a node's used it at once."""
    read = {reading.name: reading.measured for reading in found.readings}
    return Rates(
        flops_per_s=read["device"],
        intra_bytes_s=read.get("message inside a node", 8 * asked.intra_bytes_s) / 8,
        inter_bytes_s=read.get("all-reduce across nodes, all at once", 8 * asked.inter_bytes_s) / 8,
        memory_bytes=asked.memory_bytes,
        intra_latency_s=read.get("latency inside a node"),
        inter_latency_s=read.get("latency across nodes"),
    )


def groups(scaled: ScaleModel, measured: Rates | None = None) -> tuple[Group, ...]:
    """The dimensionless numbers of both, from the closed forms of the package.

    Args:
        scaled: both runs.
        measured: what the testbed really does; left out, the model is taken to do what is asked of it, but for
            latencies, which nothing sets.
    """
    unset = replace(scaled.asked, intra_latency_s=None, inter_latency_s=None)
    rates = measured or unset
    found = [*_compute_groups(scaled, rates), *_memory_groups(scaled, rates), *_elementwise(scaled), *_lengths(scaled)]
    if measured:
        found += _against_asked(scaled.asked, measured)
    return tuple(found)


def _compute_groups(scaled: ScaleModel, rates: Rates) -> Iterator[Group]:
    try:
        real = _per_compute(scaled, scaled.real, scaled.real_rates)
        model = _per_compute(scaled, scaled.model, rates)
    except NotCoveredError as reason:
        yield Group("communication/compute", None, None, str(reason))
        return
    for where in sorted(real.keys() | model.keys()):
        full, small = real.get(where, _NOTHING), model.get(where, _NOTHING)
        yield Group(f"communication/compute, {where}", full.wire, small.wire)
        yield Group(f"latency/compute, {where}", full.latency, small.latency, _latency_note(scaled, full, small))


def _latency_note(scaled: ScaleModel, full: _PerCompute, small: _PerCompute) -> str:
    notes = []
    if small.latency is None:
        notes.append(f"not measured; similarity asks for {_latencies(scaled.asked)}")
    if full.calls != small.calls:
        notes.append(
            f"{full.calls:.4g} calls became {small.calls:.4g}: buckets of fixed bytes hold more of a smaller model"
        )
    return "; ".join(notes)


def _latencies(asked: Rates) -> str:
    parts = [
        f"{seconds * 1e6:.3g} us {where}"
        for seconds, where in ((asked.intra_latency_s, "inside a node"), (asked.inter_latency_s, "across"))
        if seconds is not None
    ]
    return " and ".join(parts)


@dataclass(frozen=True)
class _PerCompute:
    """Seconds of wire and of latency (None: not known) over seconds of products, and the calls of a rank in a step, all
    means of the ranks looked at."""

    wire: float
    latency: float | None
    calls: float


_NOTHING = _PerCompute(0.0, 0.0, 0.0)


def _per_compute(scaled: ScaleModel, run: RunSpec, rates: Rates) -> dict[str, _PerCompute]:
    """By axes and by whether they leave a node."""
    ranks = _ranks(run.strategy.devices)
    grid = RankGrid.of(run.strategy)
    compute = sum(sum(flops_of_step(run, rank).values()) for rank in ranks) / rates.flops_per_s
    found: dict[str, _PerCompute] = {}
    for rank, row in ((one, row) for one in ranks for row in traffic_of_step(run, one)):
        crosses = _crosses(grid, rank, row.group, scaled.devices_per_node)
        rate = rates.inter_bytes_s if crosses else rates.intra_bytes_s
        latency = rates.inter_latency_s if crosses else rates.intra_latency_s
        where = f"{row.group} ({'across' if crosses else 'inside'} nodes)"
        before = found.get(where, _NOTHING)
        waits = None if latency is None else (before.latency or 0.0) + row.calls * latency / compute
        wire = wire_bytes(row.op, row.group_size, row.bytes) / rate / compute
        found[where] = _PerCompute(before.wire + wire, waits, before.calls + row.calls / len(ranks))
    return found


def _ranks(world: int) -> Sequence[int]:
    """First, last and middle: the ends of a pipeline, and what lies between."""
    return sorted({0, world // 2, world - 1})


def _crosses(grid: RankGrid, rank: int, label: str, per_node: int) -> bool:
    axes = [axis for axis in AXES if axis in label.split("+")]
    return len({member // per_node for member in grid.group_of(rank, *axes)}) > 1


def _memory_groups(scaled: ScaleModel, rates: Rates) -> Iterator[Group]:
    try:
        real, model = _held(scaled.real), _held(scaled.model)
    except NotCoveredError as reason:
        yield Group("bytes held/memory", None, None, str(reason))
        return
    for name in real:
        yield Group(f"{name}/memory", real[name] / scaled.real_rates.memory_bytes, model[name] / rates.memory_bytes)


def _held(run: RunSpec) -> dict[str, int]:
    """Bytes of the fullest of the ranks looked at, by category and in all."""
    by_rank = []
    for rank in _ranks(run.strategy.devices):
        state = state_of_rank(run, rank)
        by_rank.append(
            {
                "parameters": state.parameters + state.gathered,
                "gradients": state.gradients,
                "optimizer": state.optimizer,
                "activations": peak_activations(run, rank),
            }
        )
    largest = {name: max(held[name] for held in by_rank) for name in by_rank[0]}
    return {**largest, "all": max(sum(held.values()) for held in by_rank)}


def _elementwise(scaled: ScaleModel) -> Iterator[Group]:
    """Numbers that are touched one by one, for each FLOP of products: they weigh 1/k times as much in the model."""
    note = "work on single elements shrinks by k^2, products by k^3: it weighs about 1/k times as much in the model"
    yield Group("elements of hidden states/FLOPs", _hidden(scaled.real), _hidden(scaled.model), note)
    if set(scaled.real.model.layer_kinds) & set("AE"):
        yield Group("scores in softmax/FLOPs", _scores(scaled.real), _scores(scaled.model), note)


def _hidden(run: RunSpec) -> float:
    return run.tokens_per_step * run.model.hidden * run.model.layers / model_flops_per_step(run)


def _scores(run: RunSpec) -> float:
    model, length = run.model, run.workload.seq_len
    attention = sum(kind in "AE" for kind in model.layer_kinds)
    return run.workload.global_batch * attention * model.heads * length**2 / model_flops_per_step(run)


def _lengths(scaled: ScaleModel) -> Iterator[Group]:
    """Each length over the hidden width of its own model: what rounding did to the proportions."""
    real, model = scaled.real, scaled.model
    names = ("ffn_hidden", "head_dim", "vocab", "ssm_state", "ssm_head_dim", "ssm_chunk")
    lengths = [(name, getattr(real.model, name), getattr(model.model, name)) for name in names]
    lengths.append(("seq_len", real.workload.seq_len, model.workload.seq_len))
    asked = scaled.factor * real.model.hidden
    yield Group("hidden/(k*hidden)", 1.0, model.model.hidden / asked, _rounding(asked, model.model.hidden))
    for name, full, small in lengths:
        if full:
            note = _rounding(scaled.factor * full, small)
            yield Group(f"{name}/hidden", full / real.model.hidden, small / model.model.hidden, note)


def _rounding(asked: float, got: int) -> str:
    return "" if asked == got else f"{asked:g} became {got}"


def _against_asked(asked: Rates, measured: Rates) -> Iterator[Group]:
    for name, unit in (("flops_per_s", "FLOP/s"), ("intra_bytes_s", "B/s"), ("inter_bytes_s", "B/s"),
                       ("intra_latency_s", "s"), ("inter_latency_s", "s")):  # fmt: skip
        wanted, found = getattr(asked, name), getattr(measured, name)
        if wanted is not None and found is not None:
            yield Group(f"{name}, measured/asked", 1.0, found / wanted, f"{wanted:.4g} {unit} asked, {found:.4g} found")
