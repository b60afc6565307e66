"""Comparing with one device: what it calls equal is equal, and a broken strategy is told from a sound one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hybridpar import parity
from hybridpar.launch.forked import preload
from hybridpar.parallel import torch_engine
from hybridpar.parity import TOLERANCES, Parity, ParityReport, Trajectory, tolerances
from hybridpar.parity_layouts import parity_run
from hybridpar.specs import RunSpec, WorkloadSpec


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    preload()


def _run(family: str = "transformer", precision: str = "fp64", **strategy: Any) -> RunSpec:
    return parity_run(family, strategy, precision=precision)


def _trajectory(**change: Any) -> Trajectory:
    content: dict[str, Any] = {
        "loss": (4.0, 3.0),
        "grad_norm": (2.0, 1.0),
        "gradients": {"a": np.array([1.0, -2.0]), "b": np.array([1e-9, 0.0])},
        "parameters": {"a": np.array([1.0, 1.0]), "b": np.array([0.5])},
    }
    return Trajectory(**{**content, **change})


def _report(**change: Any) -> ParityReport:
    return parity._report(_run(dp=2), _trajectory(**change), _trajectory())


def test_the_same_trajectory_is_equal() -> None:
    report = _report()
    assert report.verdict == "equal"
    assert set(report.deviations.values()) == {0.0}


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"loss": (4.0, 3.0001)}, "loss"),
        ({"loss": (float("nan"), 3.0)}, "loss"),
        ({"grad_norm": (2.0, 1.0001)}, "grad_norm"),
        ({"gradients": {"a": np.array([1.0, -2.001]), "b": np.array([1e-9, 0.0])}}, "gradient"),
        ({"gradients": {"a": np.array([1.0, float("nan")]), "b": np.array([1e-9, 0.0])}}, "gradient"),
        ({"gradients": {"a": np.array([1.0, -2.0])}}, "gradient"),
        ({"parameters": {"a": np.array([[1.0, 1.0]]), "b": np.array([0.5])}}, "parameter"),
    ],
)
def test_one_wrong_number_shape_or_name_differs(change: dict[str, Any], kind: str) -> None:
    report = _report(**change)
    assert report.verdict == "differs"
    assert not report.deviations[kind] < 1e-5


def test_the_worst_tensor_is_named() -> None:
    report = _report(parameters={"a": np.array([1.0, 1.0]), "b": np.array([0.6])})
    assert report.worst["parameter"] == "b"
    assert report.deviations["parameter"] == pytest.approx(0.2)


def test_an_illegal_layout_is_refused_with_its_reason_and_not_run() -> None:
    report = Parity().compare(_run(tp=3))
    assert report.verdict == "refused"
    assert "does not divide model.heads=8" in report.row()["reason"]


def test_a_sweep_keeps_its_order_and_tells_refused_from_equal() -> None:
    runs = [_run(dp=2), _run(tp=3), _run(pp=2), _run(tp=2)]
    reports = list(Parity().sweep(runs))
    assert [report.run for report in reports] == runs
    assert [report.verdict for report in reports] == ["equal", "refused", "equal", "equal"]


def _do_nothing(*_: Any, **__: Any) -> None:
    """A collective that somebody forgot."""


def _norm_of_this_rank(kinds: Any, groups: Any, device: Any) -> float:
    return _norm(kinds, [], device)


def _nobody(*_: Any) -> frozenset[str]:
    """Every rank counts all it holds, what others hold too included."""
    return frozenset()


_norm = torch_engine.global_norm


@pytest.mark.parametrize(
    ("name", "fault", "family", "strategy"),
    [
        ("average_gradients", _do_nothing, "transformer", {"dp": 2, "overlap": False}),
        ("sum_in_place", _do_nothing, "mamba2", {"tp": 2}),
        ("sum_in_place", _do_nothing, "transformer", {"tp": 2, "sp": True}),
        ("sum_in_place", _do_nothing, "moe", {"tp": 2}),
        ("global_norm", _norm_of_this_rank, "transformer", {"pp": 2}),
        ("_counted_elsewhere", _nobody, "transformer", {"tp": 2}),
    ],
)
def test_a_broken_strategy_is_found(
    monkeypatch: pytest.MonkeyPatch, name: str, fault: Callable[..., Any], family: str, strategy: dict[str, Any]
) -> None:
    monkeypatch.setattr(torch_engine, name, fault)
    assert Parity().compare(_run(family, **strategy)).verdict in ("differs", "failed")


def test_replicas_that_drift_apart_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The update of other replicas never arrives, after the last loss: only their parameters show it."""
    monkeypatch.setattr(torch.distributed.optim.ZeroRedundancyOptimizer, "_sync_params", _do_nothing)
    report = Parity().compare(_run(dp=2, zero=1))
    assert report.verdict == "failed"
    assert "differs between ranks that should hold the same" in str(report.failed)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_layouts_in_short_formats_stay_within_their_tolerance(precision: str) -> None:
    runs = [_run("hybrid", precision, dp=2, tp=2, zero=3, sp=True), _run("mamba2", precision, tp=2, pp=2)]
    assert {run.workload.optimizer for run in runs} == {"sgd"}
    assert not [report.row() for report in Parity().sweep(runs) if report.verdict != "equal"]


def test_a_sharp_limit_is_loosened_only_where_adamw_amplifies_rounding() -> None:
    def with_optimizer(precision: str, optimizer: str) -> WorkloadSpec:
        return WorkloadSpec.model_validate({"precision": precision, "optimizer": optimizer})

    assert tolerances(with_optimizer("fp64", "adamw")) == TOLERANCES["fp64"]
    assert tolerances(with_optimizer("fp32", "sgd")) == TOLERANCES["fp32"]
    assert tolerances(with_optimizer("fp32", "adamw"))["loss"] == TOLERANCES["fp32"]["loss"]
    assert tolerances(with_optimizer("fp32", "adamw"))["parameter"] > TOLERANCES["fp32"]["parameter"]
