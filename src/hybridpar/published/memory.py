"""Peak memory that others measured beside what `hybridpar.theory.gpu_memory` predicts. No torch here.

No number here is fitted, and none belongs to a row or a source: a row's framework decides what is kept (`recipe_of`),
its MLP and attention which block it is (`variant_of`). What a reported number means is read in the program that prints
it:

    nanotron    the table is written by the first rank of all, which is on the first stage, with torch's peak over 2^30
                under the name GB (create_table_log and log_throughput; both the allocated and the reserved peak are
                columns there, and which of them was plotted is not told); stages are cut where the
                cost of matrices so far exceeds the stage's share, the head counting as layers (models/base.py,
                build_model); fewer than p-1 micro-batches are refused (parallel/pipeline_parallel/engine.py)
    others      the largest over ranks; 10^9 bytes where the table says that it was converted, else 2^30 as torch and
                nvidia-smi print them

Predicted are allocated bytes. What allocators reserve beyond them, fragmentation, CUDA's context (about 0.5 GB in
nvidia-smi's numbers) and buffers of NCCL and cuBLAS are not predicted, so that a bias below zero is expected; what is
reserved beside what is allocated is known of simumax_b200 alone (`reserved_bytes`).

Glossary: error = predicted/measured - 1; MAPE its mean absolute value; bias its mean; Spearman the correlation of
ranks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hybridpar.published.training import PublishedRun
from hybridpar.specs import ModelSpec, RunSpec
from hybridpar.theory.gpu_memory import (
    DEEPSPEED_FP16,
    FSDP2,
    GPT,
    LLAMA,
    MEGATRON,
    NANOTRON,
    GpuMemory,
    Recipe,
    Variant,
    memory_of_place,
    peak_of_run,
)

GB, GIB = 10**9, 2**30
# What torch can use of an H100 with 80 GB: nvidia-smi shows 81,559 MiB.
H100_BYTES = 81559 * 2**20
# DeepSpeed's BF16_Optimizer adds bf16 gradients of a pass to fp32 ones (deepspeed/runtime/bf16_optimizer.py).
DEEPSPEED_BF16 = Recipe("deepspeed-bf16", passing=2, gather_buffers=0)


@dataclass(frozen=True)
class Prediction:
    """One row: bytes measured and predicted, or the reason why nothing is predicted; `largest` over all stages."""

    row: PublishedRun
    measured: float | None
    predicted: GpuMemory | None
    largest: int | None
    reason: str

    @property
    def error(self) -> float | None:
        """Predicted over measured, minus 1."""
        if self.measured is None or self.predicted is None:
            return None
        return self.predicted.total / self.measured - 1


@dataclass(frozen=True)
class SourceError:
    """How far predictions are from one source's measurements. `rows` have both, `left_out` only a measurement."""

    source_id: str
    rows: int
    left_out: int
    mape: float
    median: float
    bias: float
    spearman: float


@dataclass(frozen=True)
class Failures:
    """Runs by outcome and prediction: `beyond` the device's memory, `refused` by the pipeline engine (fewer than p-1
    micro-batches), `fitting` without either, `left_out` without a prediction."""

    beyond: int
    refused: int
    fitting: int
    left_out: int


def recipe_of(row: PublishedRun) -> Recipe | str:
    """What the row's framework keeps, or why it is not known."""
    if row.framework.startswith("nanotron"):
        return NANOTRON
    if row.framework == "Megatron-DeepSpeed":
        return DEEPSPEED_BF16 if row.precision.lower().startswith("bf16") else DEEPSPEED_FP16
    if row.framework.startswith("Megatron-LM"):
        return MEGATRON
    if row.framework == "torchtitan":
        return FSDP2
    return f"framework={row.framework!r}: what it keeps is not known"


def variant_of(row: PublishedRun) -> Variant:
    """Which block the row trains; scores are stored where no fused kernel is named."""
    fused = "flash" in row.attn_kernel
    if row.mlp == "gelu":
        return replace(GPT, positions=row.seq_len or 0, fused_attention=fused)
    return replace(LLAMA, fused_attention=fused)


def nanotron_layers(model: ModelSpec, pp: int) -> tuple[int, ...]:
    """Layers of each stage as nanotron cuts them: a block goes to the current stage, and the next stage begins once the
    cost so far (4*d*d of attention and 3*f*d of the MLP a layer, v*d of the head) exceeds its share."""
    layer = 4 * model.heads * model.head_dim * model.hidden + 3 * model.ffn_hidden * model.hidden
    total = model.layers * layer + model.vocab * model.hidden
    counts, stage, done = [0] * pp, 0, 0
    for _ in range(model.layers):
        counts[stage] += 1
        done += layer
        stage += pp * done > total * (stage + 1)
    return tuple(counts)


def measured_bytes(row: PublishedRun) -> float | None:
    """The reported peak in bytes, by the rule above."""
    if row.peak_mem_gb is None:
        return None
    return row.peak_mem_gb * (GB if "convert" in row.mem_def or "=> GB" in row.mem_def else GIB)


def reserved_bytes(row: PublishedRun) -> float | None:
    """What the allocator had reserved at its peak, where the row tells."""
    found = re.search(r"reserved GiB: ([\d.]+)", row.mem_def)
    return float(found[1]) * GIB if found else None


def predict(row: PublishedRun) -> Prediction:
    """What `row` should have held at its peak."""
    measured = measured_bytes(row)
    run, recipe = row.run(), recipe_of(row)
    reasons = [one for one in (run, recipe) if isinstance(one, str)]
    if row.framework == "torchtitan" and row.recompute == "selective":
        reasons.append("torchtitan's selective recomputation is of operators that it does not tell")
    if reasons:
        return Prediction(row, measured, None, None, "; ".join(reasons))
    assert isinstance(run, RunSpec)
    assert isinstance(recipe, Recipe)
    variant = variant_of(row)
    if recipe is NANOTRON and run.strategy.pp > 1:
        layers = nanotron_layers(run.model, run.strategy.pp)
        run = run.model_copy(update={"strategy": run.strategy.model_copy(update={"stage_layers": layers})})
    try:
        largest = peak_of_run(run, variant, recipe)
        seen = memory_of_place(run, 0, variant, recipe) if recipe is NANOTRON else largest
    except ValueError as error:
        return Prediction(row, measured, None, None, str(error))
    return Prediction(row, measured, seen, largest.total, "")


def predictions(rows: Sequence[PublishedRun]) -> tuple[Prediction, ...]:
    """One for every row that reports a peak, with a prediction or a reason."""
    return tuple(predict(row) for row in rows if row.peak_mem_gb is not None)


def error_table(found: Sequence[Prediction]) -> tuple[SourceError, ...]:
    """Errors by source, sources without any prediction too (with NaN)."""
    sources = sorted({one.row.source_id for one in found})
    return tuple(_source_error(source, [one for one in found if one.row.source_id == source]) for source in sources)


def failures(
    rows: Sequence[PublishedRun], *, status: str = "failed_or_oom", capacity: int = H100_BYTES, source: str = ""
) -> Failures:
    """Runs of one status: does the prediction say why? `capacity`: bytes of a device; `source`: empty for all."""
    chosen = [row for row in rows if row.status == status and source in ("", row.source_id)]
    counts = {"beyond": 0, "refused": 0, "fitting": 0, "left_out": 0}
    for row in chosen:
        counts[_verdict(predict(row), capacity)] += 1
    return Failures(**counts)


def _verdict(found: Prediction, capacity: int) -> str:
    row = found.row
    refuses = row.framework.startswith("nanotron") and row.grad_accum is not None and row.pp is not None
    if refuses and (row.grad_accum or 0) < (row.pp or 1) - 1:
        return "refused"
    if found.largest is None:
        return "left_out"
    return "beyond" if found.largest > capacity else "fitting"


def _source_error(source: str, found: Sequence[Prediction]) -> SourceError:
    import numpy as np
    import pandas as pd

    both = [one for one in found if one.error is not None]
    if not both:
        return SourceError(source, 0, len(found), *[float("nan")] * 4)
    errors = np.array([one.error for one in both])
    measured = pd.Series([one.measured for one in both]).rank()
    predicted = pd.Series([one.predicted.total for one in both if one.predicted is not None]).rank()
    return SourceError(
        source,
        len(both),
        len(found) - len(both),
        mape=float(np.abs(errors).mean()),
        median=float(np.median(np.abs(errors))),
        bias=float(errors.mean()),
        spearman=float(measured.corr(predicted)),
    )
