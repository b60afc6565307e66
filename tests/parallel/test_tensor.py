"""What tensor parallelism sends: Megatron-LM's collectives and no more, counted by the meter of all groups.

Per micro-batch, with L layers that each enter and leave k parallel regions (k = 2 for attention with an MLP, 1 for
Mamba-2), the embedding leaves one more, the head enters one more, and the loss takes two (maximum, then sums).
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from hybridpar.comm.metered import meter
from hybridpar.comm.process_group import ProcessMesh
from hybridpar.parallel.apply import build_engine
from tests.parallel.ranks import batch_of, on_ranks, parity_run

REGIONS = {"transformer": 2, "mamba2": 1}


def _calls(folder: Path, family: str, **strategy: object) -> tuple[Counter[str], int, int]:
    """Calls over the tp axis of one step on rank 0, by operation; micro-batches and layers."""
    run = parity_run(family, **strategy)

    def body(mesh: ProcessMesh) -> Counter[str]:
        engine = build_engine(run, mesh)
        meter().drain()
        engine.step(*batch_of(run, mesh.coordinate.dp))
        return Counter({row.op.replace("_", "-"): row.calls for row in meter().drain() if row.group == "tp"})

    return on_ranks(run.strategy, folder, body)[0], run.micro_batches, run.model.layers


@pytest.mark.parametrize("family", REGIONS)
def test_all_reduces_are_those_of_megatron(tmp_path: Path, family: str) -> None:
    calls, micro_batches, layers = _calls(tmp_path, family, tp=2)
    activations = 2 * REGIONS[family] * layers + 2  # forward and backward of each region; embedding and head
    loss, norm = 2, 1
    shared_b_and_c = 1 if family == "mamba2" else 0  # their partial gradients, all together once a step
    assert calls == {"all-reduce": micro_batches * (activations + loss) + norm + shared_b_and_c}


@pytest.mark.parametrize("family", REGIONS)
def test_sequence_parallelism_splits_each_all_reduce_in_two(tmp_path: Path, family: str) -> None:
    calls, micro_batches, layers = _calls(tmp_path, family, tp=2, sp=True)
    # The embedding reduce-scatters and its backward all-gathers; the head the other way round.
    one_way = micro_batches * (2 * REGIONS[family] * layers + 2)
    loss, norm, partial_gradients = 2, 1, 1
    assert calls == {
        "all-gather": one_way,
        "reduce-scatter": one_way,
        "all-reduce": micro_batches * loss + norm + partial_gradients,
    }


@pytest.mark.parametrize(("family", "repeated_per_layer"), [("transformer", 1), ("mamba2", 1)])
def test_recomputation_repeats_only_collectives_whose_results_the_backward_needs(
    tmp_path: Path, family: str, repeated_per_layer: int
) -> None:
    """The sum after an MLP ends its block and is not needed; that of Mamba-2 is, as the norm's division follows it."""
    plain, micro_batches, layers = _calls(tmp_path / "plain", family, tp=2)
    again, _, _ = _calls(tmp_path / "again", family, tp=2, recompute="full")
    assert again["all-reduce"] - plain["all-reduce"] == micro_batches * layers * repeated_per_layer
