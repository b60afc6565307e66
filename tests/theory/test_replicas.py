"""Which ranks hold the same parameters, and which share one copy."""

from __future__ import annotations

from hybridpar.parity_layouts import parity_run
from hybridpar.theory.replicas import Replicas


def test_copies_and_shards_of_hsdp() -> None:
    strategy = parity_run("transformer", {"dp": 4, "zero": 3, "zero_group": 2}).strategy
    replicas = Replicas(strategy, 1)
    assert (replicas.all, replicas.shards, replicas.copies) == ((0, 1, 2, 3), (0, 1), (1, 3))


def test_experts_are_apart_and_shared_across_blocks() -> None:
    strategy = parity_run("moe", {"dp": 4, "ep": 2}).strategy
    replicas = Replicas(strategy, 3)
    assert (replicas.ep, replicas.across_ep) == ((2, 3), (1, 3))
