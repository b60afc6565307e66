"""Measuring a testbed: what is asked is what its links and devices come near, and readings are arithmetic."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridpar.launch.forked import preload
from hybridpar.testbed import network
from hybridpar.testbed.check import check_plain, check_scaled, efficiency_by_side
from hybridpar.testbed.plan import Plan


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    preload()


def test_links_do_what_is_asked_and_uplinks_are_shared(registry: Path) -> None:
    plan = Plan(nodes=2, devices_per_node=2, intra_bit_s=200_000_000, inter_bit_s=40_000_000, device_share=0.3)
    with network.owned(plan, registry) as testbed:
        found = check_scaled(testbed)
    assert found.testbed == "scale-2x2-200M-40M-share0.3"
    readings = {reading.name: reading for reading in found.readings}
    assert {name: reading.asked for name, reading in readings.items() if reading.unit == "bit/s"} == {
        "message inside a node": 200e6,
        "message across nodes": 40e6,
        "all-reduce inside nodes": 200e6,
        "all-reduce across nodes, all at once": 20e6,
        "all-reduce of all": 40e6,
    }
    for reading in readings.values():
        assert reading.least <= reading.measured <= reading.largest
        if reading.unit == "bit/s":  # never faster than the link; slower where other work takes the cores
            assert 0.3 < (reading.ratio or 0) < 1.1, reading
    assert readings["message across nodes"].measured < readings["message inside a node"].measured / 2
    assert readings["share of a core"].largest < 0.35
    assert readings["device"].asked == pytest.approx(0.3 * readings["one core"].measured)
    assert 0 < readings["latency inside a node"].measured < 0.1


def test_of_plain_loopback_nothing_is_asked() -> None:
    found = check_plain(2)
    assert found.testbed == "plain-loopback"
    assert all(reading.asked is None and reading.ratio is None for reading in found.readings)
    assert "message across nodes" not in {reading.name for reading in found.readings}


def test_small_products_reach_less_of_a_core() -> None:
    found = efficiency_by_side([8, 512])
    assert 0 < found[8] < 0.5
    assert 0.5 < found[512] < 2
    with pytest.raises(ValueError, match="side=0 is not legal; legal: 1 or more"):
        efficiency_by_side([0])
