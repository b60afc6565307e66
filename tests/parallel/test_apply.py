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
from hybridpar.parity import Parity
from hybridpar.parity_layouts import SCHEDULES, parity_run, runs_to_compare
from hybridpar.specs import RunSpec, Strategy

FAMILIES = ("transformer", "mamba2", "hybrid", "moe")

# Each mechanism alone and each product of mechanisms once, where a family makes a difference; `torch_layouts` has all.
CORE: Mapping[str, list[dict[str, Any]]] = {
    "transformer": [
        {"recompute": "full"},
        {"recompute": "selective"},
        *({"dp": 2, "zero": zero} for zero in (0, 1, 2, 3)),
        {"dp": 2, "overlap": False},
        {"dp": 2, "offload": "optimizer"},
        {"dp": 2, "zero": 3, "offload": "parameters"},
        {"tp": 2, "sp": True},
        *({"pp": 2, "schedule": schedule} for schedule in SCHEDULES),
        {"pp": 2, "stage_layers": [0, 9]},
        {"cp": 2},
        {"cp": 2, "cp_kind": "ulysses", "recompute": "selective"},
        {"cp": 2, "zero": 3},
        {"cp": 2, "overlap": False},
        {"dp": 4, "zero": 3, "zero_group": 2},
        {"tp": 4},
        {"cp": 4, "cp_kind": "ulysses"},
        {"dp": 2, "cp": 2, "zero": 1},
        {"dp": 2, "tp": 2, "zero": 3, "sp": True},
        {"dp": 2, "pp": 2, "zero": 2, "schedule": "zb-v"},
        {"dp": 2, "pp": 2, "schedule": "interleaved"},
        {"dp": 2, "pp": 2, "schedule": "1f1b"},
        {"tp": 2, "cp": 2, "sp": True},
        {"dp": 2, "tp": 2, "pp": 2, "zero": 3, "sp": True, "schedule": "gpipe", "recompute": "full"},
    ],
    "mamba2": [
        {"dp": 2, "zero": 3, "recompute": "selective"},
        {"tp": 2},
        {"tp": 2, "sp": True},
        {"pp": 2, "schedule": "dualpipe-v"},
        {"cp": 2},
        {"tp": 2, "cp": 2, "sp": True},
        {"cp": 4},
        {"cp": 2, "pp": 2, "schedule": "zb-v"},
    ],
    "hybrid": [
        {"cp": 2},
        {"cp": 2, "cp_kind": "ulysses"},
        {"tp": 4, "sp": True},
        {"dp": 2, "tp": 2, "pp": 2, "zero": 2, "sp": True, "schedule": "zero-bubble"},
    ],
    "moe": [
        {"dp": 2, "ep": 2},
        {"cp": 2},
        {"tp": 2, "sp": True},
        *({"dp": 4, "ep": 2, "zero": zero} for zero in (0, 1, 3)),
        {"dp": 2, "ep": 2, "tp": 2, "zero": 3},
        {"dp": 2, "ep": 2, "cp": 2, "zero": 1},
        {"dp": 2, "ep": 2, "pp": 2, "schedule": "zb-v"},
        {"dp": 2, "ep": 2, "cp": 2, "tp": 2, "sp": True},
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


def _cases() -> list[Any]:
    """The layouts of a family on as many devices, which share worlds of ranks."""
    cases = []
    for family, layouts in CORE.items():
        for devices in (1, 2, 4, 8, 16):
            chosen = [layout for layout in layouts if Strategy.model_validate(layout).devices == devices]
            if chosen:
                cases.append(pytest.param(family, chosen, id=f"{family}-{devices}-devices"))
    return cases


@pytest.mark.parametrize(("family", "layouts"), _cases())
def test_layouts_equal_one_device(parity: Parity, family: str, layouts: list[dict[str, Any]]) -> None:
    _assert_all_equal(parity, [_four_sequences(parity_run(family, layout)) for layout in layouts])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", FAMILIES)
def test_all_layouts_on_up_to_eight_devices_equal_one_device(parity: Parity, family: str) -> None:
    reports = list(parity.sweep(runs_to_compare([family], "torch", "train")))
    assert not [report.row() for report in reports if report.verdict not in ("equal", "refused")]
    assert sum(report.verdict == "equal" for report in reports) > 100


def _run(family: str, model: Mapping[str, Any], workload: Mapping[str, Any], strategy: Mapping[str, Any]) -> RunSpec:
    return parity_run(family, strategy, model=model, workload=workload)


ODD: Mapping[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "tied embeddings in FSDP2": ("transformer", {"tied_embeddings": True}, {}, {"dp": 2, "zero": 3}),
    "tied embeddings split over the vocabulary": ("transformer", {"tied_embeddings": True}, {}, {"tp": 2, "sp": True}),
    "a vocabulary barely larger than tp": ("transformer", {"vocab": 3}, {}, {"tp": 2}),
    "no clipping": ("hybrid", {}, {"grad_clip": 0.0}, {"tp": 2}),
    "SGD": ("mamba2", {}, {"optimizer": "sgd", "learning_rate": 0.1}, {"dp": 2, "zero": 1}),
    "one micro-batch in a pipeline": ("mamba2", {}, {"micro_batch": 8}, {"pp": 2, "schedule": "gpipe"}),
    "a norm group per tp rank": ("mamba2", {"ssm_groups": 2}, {}, {"tp": 2, "sp": True}),
    "tied embeddings on two stages": ("transformer", {"tied_embeddings": True}, {}, {"pp": 2}),
    "tied embeddings on the ends of a V": ("mamba2", {"tied_embeddings": True}, {}, {"pp": 2, "schedule": "zb-v"}),
    "full experts": ("moe", {"capacity_factor": 0.7}, {}, {"cp": 2}),
    "one expert a token": ("moe", {"top_k": 1, "shared_experts": 0}, {}, {"dp": 2, "ep": 2}),
    "three experts a token, no balance": ("moe", {"top_k": 3, "aux_loss": 0.0}, {}, {"tp": 2}),
    "experts in some layers": ("hybrid", {"pattern": "MAE", "experts": 3}, {}, {"dp": 2, "ep": 2, "zero": 3}),
}


def test_odd_runs_on_two_devices_equal_one_device(parity: Parity) -> None:
    _assert_all_equal(parity, [_run(*parts) for parts in ODD.values()])


def test_more_ranks_than_parameters_that_a_rank_could_update(parity: Parity) -> None:
    _assert_all_equal(parity, [_run("mamba2", {"layers": 1}, {}, {"dp": 8, "zero": 1})])


@st.composite
def legal_runs(draw: st.DrawFn) -> RunSpec:
    """Small runs of any shape that legality lets through."""
    family = draw(st.sampled_from(FAMILIES))
    degrees = {axis: draw(st.sampled_from((1, 2))) for axis in ("dp", "tp", "pp", "cp")}
    assume(Strategy(**degrees).devices <= 8)
    strategy = {
        **degrees,
        "ep": draw(st.sampled_from((1, degrees["dp"]))) if family == "moe" else 1,
        "zero": draw(st.sampled_from((0, 1, 2, 3))),
        "sp": draw(st.booleans()),
        "cp_kind": draw(st.sampled_from(("ring", "ulysses"))),
        "schedule": draw(st.sampled_from(SCHEDULES)),
        "recompute": draw(st.sampled_from(("none", "selective", "full"))),
        "offload": draw(st.sampled_from(("none", "optimizer"))),
    }
    model = {"vocab": draw(st.integers(2, 40)), "layers": 4 if family != "hybrid" else 6}
    workload = {
        "seq_len": 4 * draw(st.integers(3, 6)),
        "global_batch": 4 * draw(st.integers(1, 2)),
        "micro_batch": draw(st.sampled_from((1, 2))),
        "optimizer": draw(st.sampled_from(("adamw", "sgd"))),
    }
    run = _run(family, model, workload, strategy)
    assume(infeasible_reason(run, on_text=False) is None)
    return run


@settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(run=legal_runs())
def test_any_legal_layout_equals_one_device(run: RunSpec) -> None:
    _assert_all_equal(Parity(), [run])
