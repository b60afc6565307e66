"""Every schedule places stages where it says, and gives the gradients of one device for any number of micro-batches."""

from __future__ import annotations

from typing import Any

import pytest

from hybridpar.legality import infeasible_reason
from hybridpar.parallel.pipeline import holds_several_stages
from hybridpar.parallel.sharding import holder_of_stage
from hybridpar.parity import Parity
from hybridpar.parity_layouts import SCHEDULES, parity_run
from hybridpar.specs import RunSpec, Strategy


def _run(micro_batches: int, **strategy: Any) -> RunSpec:
    workload = {"global_batch": micro_batches, "micro_batch": 1, "steps": 1, "warmup_steps": 0, "seq_len": 12}
    return parity_run("transformer", strategy, model={"layers": 6, "vocab": 11}, workload=workload)


@pytest.fixture(scope="module")
def parity() -> Parity:
    return Parity()


@pytest.mark.parametrize("pp", [2, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_any_number_of_micro_batches_is_equal_or_refused_with_a_sentence(
    parity: Parity, schedule: str, pp: int
) -> None:
    runs = [_run(count, pp=pp, schedule=schedule) for count in (1, 2, 3, 4, 6)]
    reports = list(parity.sweep(runs))
    assert not [report.row() for report in reports if report.verdict not in ("equal", "refused")]
    assert "equal" in {report.verdict for report in reports}
    for report in reports:
        assert report.refused is None or "legal:" in report.refused


def test_schedules_with_several_stages_a_rank_are_known() -> None:
    assert {schedule for schedule in SCHEDULES if holds_several_stages(schedule)} == set(SCHEDULES) - {"gpipe", "1f1b"}


@pytest.mark.parametrize(
    ("schedule", "holders"),
    [
        ("1f1b", [0, 1, 2, 3]),
        ("interleaved", [0, 1, 2, 3, 0, 1, 2, 3]),
        ("zb-v", [0, 1, 2, 3, 3, 2, 1, 0]),
        ("dualpipe-v", [0, 1, 2, 3, 3, 2, 1, 0]),
    ],
)
def test_stages_go_round_or_fold_back_in_a_v(schedule: str, holders: list[int]) -> None:
    strategy = Strategy.model_validate({"pp": 4, "schedule": schedule})
    assert [holder_of_stage(strategy, stage) for stage in range(strategy.stages)] == holders


@pytest.mark.parametrize("stage_layers", [[6, 0], [1, 5], [0, 6]])
def test_stages_may_be_uneven_or_hold_embedding_or_head_alone(parity: Parity, stage_layers: list[int]) -> None:
    report = parity.compare(_run(4, pp=2, stage_layers=stage_layers))
    assert report.verdict == "equal", report.row()


def test_more_stages_than_layers_is_refused_by_name() -> None:
    assert "strategy.pp=8" in str(infeasible_reason(_run(8, pp=8), on_text=False))
