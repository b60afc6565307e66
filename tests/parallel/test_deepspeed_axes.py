"""DeepSpeed's AutoTP and Ulysses train the model that one device trains."""

from __future__ import annotations

import pytest

from hybridpar.parity import Parity
from hybridpar.parity_layouts import parity_run
from hybridpar.specs import RunSpec


def _run(strategy: dict, **model: object) -> RunSpec:
    small = {"layers": 2, **model}
    return parity_run("transformer", {"engine": "deepspeed", **strategy}, precision="fp32", model=small)


@pytest.fixture(scope="module")
def parity() -> Parity:
    return Parity()


@pytest.mark.parametrize("strategy", [{"tp": 4}, {"tp": 2, "dp": 2, "zero": 1}, {"tp": 2, "dp": 2, "zero": 3}])
def test_autotp_equals_one_device_with_more_ranks_than_key_heads_too(parity: Parity, strategy: dict) -> None:
    report = parity.compare(_run(strategy))
    assert report.verdict == "equal", report.row()


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_ulysses_equals_one_device_whatever_the_stage_makes_of_the_loss(parity: Parity, zero: int) -> None:
    report = parity.compare(_run({"cp": 2, "cp_kind": "ulysses", "zero": zero}))
    assert report.verdict == "equal", report.row()
