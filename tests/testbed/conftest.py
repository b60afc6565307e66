"""A registry of their own for the testbeds of each test, and a skip where none can be brought up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridpar.testbed import network
from hybridpar.testbed.plan import Plan


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Path]:
    """Whatever a test that fails leaves in it is taken down."""
    reason = network.lacking()
    if reason:
        pytest.skip(reason)
    place = tmp_path / "registry"
    yield place
    for entry in network.entries(place):
        network.down(entry.testbed_id, place)


@pytest.fixture
def plan() -> Plan:
    """Two nodes of two devices; rates that any machine can carry."""
    return Plan(
        nodes=2, devices_per_node=2, intra_bit_s=400_000_000, inter_bit_s=100_000_000, device_share=0.3,
        device_memory_bytes=64 << 20,
    )  # fmt: skip
