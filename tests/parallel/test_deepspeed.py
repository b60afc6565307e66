"""DeepSpeed trains the same model on the same data as one device does, and where it does not, it is refused."""

from __future__ import annotations

import pytest

from hybridpar.legality import infeasible_reason
from hybridpar.parallel.deepspeed_config import deepspeed_config
from hybridpar.parity import Parity, layouts_to_compare, trajectories
from hybridpar.specs import RunSpec, Strategy


def _run(family: str, **strategy: object) -> RunSpec:
    return layouts_to_compare([family], precision="fp32", layouts=[{"engine": "deepspeed", **strategy}])[0]


@pytest.fixture(scope="module")
def parity() -> Parity:
    return Parity()


@pytest.mark.parametrize(
    ("family", "strategy"),
    [
        ("transformer", {"dp": 2, "zero": 0}),
        ("transformer", {"dp": 2, "zero": 3}),
        ("transformer", {"dp": 2, "pp": 2, "zero": 1}),
        ("mamba2", {"dp": 2, "zero": 1}),
        ("mamba2", {"dp": 2, "zero": 2}),
    ],
)
def test_losses_gradients_and_parameters_equal_one_device(parity: Parity, family: str, strategy: dict) -> None:
    report = parity.compare(_run(family, **strategy))
    assert report.verdict == "equal", report.row()


def test_a_pipeline_at_zero_0_clips_by_another_norm_and_is_refused_for_it() -> None:
    """The departure itself, past legality: SGD makes the size of the clipped gradient show in the next loss."""
    departing = _clipped_sgd(_run("transformer", pp=2))
    assert "clips each stage by its own norm" in str(infeasible_reason(departing))
    dense = departing.model_copy(update={"strategy": Strategy()})
    unclipped = dense.model_copy(update={"workload": dense.workload.model_copy(update={"grad_clip": 0.0})})
    (seen,), (clipped, free) = trajectories([departing]), trajectories([dense, unclipped])
    assert seen.loss[0] == pytest.approx(clipped.loss[0], rel=1e-6)
    assert abs(seen.loss[1] - clipped.loss[1]) > 1e-4
    assert abs(seen.loss[1] - free.loss[1]) > 1e-4


def _clipped_sgd(run: RunSpec) -> RunSpec:
    change = {"optimizer": "sgd", "learning_rate": 1.0, "weight_decay": 0.0, "grad_clip": 0.3}
    return run.model_copy(update={"workload": run.workload.model_copy(update=change)})


@pytest.mark.parametrize(
    ("strategy", "sentence"),
    [
        ({"dp": 2, "pp": 2, "zero": 2}, "DeepSpeed's PipelineModule refuses ZeRO-2 and ZeRO-3"),
        ({"dp": 2, "pp": 2, "zero": 1, "schedule": "gpipe"}, "DeepSpeed's PipelineModule runs 1F1B"),
        ({"dp": 2, "recompute": "selective"}, "engine=deepspeed recomputes whole blocks"),
    ],
)
def test_what_the_engine_does_not_do_is_refused_by_name(strategy: dict, sentence: str) -> None:
    assert sentence in str(infeasible_reason(_run("transformer", **strategy)))


def test_the_configuration_carries_the_batch_the_clipping_and_the_stage() -> None:
    config = deepspeed_config(_run("transformer", dp=2, zero=3))
    assert config["train_batch_size"] == 8
    assert config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * 2 == 8
    assert config["gradient_clipping"] == 0.5
    assert config["zero_optimization"]["stage"] == 3
