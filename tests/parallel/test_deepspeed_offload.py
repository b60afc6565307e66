"""With engine=deepspeed the optimizer, and parameters, may live in host memory: nothing that a user sees changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from hybridpar.comm.process_group import ProcessMesh
from hybridpar.launch.forked import preload
from hybridpar.parallel.apply import build_engine
from hybridpar.parallel.deepspeed_config import deepspeed_config
from hybridpar.parity import Parity
from hybridpar.parity_layouts import parity_run
from hybridpar.specs import RunSpec
from tests.parallel.ranks import batch_of, on_ranks


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


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_moments_and_copies_are_counted_as_the_hosts(tmp_path: Path, zero: int) -> None:
    run = _run(zero=zero, offload="optimizer")
    run = run.model_copy(update={"workload": run.workload.model_copy(update={"optimizer": "adamw"})})
    preload(deepspeed=True)

    def numbers(tensors: tuple[Tensor, ...]) -> int:
        return sum(t.numel() for t in tensors if t.is_floating_point() and t.dim())

    def body(mesh: ProcessMesh) -> tuple[int, int, int]:
        engine = build_engine(run, mesh)
        engine.step(*batch_of(run, mesh.coordinate.dp))
        parts = engine.parts()
        return numbers(parts.parameters), len(parts.optimizer), numbers(parts.host)

    ranks = on_ranks(run.strategy, tmp_path, body)
    parameters = sum(rank[0] for rank in ranks) // (1 if zero == 3 else 2)
    assert [optimizer for _, optimizer, _ in ranks] == [0, 0]
    held = sum(host for _, _, host in ranks)
    assert held == pytest.approx(3 * parameters, abs=64)  # partitions are padded
