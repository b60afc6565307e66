"""When FSDP2 gathers, on paper; against the program: tests/test_check_theory.py."""

from __future__ import annotations

import pytest

from hybridpar.parity_layouts import parity_run
from hybridpar.specs import RunSpec
from hybridpar.theory.gathering import Gathering, Unit, gathering

BLOCKS = {stage: (f"blocks.{2 * stage}", f"blocks.{2 * stage + 1}") for stage in range(4)}


def _run(micro_batches: int, **strategy: object) -> RunSpec:
    return parity_run("transformer", {"dp": 2, **strategy}, workload={"global_batch": 2 * micro_batches})


def _units(*stages: int) -> list[Unit]:
    return [
        unit
        for stage in stages
        for unit in (Unit(f"root {stage}", stage, 100), *(Unit(name, stage, 10) for name in BLOCKS[stage]))
    ]


def _gathers(seen: Gathering) -> dict[str, int]:
    return dict(seen.times)


def test_zero_2_gathers_once_and_keeps_all() -> None:
    seen = gathering(_run(3, zero=2), 0, _units(0))
    assert _gathers(seen) == {"root 0": 1, "blocks.0": 1, "blocks.1": 1}
    assert seen.peak == 120


def test_zero_3_gathers_blocks_for_each_pass_and_the_root_for_each_micro_batch() -> None:
    seen = gathering(_run(3, zero=3), 0, _units(0))
    assert _gathers(seen) == {"root 0": 3, "blocks.0": 6, "blocks.1": 6}
    assert seen.peak == 110


def test_experts_are_whole_beside_their_block() -> None:
    units = [Unit("root 0", 0, 100), Unit("blocks.0", 0, 10), Unit("blocks.0 experts", 0, 50), Unit("blocks.1", 0, 10)]
    assert gathering(_run(1, zero=3), 0, units).peak == 160


def test_a_pipeline_keeps_blocks_whole_from_a_backward_pass_to_a_forward_pass() -> None:
    # First rank of two, four micro-batches: F F B F B F B B. Whole after B, so the F after it gathers nothing.
    seen = gathering(_run(4, pp=2, zero=3, schedule="1f1b"), 0, _units(0))
    assert _gathers(seen) == {"root 0": 1, "blocks.0": 5, "blocks.1": 5}
    assert seen.peak == 120


def test_gpipe_gathers_for_each_forward_pass_and_once_for_all_backward_passes() -> None:
    seen = gathering(_run(4, pp=2, zero=3, schedule="gpipe"), 0, _units(0))
    assert _gathers(seen) == {"root 0": 1, "blocks.0": 5, "blocks.1": 5}


@pytest.mark.parametrize(("schedule", "stages"), [("zero-bubble", (0,)), ("zb-v", (0, 3)), ("dualpipe-v", (0, 3))])
def test_split_backward_passes_find_all_whole(schedule: str, stages: tuple[int, ...]) -> None:
    seen = gathering(_run(4, pp=2, zero=2, schedule=schedule), 0, _units(*stages))
    assert set(seen.times.values()) == {1}
    assert seen.peak == 120 * len(stages)
