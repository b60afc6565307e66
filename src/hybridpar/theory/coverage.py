"""What has no closed form yet, and says so rather than being wrong. No torch here."""

from __future__ import annotations

from hybridpar.specs import RunSpec

SPLIT_BACKWARD = ("zero-bubble", "zb-v", "dualpipe-v")


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


def check_one_recomputation(run: RunSpec) -> None:
    """Each block is recomputed once a micro-batch, but not where a backward pass comes in two parts: torch takes the
    second part parameter by parameter, and recomputes the block anew for each (seen in traces: up to five times the
    FLOPs of one recomputation), so such a run pays more for recomputation than it should.

    Raises:
        NotCoveredError: recomputation under such a schedule.
    """
    strategy = run.strategy
    if strategy.pp > 1 and strategy.schedule in SPLIT_BACKWARD and strategy.recompute != "none":
        raise NotCoveredError(
            f"strategy.recompute={strategy.recompute} with schedule={strategy.schedule} has no closed form yet: torch "
            "recomputes a block once for each parameter in the second part of a backward pass; legal: recompute=none, "
            "or a schedule of whole backward passes"
        )


def check_when_gathered(run: RunSpec) -> None:
    """Raises:
    NotCoveredError: a pipeline whose stages are sharded by FSDP2.
    """
    strategy = run.strategy
    if strategy.pp > 1 and strategy.zero >= 2 and strategy.dp * strategy.cp > 1:
        raise NotCoveredError(
            f"strategy.zero={strategy.zero} with pp={strategy.pp} has no closed form of its traffic yet: when FSDP2 "
            "gathers depends on the schedule; legal: zero of 0 or 1"
        )
