"""Constraints of splitting by layers over pp ranks, and of the schedules."""

from __future__ import annotations

from collections.abc import Iterator

from hybridpar.legality.violation import Rule, Violation, those, up_to
from hybridpar.specs import RunSpec

# Stages a device holds, by schedule; None: two or more.
_STAGES_PER_DEVICE = {"gpipe": 1, "1f1b": 1, "zb-v": 2, "dualpipe-v": 2, "interleaved": None}
# These run the part of a backward pass that gives the gradients of weights apart from the one that goes on. With
# FSDP2 resharding in between (zero=3) gradients were missing or wrong in torch 2.13; kept unsharded they are right.
SPLIT_BACKWARD = ("zero-bubble", "zb-v", "dualpipe-v")


def _stages(run: RunSpec) -> Iterator[Violation]:
    strategy, model = run.strategy, run.model
    stages = strategy.stages
    if strategy.pp == 1:
        if strategy.virtual > 1:
            yield Violation(
                "strategy.virtual", strategy.virtual, "cuts pipeline stages, and pp=1", "1, or pp of 2 or more"
            )
        if strategy.stage_layers:
            reason = "places layers on pipeline stages, and pp=1"
            yield Violation("strategy.stage_layers", strategy.stage_layers, reason, "left out, or pp of 2 or more")
        return
    if strategy.stage_layers:
        yield from _placed(run)
    elif stages > model.layers:
        field, value = ("pp", strategy.pp) if strategy.virtual == 1 else ("virtual", strategy.virtual)
        reason = f"exceeds model.layers={model.layers}"
        if strategy.virtual > 1:
            reason = f"makes {stages} stages, which {reason}"
        legal = up_to(model.layers) if strategy.virtual == 1 else up_to(model.layers // strategy.pp)
        yield Violation(f"strategy.{field}", value, reason, legal)


def _placed(run: RunSpec) -> Iterator[Violation]:
    placed, stages, layers = run.strategy.stage_layers, run.strategy.stages, run.model.layers
    if len(placed) != stages or sum(placed) != layers:
        yield Violation(
            "strategy.stage_layers",
            placed,
            f"has {len(placed)} numbers that sum to {sum(placed)}",
            f"{stages} numbers (pp*virtual) that sum to model.layers={layers}",
        )
    elif any(count < 1 for count in placed[1:-1]):
        yield Violation(
            "strategy.stage_layers", placed, "leaves a stage between the first and the last without a layer",
            "0 only for the first stage (embedding) and the last (norm and head)",
        )  # fmt: skip


def _schedule(run: RunSpec) -> Iterator[Violation]:
    strategy = run.strategy
    if strategy.pp == 1 or run.workload.phase != "train":
        return
    wanted = _STAGES_PER_DEVICE.get(strategy.schedule, strategy.virtual)
    if wanted is None and strategy.virtual < 2:
        yield Violation(
            "strategy.virtual", strategy.virtual, "schedule=interleaved needs several stages a device", "2 or more"
        )
    elif wanted is not None and strategy.virtual != wanted:
        yield Violation(
            "strategy.virtual", strategy.virtual, f"schedule={strategy.schedule} has {wanted} a device", str(wanted)
        )
    if strategy.zero == 3 and strategy.schedule in SPLIT_BACKWARD:
        yield Violation(
            "strategy.zero",
            strategy.zero,
            f"schedule={strategy.schedule} does the backward pass in two parts, and FSDP2, which lets go of parameters "
            "in between, loses gradients of weights",
            "0, 1, 2, or schedule=1f1b, gpipe or interleaved",
        )


def _micro_batches(run: RunSpec) -> Iterator[Violation]:
    strategy, workload = run.strategy, run.workload
    divides = workload.global_batch % (strategy.dp * workload.micro_batch) == 0
    if strategy.pp == 1 or workload.phase != "train" or not divides:
        return
    count = run.micro_batches
    smaller = "or a smaller workload.micro_batch or strategy.dp"
    needed = {"1f1b": strategy.pp, "dualpipe-v": strategy.stages}.get(strategy.schedule, 1)
    if count < needed:
        what = "pp" if strategy.schedule == "1f1b" else "2*pp"
        reason = f"{strategy.schedule} needs at least {what} micro-batches a replica, and there are {count}"
        enough = up_to(count * strategy.pp // needed)
        yield Violation("strategy.pp", strategy.pp, reason, f"{enough}, {smaller}")
    rounds = max(1, count // strategy.pp)
    if strategy.schedule in ("interleaved", "zero-bubble") and count % rounds:
        yield Violation(
            "strategy.pp",
            strategy.pp,
            f"{strategy.schedule} goes in {rounds} rounds, which do not divide the {count} micro-batches of a replica",
            those(range(1, run.model.layers + 1), lambda pp: count % max(1, count // pp) == 0) + f", {smaller}",
        )


RULES: tuple[Rule, ...] = (_stages, _schedule, _micro_batches)
