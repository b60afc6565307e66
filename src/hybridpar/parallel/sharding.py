"""Which dim of which parameter tensor parallelism divides. No torch here.

Column-parallel matrices split their outputs (dim 0), row-parallel ones their inputs (dim 1); what belongs to a
head or to a vocabulary entry follows it. Parameters that no rule names are replicated.
"""

from __future__ import annotations

from collections.abc import Sequence

from hybridpar.specs import ModelSpec

_OUTPUTS = (
    *("wq.weight", "wk.weight", "wv.weight", "w_gate.weight", "w_up.weight"),
    *("w_z.weight", "w_x.weight", "w_dt.weight", "conv_x.weight", "conv_x.bias"),
    *("mamba.A_log", "mamba.D", "mamba.dt_bias", "mamba.norm.weight"),
    *("embed.weight", "head.weight"),
)
_INPUTS = ("wo.weight", "w_down.weight", "w_out.weight")
_STATE_PROJECTIONS = ("w_B.weight", "w_C.weight", "conv_B.weight", "conv_B.bias", "conv_C.weight", "conv_C.bias")


def tensor_dim(name: str, model: ModelSpec, tp: int) -> int | None:
    """The dim of parameter `name` that tp divides, or None where every tp rank holds it whole."""
    if tp == 1:
        return None
    if name.endswith(_OUTPUTS):
        return 0
    if name.endswith(_INPUTS):
        return 1
    return 0 if name.endswith(_STATE_PROJECTIONS) and model.ssm_groups % tp == 0 else None


def has_partial_gradient(name: str, model: ModelSpec, tp: int, *, sequence_parallel: bool) -> bool:
    """Whether a replicated parameter sees only a part of the work on each tp rank, so that gradients must be summed.

    True for B and C of Mamba-2 where all heads share them (each rank has some of the heads), and with sequence
    parallelism for the norms (each rank has some of the tokens).
    """
    if tensor_dim(name, model, tp) is not None or tp == 1:
        return False
    return name.endswith(_STATE_PROJECTIONS) or sequence_parallel


def part(length: int, parts: int, index: int) -> slice:
    """Part `index` of a dim, as even as whole numbers allow: the first `length % parts` parts have one more."""
    base, extra = divmod(length, parts)
    first = index * base + min(index, extra)
    return slice(first, first + base + (index < extra))


def stage_layers(layers: int, stages: int, stage: int) -> range:
    """The layers of one pipeline stage, in order; earlier stages take the layers that do not divide evenly."""
    span = part(layers, stages, stage)
    return range(span.start, span.stop)


def names_on_stage(names: Sequence[str], layers: int, stages: int, stage: int) -> list[str]:
    """The parameters of one stage: its layers, the embedding on the first, final norm and head on the last."""
    here = {str(layer) for layer in stage_layers(layers, stages, stage)}

    def is_here(name: str) -> bool:
        first, second, *_ = (*name.split("."), "")
        if first == "blocks":
            return second in here
        return stage == 0 if first == "embed" else stage == stages - 1

    return [name for name in names if is_here(name)]
