"""Activations kept for the backward pass, against the literature; against the program: tests/test_check_theory.py."""

from __future__ import annotations

from typing import Any

from hybridpar.parity_layouts import parity_run
from hybridpar.theory.activations import peak_activations, pieces_of_stage


def _per_layer(layout: dict[str, Any], **changes: Any) -> int:
    """Bytes of one inner layer's pieces for one micro-batch."""
    run = parity_run("transformer", layout, precision="fp32", workload=changes)
    return sum(piece.kept_bytes for piece in pieces_of_stage(run, 0, 0) if piece.layer == "layer 3")


def test_sequence_parallelism_divides_all_but_the_inputs_of_column_parallel_products() -> None:
    """Korthikanti et al. 2022, eq. 4, but for what is kept gathered here: two inputs of T*d numbers, and rotations."""
    whole, split = _per_layer({}), _per_layer({"tp": 2, "sp": True})
    gathered = 2 * 48 * 32 * 4 + 4 * 48 * 4 * 4
    assert (whole - gathered) / 2 == split - gathered


def test_full_recomputation_keeps_a_layers_input_alone() -> None:
    """Korthikanti et al. 2022, section 5: 2*s*b*h bytes in bf16, here 4 a number."""
    assert _per_layer({"recompute": "full"}) == 48 * 32 * 4


def test_activations_grow_with_the_micro_batch() -> None:
    rotations = 4 * 48 * 4 * 4
    assert _per_layer({}, micro_batch=2) - rotations == 2 * (_per_layer({}) - rotations)


def test_1f1b_holds_at_most_as_many_micro_batches_as_there_are_stages_to_come() -> None:
    few = [
        peak_activations(parity_run("transformer", {"pp": 4, "schedule": "1f1b"}, workload={"global_batch": n}), 1)
        for n in (8, 16)
    ]
    all_of_them = [
        peak_activations(parity_run("transformer", {"pp": 4, "schedule": "gpipe"}, workload={"global_batch": n}), 1)
        for n in (8, 16)
    ]
    assert few[0] == few[1]
    assert all_of_them == [few[0] * 8 // 3, few[0] * 16 // 3]


def test_recomputation_keeps_less_under_a_split_backward_pass_too() -> None:
    layout = {"pp": 2, "schedule": "zb-v"}
    whole, inputs = (
        peak_activations(parity_run("transformer", {**layout, "recompute": recompute}), 0)
        for recompute in ("none", "full")
    )
    assert inputs < whole
