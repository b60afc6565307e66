"""The planner's space is what legality lets through: no more and no less."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from hybridpar.cost.space import CP_KINDS, OFFLOADS, RECOMPUTES, SCHEDULES
from hybridpar.legality import violations
from hybridpar.parity_layouts import MODELS
from hybridpar.plan.space import Options, SpaceError, legal_candidates
from hybridpar.specs import ModelSpec, RunSpec, Strategy, WorkloadSpec, parse_run_spec

Key = tuple[Any, ...]
OPTIONS = Options(micro_batch=(1, 2), virtual=(1, 2, 3))


def _model(family: str) -> ModelSpec:
    return parse_run_spec({"model": {"name": "m", "family": family, **MODELS[family]}}).model


def _key(strategy: Strategy, micro_batch: int) -> Key:
    names = ("dp", "tp", "pp", "cp", "ep", "zero", "sp", "schedule", "virtual", "recompute", "offload", "cp_kind")
    return (*(getattr(strategy, name) for name in names), micro_batch)


def _by_brute_force(model: ModelSpec, workload: WorkloadSpec, devices: int) -> set[Key]:
    """Every combination of every value, asked one by one; what makes no difference is left at its default."""
    found = set()
    axes = [n for n in range(1, devices + 1) if devices % n == 0]
    for dp, tp, pp, cp, ep in itertools.product(axes, axes, axes, axes, axes):
        if dp * tp * pp * cp != devices or dp % ep:
            continue
        for zero, sp, schedule, virtual, recompute, offload, kind, micro_batch in itertools.product(
            (0, 1, 2, 3), (False, True), SCHEDULES, OPTIONS.virtual, RECOMPUTES, OFFLOADS, CP_KINDS, OPTIONS.micro_batch
        ):
            if pp == 1 and (schedule, virtual) != ("1f1b", 1):
                continue
            if kind != "ring" and (cp == 1 or not set(model.layer_kinds) & set("AE")):
                continue
            strategy = Strategy(
                dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, zero=zero, sp=sp, schedule=schedule, virtual=virtual,
                recompute=recompute, offload=offload, cp_kind=kind,
            )  # fmt: skip
            run = RunSpec(
                model=model, workload=workload.model_copy(update={"micro_batch": micro_batch}), strategy=strategy
            )
            if not violations(run, on_text=False):
                found.add(_key(strategy, micro_batch))
    return found


@pytest.mark.parametrize(
    ("family", "devices", "workload"),
    [
        ("transformer", 4, {"seq_len": 48, "global_batch": 8}),
        ("transformer", 6, {"seq_len": 36, "global_batch": 6}),
        ("mamba2", 4, {"seq_len": 48, "global_batch": 4}),
        ("hybrid", 4, {"seq_len": 8, "global_batch": 8}),
        ("moe", 4, {"seq_len": 16, "global_batch": 8}),
    ],
)
def test_the_space_is_what_legality_lets_through(family: str, devices: int, workload: dict[str, int]) -> None:
    model, given = _model(family), WorkloadSpec(**workload, precision="fp32")
    candidates = legal_candidates(model, given, devices, OPTIONS)
    found = [_key(strategy, micro_batch) for strategy, micro_batch in candidates.strategies()]
    assert len(found) == len(set(found))
    assert set(found) == _by_brute_force(model, given, devices)


def test_options_narrow_it() -> None:
    given = WorkloadSpec(seq_len=48, global_batch=8)
    narrow = Options(tp=(2,), pp=(1,), zero=(0,), recompute=("full",), micro_batch=(1,), sp=(True,))
    candidates = legal_candidates(_model("transformer"), given, 4, narrow)
    assert {(s.tp, s.pp, s.zero, s.recompute, s.sp) for s, _ in candidates.strategies()} == {(2, 1, 0, "full", True)}


def test_where_nothing_is_legal_it_is_said() -> None:
    with pytest.raises(SpaceError, match="no strategy of m on 7 devices is legal with global_batch=8, seq_len=48"):
        legal_candidates(_model("transformer"), WorkloadSpec(seq_len=48, global_batch=8), 7, Options(pp=(1,)))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [({"schedule": ("1f2b",)}, "schedule=1f2b is not legal; legal: gpipe"), ({"tp": (0,)}, "tp=0 is not legal")],
)
def test_options_are_checked(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SpaceError, match=sentence):
        Options(**options)
