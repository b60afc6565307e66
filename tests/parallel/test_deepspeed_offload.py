"""With engine=deepspeed the optimizer, and parameters, may live in host memory: nothing that a user sees changes."""

from __future__ import annotations

import pytest

from hybridpar.parallel.deepspeed_config import deepspeed_config
from hybridpar.parity import Parity
from hybridpar.parity_layouts import parity_run
from hybridpar.specs import RunSpec


def _run(**strategy: object) -> RunSpec:
    small = {"layers": 2, "vocab": 67}
    return parity_run("transformer", {"engine": "deepspeed", "dp": 2, **strategy}, precision="fp32", model=small)


@pytest.fixture(scope="module")
def parity() -> Parity:
    return Parity()


@pytest.mark.parametrize(("zero", "offload"), [(1, "optimizer"), (2, "optimizer"), (3, "optimizer"), (3, "parameters")])
def test_host_memory_changes_no_number(parity: Parity, zero: int, offload: str) -> None:
    report = parity.compare(_run(zero=zero, offload=offload))
    assert report.verdict == "equal", report.row()


def test_parameters_in_host_memory_take_their_optimizer_with_them() -> None:
    zero = deepspeed_config(_run(zero=3, offload="parameters"))["zero_optimization"]
    assert zero["offload_param"] == zero["offload_optimizer"] == {"device": "cpu"}
