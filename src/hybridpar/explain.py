"""Where a predicted number comes from: its formula's symbols, its terms and their sum. No torch here.

The formulas themselves are written at the top of the modules of `hybridpar.theory`, in the symbols used here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from hybridpar.mesh import RankGrid
from hybridpar.parallel.sharding import layers_of_stage, stages_of
from hybridpar.specs import RunSpec
from hybridpar.theory import activations, rank_flops, serving, state, traffic
from hybridpar.theory.coverage import NotCoveredError
from hybridpar.theory.parameters import BYTES, held_parameters

QUANTITIES = ("memory", "flops", "comm")


@dataclass(frozen=True)
class Term:
    """One number, what it is of, and its unit."""

    name: str
    value: int
    unit: str


@dataclass(frozen=True)
class Explanation:
    """One quantity of one rank: `terms` under headings; `formula` is the text its module gives; `missing` why there is
    no form."""

    title: str
    formula: str
    terms: tuple[Term, ...] = ()
    missing: str = ""


def inputs(run: RunSpec, rank: int) -> dict[str, object]:
    """The symbols of the forms and their values."""
    model, strategy, workload = run.model, run.strategy, run.workload
    place = RankGrid.of(strategy).coordinate(rank)
    stages = stages_of(strategy, place.pp)
    return {
        "rank": f"{rank} (pp {place.pp}, dp {place.dp}, cp {place.cp}, tp {place.tp})",
        "stages": {stage: len(layers_of_stage(model, strategy, stage)) for stage in stages},
        "b": workload.micro_batch,
        "S": workload.seq_len // strategy.cp,
        "m": run.micro_batches,
        "d": model.hidden,
        "e": BYTES[workload.precision],
        "u": max(4, BYTES[workload.precision]),
        "P (elements)": sum(one.elements for one in held_parameters(model, strategy, place)),
    }


def explain(run: RunSpec, rank: int, quantity: str) -> list[Explanation]:
    """The forms of a quantity (one of `QUANTITIES`), with their terms."""
    return list({"memory": _memory, "flops": _flops, "comm": _comm}[quantity](run, rank))


def _memory(run: RunSpec, rank: int) -> Iterator[Explanation]:
    if run.workload.phase != "train":
        yield _covered("held while serving", serving.__doc__, lambda: _held(run, rank))
        return
    yield _covered("state between steps", state.__doc__, lambda: _state(run, rank))
    yield _covered("activations of one micro-batch", activations.__doc__, lambda: _pieces(run, rank))
    yield _covered(
        "activations at their peak",
        "see the order of passes in hybridpar.theory.schedule",
        lambda: [Term("peak", activations.peak_activations(run, rank), "bytes")],
    )


def _state(run: RunSpec, rank: int) -> list[Term]:
    held = state.state_of_rank(run, rank)
    return [Term(name, getattr(held, name), "bytes") for name in held.__dataclass_fields__]


def _held(run: RunSpec, rank: int) -> list[Term]:
    form = serving.served(run, rank)
    return [Term("parameters", form.parameters, "bytes"), Term("cache", form.cache, "bytes")]


def _pieces(run: RunSpec, rank: int) -> list[Term]:
    place = RankGrid.of(run.strategy).coordinate(rank)
    pieces = [p for stage in stages_of(run.strategy, place.pp) for p in activations.pieces_of_stage(run, rank, stage)]
    kept = [Term(name, size, "bytes") for name, size in activations.tensors(pieces) if size]
    again = [
        Term(f"{piece.name} (made again in the backward pass)", piece.again_bytes, "bytes")
        for piece in pieces
        if piece.again_bytes
    ]
    return kept + again


def _flops(run: RunSpec, rank: int) -> Iterator[Explanation]:
    if run.workload.phase != "train":
        yield _covered(_served_step(run), serving.__doc__, lambda: _terms(serving.served(run, rank, _last(run)).flops))
        return
    yield _covered("matrix products of a step", rank_flops.__doc__, lambda: _terms(rank_flops.flops_of_step(run, rank)))


def _terms(flops: Mapping[str, int]) -> list[Term]:
    return [Term(phase, count, "FLOPs") for phase, count in flops.items()]


def _last(run: RunSpec) -> int:
    return run.workload.steps - 1


def _served_step(run: RunSpec) -> str:
    what = {"prefill": "a prefill", "decode": "the last decoded token"}
    return f"matrix products of {what[run.workload.phase]}"


def _comm(run: RunSpec, rank: int) -> Iterator[Explanation]:
    if run.workload.phase != "train":
        last = _last(run)
        yield _covered("sent", serving.__doc__, lambda: _rows(serving.served(run, rank, last).traffic))
        return
    yield _covered("sent in a step", traffic.__doc__, lambda: _rows(traffic.traffic_of_step(run, rank)))


def _rows(sent: Iterable[traffic.Traffic]) -> list[Term]:
    return [
        Term(f"{row.op} over {row.group}, {row.group_size} ranks, {row.calls} calls", row.bytes, "bytes")
        for row in sent
    ]


def _covered(title: str, formula: str | None, terms: Callable[[], list[Term]]) -> Explanation:
    try:
        return Explanation(title, formula or "", tuple(terms()))
    except NotCoveredError as reason:
        return Explanation(title, formula or "", missing=str(reason))
