"""The arithmetic of what closed forms predict: one layer under each strategy, and activations over a step. No torch.

Numbers come from `hybridpar.theory` alone; what a layer costs is the difference between models that differ by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import pandas as pd

from hybridpar.legality import infeasible_reason
from hybridpar.mesh import RankGrid
from hybridpar.parallel.sharding import stages_of
from hybridpar.specs import RunSpec, parse_run_spec
from hybridpar.theory.activations import LOSS, Piece, peak_activations, pieces_of_stage
from hybridpar.theory.parameters import held_parameters
from hybridpar.theory.rank_flops import flops_of_step
from hybridpar.theory.schedule import actions_of_rank
from hybridpar.theory.traffic import traffic_of_step

# One model of each kind of layer, at its public size.
LAYERS: Mapping[str, str] = {
    "llama-3-8b": "attention (GQA), SwiGLU",
    "mamba2-2.7b": "Mamba-2",
    "mixtral-8x7b": "attention (GQA), experts",
}
_DEGREE = 4
STRATEGIES: Mapping[str, Mapping[str, Any]] = {
    "one device": {},
    "selective recompute": {"recompute": "selective"},
    "full recompute": {"recompute": "full"},
    "TP": {"tp": _DEGREE},
    "TP+SP": {"tp": _DEGREE, "sp": True},
    "CP ring": {"cp": _DEGREE},
    "CP Ulysses": {"cp": _DEGREE, "cp_kind": "ulysses"},
    "EP": {"dp": _DEGREE, "ep": _DEGREE},
}
_MICRO_BATCH = 1
_WORKLOAD: Mapping[str, Any] = {"seq_len": 4096, "precision": "bf16"}

# Of tp, so that a rank's tokens are its own and no view of the whole batch, which would be held besides.
_PIPELINE: Mapping[str, Any] = {"tp": 2, "sp": True, "pp": 4}
_PIPELINE_WORKLOAD: Mapping[str, Any] = {"seq_len": 8192, "global_batch": 8, "micro_batch": 1, "precision": "bf16"}
_PIPELINE_MODEL = "llama-3-8b"
SCHEDULES: Mapping[str, str] = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "interleaved",
    "zero-bubble": "zero-bubble",
    "zb-v": "ZB-V",
    "dualpipe-v": "DualPipe-V",
}
_STAGES_A_RANK = {"interleaved": 2, "zb-v": 2, "dualpipe-v": 2}
_WORK = {"F": 1, "B": 2, "I": 1, "W": 1}  # of a pass, in forward passes


@dataclass(frozen=True)
class LayerCost:
    """One layer and micro-batch on one rank: `again` are bytes that its backward pass makes anew; `bytes` those of the
    tensors that the rank gives to collectives and sends, in `calls`."""

    parameters: int
    forward: int
    recompute: int
    kept: int
    again: int
    calls: int
    bytes: int

    def __sub__(self, other: LayerCost) -> LayerCost:
        mine, theirs = asdict(self), asdict(other)
        return LayerCost(**{name: mine[name] - theirs[name] for name in mine})


def layers() -> pd.DataFrame:
    """`LayerCost` of every legal pair of `LAYERS` and `STRATEGIES`, with `layer`, `model`, `method` and `ranks`."""
    rows = []
    for model, layer in LAYERS.items():
        for method, strategy in _strategies_of(model).items():
            ranks = layer_run(model, strategy).strategy.devices
            names = {"layer": layer, "model": model, "method": method, "ranks": ranks}
            rows.append(names | asdict(layer_cost(model, strategy)))
    return pd.DataFrame(rows)


def _strategies_of(model: str) -> dict[str, Mapping[str, Any]]:
    """Those that are legal for the model; Mamba-2 passes states on, whatever kind of context parallelism is named."""
    found = {}
    for method, strategy in STRATEGIES.items():
        run = layer_run(model, strategy)
        if infeasible_reason(run, on_text=False):
            continue
        if run.strategy.cp > 1 and set(run.model.layer_kinds) == {"M"}:
            found["CP states"] = strategy
        else:
            found[method] = strategy
    return found


def layer_run(model: str, strategy: Mapping[str, Any], layers: int = 1, micro_batches: int = 1) -> RunSpec:
    """`layers` layers of a model on `micro_batches` micro-batches a replica."""
    batch = strategy.get("dp", 1) * _MICRO_BATCH * micro_batches
    return parse_run_spec(
        {
            "model": {"preset": model, "layers": layers},
            "workload": {**_WORKLOAD, "micro_batch": _MICRO_BATCH, "global_batch": batch},
            "strategy": dict(strategy),
        }
    )


def layer_cost(model: str, strategy: Mapping[str, Any]) -> LayerCost:
    """What one more layer costs the first rank, for each micro-batch: what is sent once a step falls out."""

    def more_of(micro_batches: int) -> LayerCost:
        return _cost(layer_run(model, strategy, 2, micro_batches)) - _cost(layer_run(model, strategy, 1, micro_batches))

    one = more_of(1)
    sent = more_of(2) - one
    return replace(one, calls=sent.calls, bytes=sent.bytes)


def _cost(run: RunSpec) -> LayerCost:
    flops, pieces = flops_of_step(run, 0), pieces_of_stage(run, 0, 0)
    sent = [row for row in traffic_of_step(run, 0) if row.op != "recv"]  # another rank's send
    held = held_parameters(run.model, run.strategy, RankGrid.of(run.strategy).coordinate(0))
    return LayerCost(
        parameters=sum(one.elements for one in held),
        forward=flops["forward"],
        recompute=flops.get("recompute", 0),
        kept=sum(piece.kept_bytes for piece in pieces),
        again=sum(piece.again_bytes for piece in pieces),
        calls=sum(row.calls for row in sent),
        bytes=sum(row.bytes for row in sent),
    )


def schedule_run(schedule: str) -> RunSpec:
    """The pipeline whose activations are drawn, under one schedule."""
    return parse_run_spec(
        {
            "model": {"preset": _PIPELINE_MODEL},
            "workload": _PIPELINE_WORKLOAD,
            "strategy": {**_PIPELINE, "schedule": schedule, "virtual": _STAGES_A_RANK.get(schedule, 1)},
        }
    )


def schedules() -> pd.DataFrame:
    """Bytes of activations on the first, a middle and the last pp rank after each action of a step.

    Columns: schedule, place (`first`, ...), pp, `work` (done so far, in forward passes of all layers of a rank), `held`
    after it, `peak` (the most at any time, the same in all rows of a rank).
    """
    rows = []
    for schedule in SCHEDULES:
        run = schedule_run(schedule)
        a_rank = run.strategy.devices // run.strategy.pp
        for place, pp in (("first", 0), ("middle", run.strategy.pp // 2), ("last", run.strategy.pp - 1)):
            peak = peak_activations(run, pp * a_rank)
            rows += [
                {"schedule": schedule, "place": place, "pp": pp, "work": work, "held": held, "peak": peak}
                for work, held in held_over_work(run, pp * a_rank)
            ]
    return pd.DataFrame(rows)


def held_over_work(run: RunSpec, rank: int) -> list[tuple[float, int]]:
    """Work done and bytes of activations held, at the start of a step and after each action of `rank`.

    A forward pass adds what it keeps, a backward pass lets go of it; where it comes in two parts, the first lets go of
    the loss alone. Of dense models under tensor parallelism without recomputation: what else there is, is told by
    `peak_activations`.
    """
    place = RankGrid.of(run.strategy).coordinate(rank)
    stages = stages_of(run.strategy, place.pp)
    pieces = {stage: pieces_of_stage(run, rank, stage) for stage in stages}
    passes: dict[tuple[int, int], int] = {}
    work, line = 0.0, [(0.0, 0)]
    for action in actions_of_rank(run, place.pp):
        key = (action.stage, action.micro_batch)
        match action.kind:
            case "F":
                passes[key] = _kept(pieces[action.stage])
            case "I":
                passes[key] = _kept([piece for piece in pieces[action.stage] if piece.name != LOSS])
            case _:
                del passes[key]
        work += _WORK[action.kind] / len(stages)
        line.append((work, sum(passes.values())))
    return line


def _kept(pieces: list[Piece]) -> int:
    return sum(piece.kept_bytes for piece in pieces)
