"""From strategies to seconds, bytes and the chance of running out of memory. No torch here.

    prediction = predict_many(model, workload, cluster, accelerator("H100-80G"), candidates)
    prediction.seconds, prediction.parts["pipe"], prediction.bytes, prediction.p_oom

A million candidates take about a second on one core; they are computed in blocks that fit a core's cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from hybridpar.cost import memory, step
from hybridpar.cost.coefficients import RAW, Coefficients
from hybridpar.cost.doubt import Doubt
from hybridpar.cost.hardware import Accelerator
from hybridpar.cost.shape import Load, Machine, Num, Shape, Software, machine_of, shape_of, software_of, take
from hybridpar.cost.space import Array, Candidates, of_strategy
from hybridpar.specs import ClusterSpec, ModelSpec, RunSpec, WorkloadSpec
from hybridpar.theory.gpu_memory import LLAMA, MEGATRON, Recipe, Variant
from hybridpar.theory.model_flops import FLOP_CONVENTION, forward_flops

MFU_CONVENTION = FLOP_CONVENTION + "; over the peak of the number format that the run computes in"
_BLOCK = 8192


@dataclass(frozen=True)
class Prediction:
    """One entry a candidate. Seconds, bytes, tokens a second; `parts` and `held` by name, the former adding up to
    `seconds` (those that end in _hidden left out), the latter to `bytes`."""

    seconds: Array
    low: Array
    high: Array
    parts: Mapping[str, Array]
    bytes: Array
    held: Mapping[str, Array]
    p_oom: Array
    tokens_per_s: Array
    mfu: Array

    def __len__(self) -> int:
        return len(self.seconds)


def predict_many(
    model: ModelSpec,
    workload: WorkloadSpec,
    cluster: ClusterSpec,
    hardware: Accelerator,
    candidates: Candidates,
    parameters: Coefficients = RAW,
    *,
    variant: Variant = LLAMA,
    recipe: Recipe = MEGATRON,
    doubt: Doubt | None = None,
) -> Prediction:
    """Every candidate's training step of one workload on one cluster.

    `workload.micro_batch` is not read: each candidate has its own. Legality is not asked here (see
    `hybridpar.legality`): what does not divide is computed as if it did.

    Raises:
        HardwareError: the accelerator has no peak for the workload's precision.
        ValueError: a workload that does not train.
    """
    if workload.phase != "train":
        raise ValueError(f"workload.phase={workload.phase} is no training; see hybridpar.cost.serving")
    machine = machine_of(hardware, workload.precision, cluster.devices_per_node)
    load = Load(float(workload.seq_len), float(workload.global_batch))
    flops = 3.0 * forward_flops(model, workload.global_batch, workload.seq_len)
    software = software_of(recipe)
    return evaluate(shape_of(model, variant), load, machine, software, candidates, parameters, flops, doubt or Doubt())


def predict(
    run: RunSpec,
    hardware: Accelerator,
    parameters: Coefficients = RAW,
    *,
    variant: Variant = LLAMA,
    recipe: Recipe = MEGATRON,
) -> Prediction:
    """One run: arrays of one entry.

    Raises:
        HardwareError, ValueError: see `predict_many`.
    """
    one = of_strategy(run.strategy, run.workload.micro_batch)
    return predict_many(run.model, run.workload, run.cluster, hardware, one, parameters, variant=variant, recipe=recipe)


def evaluate(
    shape: Shape,
    load: Load,
    machine: Machine,
    software: Software,
    candidates: Candidates,
    coefficients: Coefficients,
    flops: Num,
    doubt: Doubt,
) -> Prediction:
    """As `predict_many`, from numbers or arrays of numbers; `flops` are the model's in a step."""
    blocks = []
    for first in range(0, len(candidates), _BLOCK):
        index = slice(first, first + _BLOCK)
        parts = (take(shape, index), take(load, index), take(machine, index), take(software, index))
        each = flops[index] if isinstance(flops, np.ndarray) else flops
        blocks.append(_block(*parts, candidates[index], coefficients, each, doubt))
    return _joined(blocks)


def _block(
    s: Shape, w: Load, m: Machine, soft: Software, c: Candidates, k: Coefficients, flops: Num, doubt: Doubt
) -> dict[str, Any]:
    with np.errstate(over="ignore"):
        time = step.seconds(s, w, m, soft, c, k)
        kept = memory.held(s, w, soft, c)
        total, size = time.total, kept.total
        off = np.log(np.maximum(m.memory_bytes - doubt.reserve, 1.0) / size) / doubt.spread
        # Logistic in place of the normal distribution: within 0.01 of it (Johnson et al. 1995, section 23.7).
        p_oom = 1 / (1 + np.exp(np.minimum(1.702 * off, 700.0)))
    shape = (len(c),)
    found: dict[str, Any] = {
        "seconds": total,
        "low": total * doubt.low,
        "high": total * doubt.high,
        "bytes": size,
        "p_oom": p_oom,
        "tokens_per_s": w.batch * w.seq / total,
        "mfu": flops / (total * c.devices * m.peak),
    }
    found |= {f"parts.{name}": np.broadcast_to(getattr(time, name), shape) for name in step.PARTS}
    found |= {f"held.{name}": np.broadcast_to(getattr(kept, name), shape) for name in memory.CATEGORIES}
    return found


def _joined(blocks: list[dict[str, Any]]) -> Prediction:
    whole = {name: np.concatenate([one[name] for one in blocks]) for name in blocks[0]}
    plain = {one.name for one in fields(Prediction)}
    return Prediction(
        **{name: value for name, value in whole.items() if name in plain},
        parts={name.removeprefix("parts."): value for name, value in whole.items() if name.startswith("parts.")},
        held={name.removeprefix("held."): value for name, value in whole.items() if name.startswith("held.")},
    )
