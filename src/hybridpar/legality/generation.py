"""Constraints of inference: what only training does is refused, not ignored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hybridpar.legality.violation import Rule, Violation
from hybridpar.specs import RunSpec, Strategy

_TRAINING_ONLY: dict[str, tuple[Any, ...]] = {
    "engine": ("torch",),
    "zero": (0,),
    "zero_group": (0,),
    "sp": (False,),
    "virtual": (1,),
    "recompute": ("none",),
    "offload": ("none",),
}


def _only_training(run: RunSpec) -> Iterator[Violation]:
    phase, strategy = run.workload.phase, run.strategy
    if phase == "train":
        return
    for name in ("checkpoint_every", "start_from"):
        value = getattr(run.workload, name)
        if value:
            yield Violation(f"workload.{name}", value, f"belongs to training, and workload.phase={phase}", "left out")
    for name, legal in _TRAINING_ONLY.items():
        value = getattr(strategy, name)
        if value not in legal:
            yield Violation(
                f"strategy.{name}", value, f"belongs to training, and workload.phase={phase}",
                ", ".join(str(option).lower() for option in legal),
            )  # fmt: skip
    if strategy.schedule not in ("gpipe", Strategy().schedule):
        reason = f"orders backward passes, and workload.phase={phase} has none"
        yield Violation("strategy.schedule", strategy.schedule, reason, f"gpipe, {Strategy().schedule}")
    if run.model.capacity_factor:
        yield Violation(
            "model.capacity_factor", run.model.capacity_factor,
            f"a full expert would depend on tokens yet to come, and workload.phase={phase}", "0 (dropless)",
        )  # fmt: skip


RULES: tuple[Rule, ...] = (_only_training,)
