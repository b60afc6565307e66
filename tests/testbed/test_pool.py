"""The testbeds of a batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hybridpar.testbed import network
from hybridpar.testbed.plan import Plan
from hybridpar.testbed.pool import Testbeds as Pool
from tests.testbed.left import left_of


def test_runs_on_the_same_plan_share_a_testbed_and_another_plan_takes_its_place(plan: Plan, registry: Path) -> None:
    with Pool(registry) as testbeds:
        first = testbeds.of(plan)
        assert testbeds.of(replace(plan, testbed_id="ffffff")) is first, "alike but for its name"
        other = replace(plan, inter_bit_s=50_000_000, testbed_id="eeeeee")
        assert testbeds.of(other).label == "scale-2x2-400M-50M-share0.3"
        assert left_of(plan) == []
        assert len(network.entries(registry)) == 1
    assert left_of(other) == []
    assert network.entries(registry) == ()


def test_without_a_plan_ranks_stay_on_plain_loopback(tmp_path: Path) -> None:
    with Pool(tmp_path / "registry") as testbeds:
        assert testbeds.of(None).label == "plain-loopback"
    assert not (tmp_path / "registry").exists()


def _interrupted(plan: Plan, registry: Path) -> None:
    with Pool(registry) as testbeds:
        testbeds.of(plan)
        assert left_of(plan)
        raise KeyboardInterrupt


def test_an_interrupt_in_the_middle_of_a_batch_takes_it_down(plan: Plan, registry: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        _interrupted(plan, registry)
    assert left_of(plan) == []
