"""Constraints of the second engine: what DeepSpeed offers, and where it departs from one device."""

from __future__ import annotations

from collections.abc import Iterator

from hybridpar.legality.violation import Rule, Violation, divisors
from hybridpar.specs import RunSpec

_INNER = ("tp", "pp", "cp", "ep")  # axes of which DeepSpeed combines each with dp, not with one another


def _formats(run: RunSpec) -> Iterator[Violation]:
    precision, strategy = run.workload.precision, run.strategy
    if precision == "fp32":
        return
    if precision != "bf16":
        yield Violation("workload.precision", precision, "engine=deepspeed is compared in fp32 and bf16", "fp32, bf16")
        return
    if strategy.zero == 0:
        reason = "DeepSpeed at ZeRO-0 adds up gradients of micro-batches in bf16"
        yield Violation("workload.precision", precision, reason, "fp32, or zero of 1 to 3")
    for axis in _INNER:
        if getattr(strategy, axis) > 1:
            reason = f"engine=deepspeed is compared in bf16 over dp alone, and {axis}={getattr(strategy, axis)}"
            yield Violation("workload.precision", precision, reason, "fp32")


def _storage(run: RunSpec) -> Iterator[Violation]:
    strategy = run.strategy
    for name in ("checkpoint_every", "start_from"):
        value = getattr(run.workload, name)
        if value and run.workload.precision == "bf16":
            reason = "DeepSpeed keeps parameters in two formats, of which a checkpoint has one"
            yield Violation(f"workload.{name}", value, reason, "left out, or precision of fp32")
    if strategy.recompute == "selective":
        reason = "engine=deepspeed recomputes whole blocks"
        yield Violation("strategy.recompute", strategy.recompute, reason, "none, or full with pp=1")
    if strategy.recompute == "full" and strategy.pp > 1:
        reason = "not available with DeepSpeed's PipelineModule in this version"
        yield Violation("strategy.recompute", strategy.recompute, reason, "none")
    if strategy.offload != "none" and (strategy.zero == 0 or strategy.pp > 1):
        reason = "DeepSpeed offloads in its ZeRO-1 to 3 optimizers, and ignores the setting elsewhere"
        yield Violation("strategy.offload", strategy.offload, reason, "none, or zero of 1 to 3 with pp=1")
    if strategy.zero_group:
        yield Violation("strategy.zero_group", strategy.zero_group, "is for FSDP2", "0, or engine=torch")


def _products(run: RunSpec) -> Iterator[Violation]:
    inner = [axis for axis in _INNER if getattr(run.strategy, axis) > 1]
    for axis in inner[1:]:
        reason = f"is combined with dp alone by engine=deepspeed, and {inner[0]}={getattr(run.strategy, inner[0])}"
        yield Violation(f"strategy.{axis}", getattr(run.strategy, axis), reason, "1, or engine=torch")


def _tensor(run: RunSpec) -> Iterator[Violation]:
    strategy = run.strategy
    if strategy.tp == 1:
        return
    if set(run.model.layer_kinds) != {"A"}:
        reason = f"AutoTP cuts attention and MLPs, and model.family={run.model.family} has other layers"
        yield Violation("strategy.tp", strategy.tp, reason, "1, a transformer, or engine=torch")
    if strategy.sp:
        yield Violation("strategy.sp", True, "AutoTP keeps activations whole between its layers", "false")


def _sequence(run: RunSpec) -> Iterator[Violation]:
    strategy, kv_heads = run.strategy, run.model.kv_heads
    if strategy.cp == 1:
        return
    if strategy.cp_kind != "ulysses":
        yield Violation("strategy.cp_kind", strategy.cp_kind, "DeepSpeed exchanges heads for tokens", "ulysses")
    if set(run.model.layer_kinds) != {"A"}:
        reason = f"DeepSpeed's Ulysses is for attention, and model.family={run.model.family} has other layers"
        yield Violation("strategy.cp", strategy.cp, reason, "1, a transformer, or engine=torch")
    elif strategy.cp > kv_heads:
        reason = f"DeepSpeed deals out the model.kv_heads={kv_heads}, and refuses ranks without any"
        yield Violation("strategy.cp", strategy.cp, reason, f"1 to {kv_heads}")


def _experts(run: RunSpec) -> Iterator[Violation]:
    strategy, model = run.strategy, run.model
    if strategy.ep == 1 or not model.experts:
        return
    if model.experts % strategy.ep:
        reason = f"DeepSpeed's MoE wants a divisor of model.experts={model.experts}"
        yield Violation("strategy.ep", strategy.ep, reason, divisors(model.experts))
    if strategy.zero == 3:
        yield Violation("strategy.zero", 3, f"DeepSpeed's MoE (ep={strategy.ep}) refuses ZeRO-3", "0 to 2")
    if strategy.zero == 0 and run.workload.grad_clip:
        reason = (
            "DeepSpeed at ZeRO-0 clips by the mean over ranks of the norm of what each of them holds of the experts"
        )
        yield Violation("workload.grad_clip", run.workload.grad_clip, reason, "0, or zero of 1 or 2")
    if model.capacity_factor:
        reason = "DeepSpeed drops tokens over the places of a rank, not of a sequence"
        yield Violation("model.capacity_factor", model.capacity_factor, reason, "0")
    if model.aux_loss and model.top_k == 2:
        reason = "DeepSpeed's load-balancing loss for model.top_k=2 counts first choices alone"
        yield Violation("model.aux_loss", model.aux_loss, reason, "0, or top_k of 1 or of 3 and more")


def _pipeline(run: RunSpec) -> Iterator[Violation]:
    strategy = run.strategy
    if strategy.pp == 1:
        return
    if strategy.zero == 0 and run.workload.grad_clip:
        reason = "DeepSpeed's pipeline engine at ZeRO-0 clips each stage by its own norm, not by the global one"
        yield Violation("strategy.zero", strategy.zero, reason, "1, with dp of 2 or more, or grad_clip=0")
    if strategy.zero > 1:
        yield Violation("strategy.zero", strategy.zero, "DeepSpeed's PipelineModule refuses ZeRO-2 and ZeRO-3", "0, 1")
    if strategy.schedule != "1f1b":
        yield Violation("strategy.schedule", strategy.schedule, "DeepSpeed's PipelineModule runs 1F1B", "1f1b")
    if strategy.stage_layers:
        yield Violation(
            "strategy.stage_layers", strategy.stage_layers, "PipelineModule places layers evenly", "left out"
        )
    if run.model.tied_embeddings:
        yield Violation("strategy.pp", strategy.pp, "model.tied_embeddings would put one weight on two stages", "1")


def _of_deepspeed(rule: Rule) -> Rule:
    def only(run: RunSpec) -> Iterator[Violation]:
        return rule(run) if run.strategy.engine == "deepspeed" else iter(())

    return only


RULES: tuple[Rule, ...] = tuple(
    _of_deepspeed(rule) for rule in (_formats, _storage, _products, _tensor, _sequence, _experts, _pipeline)
)
