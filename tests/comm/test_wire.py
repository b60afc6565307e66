"""Bytes on the wire by the ring formulas."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridpar.comm.wire import OPERATIONS, wire_bytes
from tests.comm import loopback


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        ("all_reduce", 1500),
        ("all_gather", 750),
        ("reduce_scatter", 750),
        ("all_to_all", 750),
        ("broadcast", 750),
        ("send", 1000),
        ("recv", 0),
        ("barrier", 0),
    ],
)
def test_four_ranks_send_their_share_of_a_thousand_bytes(operation: str, expected: int) -> None:
    assert wire_bytes(operation, 4, 1000) == expected


@given(st.integers(2, 64), st.integers(0, 1 << 20))
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(ranks: int, chunk: int) -> None:
    size = ranks * chunk
    parts = wire_bytes("reduce_scatter", ranks, size) + wire_bytes("all_gather", ranks, size)
    assert wire_bytes("all_reduce", ranks, size) == parts


@given(st.sampled_from(OPERATIONS), st.integers(0, 1 << 20))
def test_one_rank_alone_sends_nothing_but_messages(operation: str, size: int) -> None:
    assert operation == "send" or wire_bytes(operation, 1, size) == 0


_OWN_NETWORK = ("unshare", "--map-root-user", "--net")


def _may_have_a_network_of_its_own() -> bool:
    found = shutil.which("unshare") and shutil.which("ip")
    return bool(found) and subprocess.run([*_OWN_NETWORK, "true"], check=False, capture_output=True).returncode == 0


@pytest.mark.skipif(not _may_have_a_network_of_its_own(), reason="needs network namespaces")
def test_the_formulas_are_what_the_network_interface_counts() -> None:
    command = [*_OWN_NETWORK, sys.executable, "-m", loopback.__name__]
    sent = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    assert sent.keys() == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"}
    for operation, measured in sent.items():
        formula = loopback.RANKS * wire_bytes(operation, loopback.RANKS, loopback.WHOLE_BYTES)
        # headers and acknowledgements come on top
        assert formula <= measured <= 1.01 * formula, operation
