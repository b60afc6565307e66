"""The order of a pipeline's passes: the one that torch's own schedule objects hold, for every rank."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from torch.distributed.pipelining import (
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from hybridpar.parallel.sharding import stages_of
from hybridpar.parity_layouts import parity_run
from hybridpar.specs import RunSpec
from hybridpar.theory.schedule import actions_of_rank

TORCH = {
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
    "zb-v": ScheduleZBVZeroBubble,
    "dualpipe-v": ScheduleDualPipeV,
}
KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


def _run(schedule: str, pp: int, micro_batches: int, virtual: int | None = None) -> RunSpec:
    layout: dict[str, Any] = {"pp": pp, "schedule": schedule} | ({"virtual": virtual} if virtual else {})
    stages = pp * (virtual or 2)
    return parity_run("transformer", layout, model={"layers": stages}, workload={"global_batch": micro_batches})


def _torch_order(run: RunSpec, rank: int) -> list[str]:
    """What torch would run, flattened; pairs of a forward and a backward in the order in which it takes them."""
    strategy = run.strategy
    stages = []
    for index in stages_of(strategy, rank):
        stage = mock.Mock(group_rank=rank, group_size=strategy.pp, num_stages=strategy.stages, stage_index=index)
        stage.has_backward = True
        stages.append(stage)
    schedule: Any = TORCH[strategy.schedule](stages, run.micro_batches, loss_fn=lambda *_: None)
    found = []
    for action in schedule.pipeline_order[rank]:
        for one in (action.sub_actions or (action,)) if action is not None else ():
            found += [f"{one.stage_index}{KINDS[one.computation_type.name]}{one.microbatch_index}"]
    return found


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
@pytest.mark.parametrize("schedule", list(TORCH))
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_the_order_is_torchs(schedule: str, pp: int, rounds: int) -> None:
    micro_batches = pp * rounds * (2 if schedule == "dualpipe-v" else 1)
    for virtual in (1, 2, 3) if schedule in ("interleaved", "zero-bubble") else (None,):
        run = _run(schedule, pp, micro_batches, virtual)
        for rank in range(pp):
            assert [str(action) for action in actions_of_rank(run, rank)] == _torch_order(run, rank)


def test_zero_bubble_v_takes_fewer_micro_batches_than_it_was_made_for() -> None:
    run = _run("zb-v", 4, 4)
    for rank in range(4):
        assert [str(action) for action in actions_of_rank(run, rank)] == _torch_order(run, rank)


@pytest.mark.parametrize(("schedule", "held"), [("gpipe", 8), ("1f1b", 3)])
def test_one_stage_a_rank_holds_as_many_micro_batches_as_the_papers_say(schedule: str, held: int) -> None:
    actions = actions_of_rank(_run(schedule, 4, 8, virtual=1), 1)
    steps = [1 if action.kind == "F" else -1 for action in actions]
    assert max(sum(steps[: end + 1]) for end in range(len(steps))) == held
    assert len(actions) == 16


def test_without_a_pipeline_micro_batches_follow_one_another() -> None:
    run = parity_run("transformer", {}, workload={"global_batch": 2})
    assert [str(action) for action in actions_of_rank(run, 0)] == ["0F0", "0B0", "0F1", "0B1"]
