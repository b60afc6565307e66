"""A model, a workload and a machine as numbers (or arrays of numbers, one for each candidate). No torch here.

Whatever the cost model multiplies is a field here; a field is one number for all candidates (the planner: one model,
many strategies) or an array with one for each (validation: many runs of many models at once).

Symbols: L layers, h hidden, a heads, S tokens of a sequence, V vocabulary. `dense`, `routed` and `scan` count layers of
attention with an MLP, of attention with experts, and of Mamba-2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np

from hybridpar.cost.hardware import Accelerator
from hybridpar.specs import ModelSpec
from hybridpar.theory.gpu_memory import LLAMA, Recipe, Variant

# A float, or an array of floats.
Num = Any


@dataclass(frozen=True)
class Shape:
    """A model with the block that it is built of; widths in numbers, not bytes."""

    hidden: Num
    heads: Num
    kv_heads: Num
    head_dim: Num
    ffn: Num
    vocab: Num
    dense: Num
    routed: Num
    scan: Num
    expert_ffn: Num
    experts: Num
    top_k: Num
    shared_ffn: Num
    tied: Num
    matrices: Num  # of an MLP: 3 gated, 2 not
    norm_vectors: Num
    biases: Num
    dropout: Num
    positions: Num
    fused: Num  # attention in one kernel, scores never stored
    inner: Num
    scan_heads: Num
    scan_state: Num
    scan_groups: Num
    scan_conv: Num
    scan_chunk: Num
    scan_width: Num

    @property
    def layers(self) -> Num:
        """L."""
        return self.dense + self.routed + self.scan

    @property
    def queries(self) -> Num:
        """Width of all query heads."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> Num:
        """Width of all key heads."""
        return self.kv_heads * self.head_dim


def shape_of(model: ModelSpec, variant: Variant = LLAMA) -> Shape:
    """The numbers of a `ModelSpec` in the blocks of a `Variant`."""
    kinds = model.layer_kinds
    return Shape(
        hidden=model.hidden,
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        ffn=model.ffn_hidden,
        vocab=model.vocab,
        dense=kinds.count("A"),
        routed=kinds.count("E"),
        scan=kinds.count("M"),
        expert_ffn=model.ffn_hidden if model.experts else 0,
        experts=model.experts,
        top_k=model.top_k,
        shared_ffn=model.shared_experts * model.ffn_hidden,
        tied=float(model.tied_embeddings),
        matrices=3 if variant.mlp == "swiglu" else 2,
        norm_vectors=variant.norm_vectors,
        biases=float(variant.biases),
        dropout=float(variant.dropout),
        positions=variant.positions,
        fused=float(variant.fused_attention),
        inner=model.ssm_inner,
        scan_heads=model.ssm_heads,
        scan_state=model.ssm_state,
        scan_groups=model.ssm_groups,
        scan_conv=model.ssm_conv,
        scan_chunk=model.ssm_chunk,
        scan_width=model.ssm_head_dim,
    )


@dataclass(frozen=True)
class Load:
    """What a step computes: S, sequences of the global batch, and what is trained.

    `trains` is 1 where every weight has a gradient, 0 where only small adapters do (then no weight gradients are
    computed, sent or kept).
    """

    seq: Num
    batch: Num
    trains: Num = 1.0


@dataclass(frozen=True)
class Machine:
    """One device among its like. FLOP/s, bytes and bytes a second; seconds."""

    peak: Num  # of matrix products, in the number format of the run
    ceiling: Num  # share of it that the best product reaches
    attention_peak: Num  # bf16 peak times its ceiling
    memory_rate: Num
    memory_bytes: Num
    link: Num
    nic: Num
    node: Num
    operand: Num = 2.0  # bytes of a number in a product, mean of both factors and the result
    in_switch: Num = 1.0  # how much faster switches in a node make an all-reduce than a ring is
    density: Num = 1.0  # FLOP/s a watt over those of an A100
    slow_fabric: Num = 0.0  # 1 where the network between nodes is Ethernet with its own transport (EFA, TCP)


@dataclass(frozen=True)
class Software:
    """What a training program does its own way: a `Recipe` of memory and how it runs a layer.

    `kernels` that the host launches for the forward pass of a layer, `routed_kernels` beside them where it has experts
    (routing, permutation, exchange); `hides_tp` 1 where collectives of tensor parallelism run beside products, 0.5
    where only those of the backward pass do; `calls` collectives that move gradients or weights of a layer;
    `shards_pipe` 1 where what a pipeline sends is cut over the tp ranks.
    """

    kernels: Num = 24.0
    routed_kernels: Num = 50.0
    hides_tp: Num = 0.5
    shards_pipe: Num = 0.0
    calls: Num = 0.25
    weights: Num = 2.0
    gradients: Num = 4.0
    optimizer: Num = 12.0
    passing: Num = 0.0
    buckets: Num = 0.0
    gathered: Num = 2.0
    mlp_saved: Num = 6.0
    mlp_backward: Num = 6.0
    logit: Num = 6.0
    gather_buffers: Num = 1.0


def software_of(
    recipe: Recipe, *, kernels: float = 24.0, hides_tp: float = 0.5, shards_pipe: bool = False, calls: float = 0.25
) -> Software:
    """A recipe's bytes, with how its program runs a layer."""
    bytes_of = {one.name: float(getattr(recipe, one.name)) for one in fields(Recipe) if one.name != "name"}
    switches = {"hides_tp": float(hides_tp), "shards_pipe": float(shards_pipe)}
    return Software(kernels=kernels, calls=calls, **switches, **bytes_of)


# NVLink SHARP reduces in the switch from Hopper on: 436 GB/s of an all-reduce, 250 to 350 of a gather on 8 H100 (bus
# bandwidth in data/published/collective_bench.csv: ultrascale_net, xla_table).
_WITH_SWITCH_REDUCTIONS = ("H100-8", "H100-9", "H200-1", "H800", "B200", "B300", "GB")
_IN_SWITCH = 1.25
# Factors in the format, results in bf16.
_OPERAND = {"fp32": 4.0, "bf16": 2.0, "fp8": 4 / 3, "fp4": 1.0}
# FlashAttention 2 reaches half as much of an H100 as of an A100 (Shah et al. 2024, arXiv 2407.08608, section 1: 35% of
# the peak; Dao 2023, arXiv 2307.08691: 72% of an A100's): it does not use the instructions that came with Hopper.
_OLD_ATTENTION = 0.5


def machine_of(
    device: Accelerator,
    precision: str = "bf16",
    node: int = 0,
    *,
    slow_fabric: bool = False,
    old_attention: bool = False,
) -> Machine:
    """An accelerator as numbers, for matrix products in `precision`; `node` devices share the fast links, if not as
    many as usual; `slow_fabric` where nodes talk over Ethernet with its own transport; `old_attention` where the fused
    attention kernel is older than the accelerator.

    Raises:
        HardwareError: the accelerator has no peak for this precision.
    """
    return Machine(
        peak=device.peak(precision),
        ceiling=device.ceiling(precision),
        attention_peak=device.peak("bf16") * device.ceiling("bf16") * (_OLD_ATTENTION if old_attention else 1.0),
        memory_rate=device.memory_rate,
        memory_bytes=device.memory_bytes,
        link=device.link,
        nic=device.nic,
        node=float(node or device.node),
        operand=_OPERAND[precision],
        in_switch=_IN_SWITCH if device.name.startswith(_WITH_SWITCH_REDUCTIONS) else 1.0,
        density=device.density,
        slow_fabric=float(slow_fabric),
    )


T = TypeVar("T", Shape, Load, Machine, Software)


def stack(parts: Sequence[T]) -> T:
    """Many as one, every field an array."""
    kind = type(parts[0])
    return kind(
        **{one.name: np.array([getattr(part, one.name) for part in parts], dtype=np.float64) for one in fields(kind)}
    )


def take(whole: T, index: slice) -> T:
    """The part of every array that `index` names; single numbers stay."""
    kind = type(whole)
    return kind(**{one.name: _part(getattr(whole, one.name), index) for one in fields(kind)})


def _part(value: Num, index: slice) -> Num:
    return value[index] if isinstance(value, np.ndarray) and value.ndim else value
