"""Parameters of a model, and those of one rank under any strategy, in closed form. No torch here.

Symbols: V vocab, d hidden, H heads, K kv_heads, h head_dim, f ffn_hidden, X experts, s shared_experts; E ssm_expand,
J = E*d/P Mamba heads of width P, G ssm_groups, N ssm_state, w ssm_conv; n ranks that shards lie on.

A layer of attention has 2*d*h*(H+K) + 3*d*f + 2*d (Llama: Touvron et al. 2023, arXiv 2302.13971, section 2.2); with
experts 3*d*f*(X+s) + X*d instead of 3*d*f (Mixtral: arXiv 2401.04088, section 2.1); a Mamba-2 layer
d*(3*E*d + 2*G*N + J) + (w+1)*(E*d + 2*G*N) + 3*J + E*d + d (Dao & Gu 2024, arXiv 2405.21060, section 7).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from hybridpar.mesh import Coordinate
from hybridpar.parallel.sharding import held_box, is_expert, layers_of_stage, stages_of
from hybridpar.specs import ModelSpec, Strategy

Shape = tuple[int, ...]
BYTES: Mapping[str, int] = {"fp64": 8, "fp32": 4, "bf16": 2}


def parameter_shapes(model: ModelSpec) -> dict[str, Shape]:
    """Shape of every parameter of the one-device model by name, in the order of the model."""
    shapes: dict[str, Shape] = {"embed.weight": (model.vocab, model.hidden)}
    for layer, kind in enumerate(model.layer_kinds):
        shapes |= {f"blocks.{layer}.{name}": shape for name, shape in layer_shapes(kind, model).items()}
    shapes["norm.weight"] = (model.hidden,)
    if not model.tied_embeddings:
        shapes["head.weight"] = (model.vocab, model.hidden)
    return shapes


def layer_shapes(kind: str, model: ModelSpec) -> dict[str, Shape]:
    """Shape of every parameter of one layer, by its name in the layer."""
    return _mamba2_shapes(model) if kind == "M" else _attention_shapes(kind, model)


def _attention_shapes(kind: str, model: ModelSpec) -> dict[str, Shape]:
    d, f = model.hidden, model.ffn_hidden
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    shapes: dict[str, Shape] = {
        "norm1.weight": (d,),
        "attention.wq.weight": (queries, d),
        "attention.wk.weight": (keys, d),
        "attention.wv.weight": (keys, d),
        "attention.wo.weight": (d, queries),
        "norm2.weight": (d,),
    }
    if kind == "A":
        return shapes | _swiglu_shapes("mlp", d, f)
    experts = model.experts
    shapes |= {
        "mlp.router.weight": (experts, d),
        "mlp.experts.w_gate": (experts, f, d),
        "mlp.experts.w_up": (experts, f, d),
        "mlp.experts.w_down": (experts, d, f),
    }
    return shapes | (_swiglu_shapes("mlp.shared", d, f * model.shared_experts) if model.shared_experts else {})


def _swiglu_shapes(prefix: str, d: int, f: int) -> dict[str, Shape]:
    return {f"{prefix}.w_gate.weight": (f, d), f"{prefix}.w_up.weight": (f, d), f"{prefix}.w_down.weight": (d, f)}


def _mamba2_shapes(model: ModelSpec) -> dict[str, Shape]:
    d, inner, heads = model.hidden, model.ssm_inner, model.ssm_heads
    shared, width = model.ssm_groups * model.ssm_state, model.ssm_conv
    shapes: dict[str, Shape] = {"norm.weight": (d,)}
    shapes |= {f"mamba.{name}": (heads,) for name in ("A_log", "D", "dt_bias")}
    shapes |= {f"mamba.w_{name}.weight": (size, d) for name, size in _projections(inner, shared, heads).items()}
    for name, channels in (("x", inner), ("B", shared), ("C", shared)):
        shapes |= {f"mamba.conv_{name}.weight": (channels, 1, width), f"mamba.conv_{name}.bias": (channels,)}
    return shapes | {"mamba.norm.weight": (inner,), "mamba.w_out.weight": (d, inner)}


def _projections(inner: int, shared: int, heads: int) -> dict[str, int]:
    return {"z": inner, "x": inner, "B": shared, "C": shared, "dt": heads}


def parameter_count(model: ModelSpec) -> int:
    """Parameters of the whole model."""
    return sum(math.prod(shape) for shape in parameter_shapes(model).values())


@dataclass(frozen=True)
class Held:
    """One parameter of a rank: its name on the rank, the stage it belongs to, and the shape that the rank computes
    with; of a weight that ties embedding and head on two stages, the head's copy is `head.weight`."""

    name: str
    stage: int
    shape: Shape

    @property
    def elements(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)

    @property
    def is_expert(self) -> bool:
        """Whether ep deals it out."""
        return is_expert(self.name)

    def padded(self, ranks: int) -> int:
        """Elements on all of `ranks` ranks when FSDP2 shards it: rows are padded to a multiple of the ranks."""
        rows, *rest = self.shape
        return -(-rows // ranks) * ranks * math.prod(rest)

    def shard(self, ranks: int, index: int) -> int:
        """Elements on one of the ranks, without padding."""
        rows, *rest = self.shape
        size = -(-rows // ranks)
        return max(0, min(rows, (index + 1) * size) - index * size) * math.prod(rest)


def held_parameters(model: ModelSpec, strategy: Strategy, coordinate: Coordinate) -> tuple[Held, ...]:
    """What one rank computes with, stage by stage, before FSDP2 shards it."""
    shapes = parameter_shapes(model)
    found = []
    for stage in stages_of(strategy, coordinate.pp):
        for name in _names_of_stage(model, strategy, stage, shapes):
            dense = "embed.weight" if name == "head.weight" and model.tied_embeddings else name
            box = held_box(dense, shapes[dense], model, strategy, coordinate)
            found.append(Held(name, stage, tuple(span.stop - span.start for span in box)))
    return tuple(found)


def _names_of_stage(model: ModelSpec, strategy: Strategy, stage: int, shapes: Mapping[str, Shape]) -> list[str]:
    layers = {f"blocks.{layer}." for layer in layers_of_stage(model, strategy, stage)}
    names = [name for name in shapes if name.startswith("blocks.") and f"blocks.{name.split('.')[1]}." in layers]
    first, last = stage == 0, stage == strategy.stages - 1
    ends = ["embed.weight"] if first else []
    head = ["norm.weight"] + (["head.weight"] if not (model.tied_embeddings and first) else [])
    return [*ends, *names, *(head if last else [])]
