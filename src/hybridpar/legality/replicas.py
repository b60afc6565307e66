"""Constraints of what data replicas share: the batch, sharded state, overlap, experts, host memory."""

from __future__ import annotations

from collections.abc import Iterator

from hybridpar.legality.violation import Rule, Violation, divisors, up_to
from hybridpar.specs import RunSpec


def _batch(run: RunSpec) -> Iterator[Violation]:
    batch, dp, micro = run.workload.global_batch, run.strategy.dp, run.workload.micro_batch
    if batch % dp:
        yield Violation("strategy.dp", dp, f"does not divide workload.global_batch={batch}", divisors(batch))
    elif (batch // dp) % micro:
        yield Violation(
            "workload.micro_batch",
            micro,
            f"does not divide the {batch // dp} sequences of one replica (global_batch={batch}, dp={dp})",
            divisors(batch // dp),
        )


def _zero(run: RunSpec) -> Iterator[Violation]:
    strategy = run.strategy
    zero, group, replicas = strategy.zero, strategy.zero_group, strategy.dp * strategy.cp
    if zero and replicas == 1:
        yield Violation("strategy.zero", zero, "shards over data replicas, and dp*cp=1", "0, or dp*cp of 2 or more")
    if not group:
        return
    if zero < 2:
        yield Violation("strategy.zero_group", group, f"is for FSDP2, and zero={zero}", "0, or zero of 2 or 3")
    if strategy.ep > 1:
        yield Violation("strategy.zero_group", group, f"is not combined with ep={strategy.ep}", "0")
    if replicas % group:
        yield Violation(
            "strategy.zero_group", group, f"does not divide the {replicas} ranks of dp*cp", divisors(replicas)
        )


def _overlap(run: RunSpec) -> Iterator[Violation]:
    strategy = run.strategy
    if strategy.overlap:
        return
    if strategy.dp * strategy.cp == 1:
        yield Violation("strategy.overlap", False, "concerns gradients of data replicas, and dp*cp=1", "true")
    elif strategy.engine == "torch" and strategy.zero >= 2:
        yield Violation(
            "strategy.overlap", False, f"FSDP2 (zero={strategy.zero}) always overlaps", "true, or zero of 0 or 1"
        )


def _experts(run: RunSpec) -> Iterator[Violation]:
    ep, dp, model = run.strategy.ep, run.strategy.dp, run.model
    if ep == 1:
        return
    if not model.experts:
        reason = f"spreads experts, and model.family={model.family} has none"
        yield Violation("strategy.ep", ep, reason, "1, or a model with experts")
    elif ep > model.experts:
        yield Violation("strategy.ep", ep, f"exceeds model.experts={model.experts}", up_to(model.experts))
    if dp % ep:
        yield Violation("strategy.ep", ep, f"does not divide strategy.dp={dp}", divisors(dp))


def _offload(run: RunSpec) -> Iterator[Violation]:
    strategy = run.strategy
    if strategy.offload == "parameters" and strategy.zero != 3:
        yield Violation(
            "strategy.offload", "parameters", f"parameters leave the device with zero=3, and zero={strategy.zero}",
            "none, optimizer, or zero=3",
        )  # fmt: skip
    if strategy.offload == "optimizer" and strategy.engine == "torch" and strategy.zero == 1:
        reason = "torch's ZeRO-1 optimizer keeps its state on the device"
        yield Violation("strategy.offload", "optimizer", reason, "none, or zero of 0, 2 or 3")


RULES: tuple[Rule, ...] = (_batch, _zero, _overlap, _experts, _offload)
