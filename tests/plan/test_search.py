"""The search is exact for the cost model, and says why others lost and what would change the choice."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hybridpar.cost.hardware import accelerator
from hybridpar.cost.predict import predict_many
from hybridpar.cost.space import of_strategy
from hybridpar.plan.report import lines, page, plan
from hybridpar.plan.search import Objective, Task, cheapest_size, rivals, search, sensitivity
from hybridpar.plan.space import Options, SpaceError
from hybridpar.specs import parse_run_spec

FEW = Options(micro_batch=(1, 2), virtual=(2,), schedule=("1f1b", "interleaved"), offload=("none",))


def _task(preset: str = "llama-3-8b", devices: int = 16, batch: int = 64, **changes: object) -> Task:
    workload = {"seq_len": 4096, "global_batch": batch, "precision": "bf16"}
    run = parse_run_spec({"model": {"preset": preset}, "workload": workload})
    return replace(Task(run.model, run.workload, accelerator("H100-80G"), devices, FEW), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("objective", ["time", "memory", "cost"])
def test_the_best_is_that_of_brute_force(objective: Objective) -> None:
    task = _task()
    searched = search(task)
    best = searched.best(objective)
    assert best is not None
    scores = []
    for place in range(len(searched.candidates)):
        choice = searched.choice(place)
        one = predict_many(
            task.model, task.workload, task.cluster, task.hardware, of_strategy(choice.strategy, choice.micro_batch)
        )
        if one.p_oom[0] <= task.most_risk:
            scores.append(one.bytes[0] if objective == "memory" else one.seconds[0])
    ours = searched.choice(best)
    assert (ours.bytes if objective == "memory" else ours.seconds) == pytest.approx(min(scores), rel=1e-9)


def test_the_pareto_set_is_beaten_by_none_and_beats_all() -> None:
    searched = search(_task())
    p, ours = searched.prediction, searched.pareto()
    for place in np.flatnonzero(searched.fits):
        beaten = [i for i in ours if p.seconds[i] <= p.seconds[place] and p.bytes[i] <= p.bytes[place]]
        assert beaten
    for a in ours:
        assert not any(p.seconds[b] < p.seconds[a] and p.bytes[b] < p.bytes[a] for b in ours)
    assert ours[0] == searched.best() or p.seconds[ours[0]] == pytest.approx(p.seconds[searched.best()])


def test_rivals_lose_and_say_by_what() -> None:
    searched = search(_task("llama-3-70b", 64))
    best = searched.best()
    assert best is not None
    found = {one.name: one for one in rivals(searched, best)}
    assert found["data parallelism alone"].ratio >= 1
    for one in found.values():
        assert one.ratio >= 1 - 1e-9
        assert one.choice is not None or one.reason
        if one.ratio > 1.01 and one.choice is not None:
            assert one.more


def test_a_model_that_fits_nowhere_is_told_with_its_smallest_plan() -> None:
    told = plan(_task("llama-3-405b", 8, batch=8))
    assert told.best is None
    assert told.least.bytes > told.task.hardware.memory_bytes
    assert any("nothing fits" in line for line in lines(told))


def test_more_memory_or_bandwidth_never_slows_the_best() -> None:
    task = _task("llama-3-70b", 64)
    searched = search(task)
    winner = searched.choice(searched.best() or 0)
    for change in sensitivity(task, winner):
        if change.best is None or change.what == "global batch":
            continue
        if change.factor > 1:
            assert change.best.seconds <= winner.seconds * (1 + 1e-9)
        else:
            assert change.best.seconds >= winner.seconds * (1 - 1e-9)


def test_less_risk_asks_for_more_room() -> None:
    bold, careful = (search(_task("llama-3-70b", 32, most_risk=risk)) for risk in (0.5, 0.001))
    assert bold.fits.sum() > careful.fits.sum()


def test_the_cheapest_size_costs_no_more_than_the_whole_cluster() -> None:
    task = _task(devices=64)
    fewer = cheapest_size(task)
    assert 64 % fewer.devices == 0
    costs = [search(one).choice(search(one).best("cost") or 0).device_seconds for one in (task, fewer)]
    assert costs[1] <= costs[0]


def test_a_plan_is_told_in_words_data_and_a_page() -> None:
    told = plan(_task())
    text = "\n".join(lines(told))
    assert told.best is not None
    for part in (told.best.label, "why not otherwise", "what would change the choice", "tier: predicted"):
        assert part in text
    row = told.row()
    assert row["best"]["strategy"]["dp"] == told.best.strategy.dp
    assert row["tier"] == "predicted"
    assert page(told).startswith("<!doctype html>")
    assert told.best.label in page(told)


def test_nothing_legal_is_said() -> None:
    with pytest.raises(SpaceError, match="no strategy of llama-3-8b on 7 devices is legal"):
        plan(_task(devices=7, options=Options(pp=(1,), cp=(1,))))
