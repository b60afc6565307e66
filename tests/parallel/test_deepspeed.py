"""DeepSpeed trains the same model on the same data as one device does, and where it does not, it is refused."""

from __future__ import annotations

import pytest

from hybridpar.legality import infeasible_reason
from hybridpar.parallel.deepspeed_config import deepspeed_config
from hybridpar.parity import Parity
from hybridpar.parity_layouts import parity_run
from hybridpar.specs import RunSpec


def _run(family: str, **strategy: object) -> RunSpec:
    return parity_run(family, {"engine": "deepspeed", **strategy}, precision="fp32")


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
