"""What has no closed form yet, and says so rather than being wrong. No torch here."""

from __future__ import annotations

from hybridpar.specs import RunSpec


class NotCoveredError(ValueError):
    """What no closed form describes yet; the message names it."""


def check_training(run: RunSpec) -> None:
    """Raises:
    NotCoveredError: DeepSpeed's engine, or a phase that is not training.
    """
    if run.strategy.engine != "torch":
        raise NotCoveredError(f"strategy.engine={run.strategy.engine} has no closed form yet; legal: torch")
    if run.workload.phase != "train":
        raise NotCoveredError(f"workload.phase={run.workload.phase} has no closed form yet; legal: train")
