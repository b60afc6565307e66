"""Every layout trains as one device does, in float64: losses, gradient norms, all gradients, all parameters.

The models are odd on purpose (67 tokens, 5 layers, a ragged last chunk); batches are accumulated and gradients clipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from hybridpar.legality import infeasible_reason
from hybridpar.parity import MODELS, WORKLOAD, Parity, layouts_to_compare, torch_layouts
from hybridpar.specs import RunSpec, Strategy, parse_run_spec

FAMILIES = ("transformer", "mamba2", "hybrid")

# Each mechanism alone and each product of mechanisms once; `torch_layouts` has them all.
CORE: Mapping[int, list[dict[str, Any]]] = {
    1: [{"recompute": "full"}],
    2: [
        *({"dp": 2, "zero": zero} for zero in (0, 1, 2, 3)),
        {"dp": 2, "overlap": False},
        {"tp": 2},
        {"tp": 2, "sp": True},
        {"pp": 2, "schedule": "gpipe"},
        {"pp": 2, "schedule": "1f1b"},
    ],
    4: [
        {"dp": 4, "zero": 1},
        {"tp": 4, "sp": True},
        {"pp": 4},
        {"dp": 2, "tp": 2, "zero": 1},
        {"dp": 2, "tp": 2, "zero": 3, "sp": True},
        {"dp": 2, "pp": 2, "zero": 0},
        {"dp": 2, "pp": 2, "zero": 2, "schedule": "gpipe"},
        {"tp": 2, "pp": 2, "sp": True},
    ],
    8: [
        {"dp": 2, "tp": 2, "pp": 2, "zero": 3, "sp": True, "schedule": "gpipe", "recompute": "full"},
    ],
}


@pytest.fixture(scope="module")
def parity() -> Parity:
    """One for all tests, so that one device is trained once per model."""
    return Parity()


def _assert_all_equal(parity: Parity, runs: list[RunSpec]) -> None:
    reports = list(parity.sweep(runs))
    assert len(reports) == len(runs)
    assert not [report.row() for report in reports if report.verdict != "equal"]


def _four_sequences(run: RunSpec) -> RunSpec:
    """Half the work, where every replica still accumulates over micro-batches."""
    if run.strategy.dp * run.strategy.pp > 4 or run.strategy.dp == 4:
        return run
    return run.model_copy(update={"workload": run.workload.model_copy(update={"global_batch": 4})})


def _case_name(part: Any) -> str:
    return part if isinstance(part, str) else f"{Strategy.model_validate(part[-1]).devices}-devices"


# A hybrid has the blocks of both other families; what is its own is that they meet in one model.
MIXED: Mapping[int, list[dict[str, Any]]] = {
    2: [{"dp": 2, "zero": 3, "recompute": "full"}, {"tp": 2, "sp": True}],
    8: [{"dp": 2, "tp": 2, "pp": 2, "zero": 2, "sp": True}],
}
CASES = [(family, layouts) for family in ("transformer", "mamba2") for layouts in CORE.values()]
CASES += [("hybrid", layouts) for layouts in MIXED.values()]


@pytest.mark.parametrize(("family", "layouts"), CASES, ids=_case_name)
def test_layouts_equal_one_device(parity: Parity, family: str, layouts: list[dict[str, Any]]) -> None:
    _assert_all_equal(parity, [_four_sequences(run) for run in layouts_to_compare([family], layouts=layouts)])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", FAMILIES)
def test_all_layouts_on_up_to_eight_devices_equal_one_device(parity: Parity, family: str) -> None:
    runs = layouts_to_compare([family], layouts=torch_layouts(8))
    _assert_all_equal(parity, sorted(runs, key=lambda run: run.strategy.devices))


def _run(family: str, model: Mapping[str, Any], workload: Mapping[str, Any], strategy: Mapping[str, Any]) -> RunSpec:
    return parse_run_spec(
        {
            "model": {"family": family, **MODELS[family], **model},
            "workload": {**WORKLOAD, "precision": "fp64", **workload},
            "strategy": dict(strategy),
            "cluster": {"device": "cpu"},
        }
    )


ODD: Mapping[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "tied embeddings in FSDP2": ("transformer", {"tied_embeddings": True}, {}, {"dp": 2, "zero": 3}),
    "tied embeddings split over the vocabulary": ("transformer", {"tied_embeddings": True}, {}, {"tp": 2, "sp": True}),
    "a vocabulary barely larger than tp": ("transformer", {"vocab": 3}, {}, {"tp": 2}),
    "no clipping": ("hybrid", {}, {"grad_clip": 0.0}, {"tp": 2}),
    "SGD": ("mamba2", {}, {"optimizer": "sgd", "learning_rate": 0.1}, {"dp": 2, "zero": 1}),
    "one micro-batch in a pipeline": ("mamba2", {}, {"micro_batch": 8}, {"pp": 2, "schedule": "gpipe"}),
    "a norm group per tp rank": ("mamba2", {"ssm_groups": 2}, {}, {"tp": 2, "sp": True}),
}


def test_odd_runs_on_two_devices_equal_one_device(parity: Parity) -> None:
    _assert_all_equal(parity, [_run(*parts) for parts in ODD.values()])


def test_more_ranks_than_parameters_that_a_rank_could_update(parity: Parity) -> None:
    _assert_all_equal(parity, [_run("mamba2", {"layers": 1}, {}, {"dp": 8, "zero": 1})])


@st.composite
def legal_runs(draw: st.DrawFn) -> RunSpec:
    """Small runs of any shape that legality lets through."""
    family = draw(st.sampled_from(FAMILIES))
    strategy = {
        "dp": draw(st.sampled_from((1, 2))),
        "tp": draw(st.sampled_from((1, 2))),
        "pp": draw(st.sampled_from((1, 2))),
        "zero": draw(st.sampled_from((0, 1, 2, 3))),
        "sp": draw(st.booleans()),
        "schedule": draw(st.sampled_from(("gpipe", "1f1b"))),
        "recompute": draw(st.sampled_from(("none", "full"))),
    }
    model = {"vocab": draw(st.integers(2, 40)), "layers": 2 if family != "hybrid" else 3}
    workload = {
        "seq_len": 2 * draw(st.integers(2, 9)),
        "global_batch": 4 * draw(st.integers(1, 2)),
        "micro_batch": draw(st.sampled_from((1, 2))),
        "optimizer": draw(st.sampled_from(("adamw", "sgd"))),
    }
    run = _run(family, model, workload, strategy)
    assume(infeasible_reason(run, on_text=False) is None)
    return run


@settings(
    max_examples=4,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(run=legal_runs())
def test_any_legal_layout_equals_one_device(run: RunSpec) -> None:
    _assert_all_equal(Parity(), [run])
