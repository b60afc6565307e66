"""Which part of which parameter a rank holds. No torch here.

Tensor parallelism: column-parallel matrices split their outputs (dim 0), row-parallel ones their inputs (dim 1); what
belongs to a head or to a vocabulary entry follows it. Key/value heads that are fewer than the tp ranks are held by
several of them. Expert parallelism deals out whole experts (dim 0). Parameters that no rule names are replicated.
"""

from __future__ import annotations

from collections.abc import Sequence

from hybridpar.mesh import Coordinate
from hybridpar.specs import ModelSpec, Strategy

_OUTPUTS = (
    *("wq.weight", "wk.weight", "wv.weight", "w_gate.weight", "w_up.weight"),
    *("w_z.weight", "w_x.weight", "w_dt.weight", "conv_x.weight", "conv_x.bias"),
    *("mamba.A_log", "mamba.D", "mamba.dt_bias", "mamba.norm.weight"),
    *("embed.weight", "head.weight"),
)
_INPUTS = ("wo.weight", "w_down.weight", "w_out.weight")
_STATE_PROJECTIONS = ("w_B.weight", "w_C.weight", "conv_B.weight", "conv_B.bias", "conv_C.weight", "conv_C.bias")
_KEYS_AND_VALUES = ("wk.weight", "wv.weight")
_EXPERT_DIMS = {"experts.w_gate": 1, "experts.w_up": 1, "experts.w_down": 2}


def tensor_dim(name: str, model: ModelSpec, tp: int) -> int | None:
    """The dim of parameter `name` that tp divides, or None where every tp rank holds it whole."""
    if tp == 1:
        return None
    if name.endswith(_OUTPUTS):
        return 0
    if name.endswith(_INPUTS):
        return 1
    if is_expert(name):
        return next(dim for leaf, dim in _EXPERT_DIMS.items() if name.endswith(leaf))
    return 0 if name.endswith(_STATE_PROJECTIONS) and model.ssm_groups % tp == 0 else None


def is_expert(name: str) -> bool:
    """Whether a parameter belongs to the routed experts, which ep deals out."""
    return name.endswith(tuple(_EXPERT_DIMS))


def holders(name: str, model: ModelSpec, tp: int) -> int:
    """How many neighbouring tp ranks hold the same part of a parameter: several where key/value heads are few."""
    if name.endswith(_KEYS_AND_VALUES):
        return max(1, tp // model.kv_heads)
    return tp if tensor_dim(name, model, tp) is None else 1


def has_partial_gradient(name: str, model: ModelSpec, tp: int, *, sequence_parallel: bool) -> bool:
    """Whether tp ranks that hold the same part each see only some of the work, so that gradients must be summed.

    True for B and C of Mamba-2 where all heads share them and for shared key/value heads (each rank has some of the
    heads), for a router (each rank has some of every expert's width), and with sequence parallelism for the norms
    (each rank has some of the tokens).
    """
    if tp == 1 or holders(name, model, tp) == 1:
        return False
    some_heads = name.endswith((*_STATE_PROJECTIONS, *_KEYS_AND_VALUES, "router.weight"))
    return some_heads or sequence_parallel


def held_box(
    name: str, shape: Sequence[int], model: ModelSpec, strategy: Strategy, coordinate: Coordinate
) -> tuple[slice, ...]:
    """The part of the dense parameter `name` that a rank's model computes with, one slice a dim."""
    box = [slice(0, length) for length in shape]
    if is_expert(name):
        box[0] = part(shape[0], strategy.ep, coordinate.dp % strategy.ep)
    dim = tensor_dim(name, model, strategy.tp)
    if dim is not None:
        same = holders(name, model, strategy.tp)
        box[dim] = part(shape[dim], strategy.tp // same, coordinate.tp // same)
    return tuple(box)


def part(length: int, parts: int, index: int) -> slice:
    """Part `index` of a dim, as even as whole numbers allow: the first `length % parts` parts have one more."""
    base, extra = divmod(length, parts)
    first = index * base + min(index, extra)
    return slice(first, first + base + (index < extra))


def layers_of_stage(model: ModelSpec, strategy: Strategy, stage: int) -> range:
    """The layers of one pipeline stage, in order; unless told otherwise earlier stages take what is left over."""
    if strategy.stage_layers:
        first = sum(strategy.stage_layers[:stage])
        return range(first, first + strategy.stage_layers[stage])
    span = part(model.layers, strategy.stages, stage)
    return range(span.start, span.stop)


def stages_of(strategy: Strategy, pp_rank: int) -> tuple[int, ...]:
    """The stages that one pp rank holds: every pp-th in a loop, or for V-shaped schedules one on the way there and
    one on the way back, so that the first and the last stage share a device."""
    if strategy.schedule in V_SHAPED:
        return (pp_rank, strategy.stages - 1 - pp_rank)[: strategy.virtual]
    return tuple(range(pp_rank, strategy.stages, strategy.pp))


def holder_of_stage(strategy: Strategy, stage: int) -> int:
    """The pp rank that holds a stage."""
    return next(rank for rank in range(strategy.pp) if stage in stages_of(strategy, rank))


V_SHAPED = ("zb-v", "dualpipe-v")
