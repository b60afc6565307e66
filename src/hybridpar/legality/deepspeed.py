"""Constraints of the second engine: what DeepSpeed offers, and where it departs from one device."""

from __future__ import annotations

from collections.abc import Iterator

from hybridpar.legality.violation import Rule, Violation
from hybridpar.specs import RunSpec


def _deepspeed(run: RunSpec) -> Iterator[Violation]:
    strategy = run.strategy
    if strategy.engine != "deepspeed":
        return
    if run.workload.precision != "fp32":
        precision = run.workload.precision
        yield Violation("workload.precision", precision, "engine=deepspeed is compared in fp32 in this version", "fp32")
    if strategy.recompute != "none":
        yield Violation("strategy.recompute", strategy.recompute, "not available with engine=deepspeed", "none")
    for name in ("checkpoint_every", "start_from"):
        value = getattr(run.workload, name)
        if value:
            yield Violation(f"workload.{name}", value, "not available with engine=deepspeed", "left out")
    if strategy.offload != "none" and (strategy.zero == 0 or strategy.pp > 1):
        reason = "DeepSpeed offloads in its ZeRO-1 to 3 optimizers, and ignores the setting elsewhere"
        yield Violation("strategy.offload", strategy.offload, reason, "none, or zero of 1 to 3 with pp=1")
    if strategy.pp > 1 and strategy.zero == 0:
        reason = "DeepSpeed's pipeline engine at ZeRO-0 clips each stage by its own norm, not by the global one"
        yield Violation("strategy.zero", strategy.zero, reason, "1, with dp of 2 or more")
    for axis in ("tp", "cp", "ep"):
        if getattr(strategy, axis) > 1:
            reason = "engine=deepspeed is offered for dp and pp"
            yield Violation(f"strategy.{axis}", getattr(strategy, axis), reason, "1, or engine=torch")
    if strategy.zero_group:
        yield Violation("strategy.zero_group", strategy.zero_group, "is for FSDP2", "0, or engine=torch")
    if strategy.pp > 1 and strategy.zero > 1:
        yield Violation("strategy.zero", strategy.zero, "DeepSpeed's PipelineModule refuses ZeRO-2 and ZeRO-3", "0, 1")
    if strategy.pp > 1 and strategy.schedule != "1f1b":
        yield Violation("strategy.schedule", strategy.schedule, "DeepSpeed's PipelineModule runs 1F1B", "1f1b")
    if strategy.pp > 1 and strategy.stage_layers:
        yield Violation(
            "strategy.stage_layers", strategy.stage_layers, "PipelineModule places layers evenly", "left out"
        )
    if strategy.pp > 1 and run.model.tied_embeddings:
        yield Violation("strategy.pp", strategy.pp, "model.tied_embeddings would put one weight on two stages", "1")


RULES: tuple[Rule, ...] = (_deepspeed,)
