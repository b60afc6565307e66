"""What each ZeRO stage keeps on a rank, and what it sends."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from torch import Tensor

from hybridpar.comm.metered import meter
from hybridpar.comm.process_group import ProcessMesh
from hybridpar.parallel.apply import build_engine
from hybridpar.specs import RunSpec
from tests.parallel.ranks import batch_of, on_ranks, parity_run

DP = 2


def _numbers(tensors: tuple[Tensor, ...]) -> int:
    return sum(tensor.numel() for tensor in tensors if tensor.dim())  # AdamW's step counts are scalars


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, int]]:
    """By stage, the numbers held over all ranks after a step, by category."""
    found = {}
    for zero in (0, 1, 2, 3):
        run = parity_run("transformer", dp=DP, zero=zero)

        def body(mesh: ProcessMesh, run: RunSpec = run) -> dict[str, int]:
            engine = build_engine(run, mesh)
            engine.step(*batch_of(run, mesh.coordinate.dp))
            parts = engine.parts()
            return {name: _numbers(getattr(parts, name)) for name in ("parameters", "gradients", "optimizer")}

        ranks = on_ranks(run.strategy, tmp_path_factory.mktemp(f"zero{zero}"), body)
        found[zero] = {name: sum(rank[name] for rank in ranks) for name in ranks[0]}
    return found


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_between_steps_a_stage_holds_once_what_it_shards(held: dict[int, dict[str, int]], zero: int) -> None:
    model = held[3]["parameters"]
    # FSDP2 keeps parameters and gradients of ZeRO-2 sharded between steps as well.
    assert held[zero] == {
        "parameters": model * (1 if zero >= 2 else DP),
        "gradients": model * (1 if zero >= 2 else DP),
        "optimizer": 2 * model * (1 if zero >= 1 else DP),
    }


def _calls(folder: Path, zero: int) -> tuple[Counter[str], int, int]:
    run = parity_run("transformer", dp=DP, zero=zero)

    def body(mesh: ProcessMesh) -> Counter[str]:
        engine = build_engine(run, mesh)
        for seed in range(3):  # DDP lays its buckets out anew in the second
            meter().drain()
            engine.step(*batch_of(run, mesh.coordinate.dp, seed))
        return Counter({row.op.replace("_", "-"): row.calls for row in meter().drain() if row.group == "dp"})

    return on_ranks(run.strategy, folder, body)[0], run.micro_batches, run.model.layers


def test_zero_2_gathers_parameters_once_a_step(tmp_path: Path) -> None:
    calls, _, layers = _calls(tmp_path, 2)
    groups = layers + 1  # blocks, and the rest
    assert calls == {"all-gather": groups, "reduce-scatter": groups, "all-reduce": 1}  # the last is the norm


def test_zero_3_gathers_them_for_every_forward_and_backward(tmp_path: Path) -> None:
    calls, micro_batches, layers = _calls(tmp_path, 3)
    gathers = micro_batches * (2 * layers + 1)  # what is no block stays from the forward to the backward
    assert calls == {"all-gather": gathers, "reduce-scatter": layers + 1, "all-reduce": 1}


def test_gradients_are_reduced_once_a_step_however_many_micro_batches(tmp_path: Path) -> None:
    calls, micro_batches, _ = _calls(tmp_path, 0)
    assert micro_batches > 1
    assert calls == {"all-reduce": 1}  # one bucket: the model is small
