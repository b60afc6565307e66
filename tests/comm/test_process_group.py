"""Joining and leaving the world, and the groups of the rank grid."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hybridpar.comm import process_group
from hybridpar.comm.process_group import ProcessMesh
from hybridpar.launch.forked import fork_ranks, values
from hybridpar.specs import Strategy
from tests.comm.world import in_world


def test_groups_are_those_of_the_grid() -> None:
    def body(mesh: ProcessMesh) -> dict[str, list[int]]:
        asked = (("pp",), ("dp",), ("tp",), ("cp",), ("pp", "dp"), ("dp", "tp"), ("tp", "pp"), ("dp", "cp"))
        asked += (("pp", "dp", "cp", "tp"),)
        return {"+".join(axes): dist.get_process_group_ranks(mesh.group(*axes)) for axes in asked}

    ranks = in_world(Strategy(pp=2, dp=2, tp=2), body)
    assert ranks[3] == {
        "pp": [3, 7],
        "dp": [1, 3],
        "tp": [2, 3],
        "cp": [3],
        "pp+dp": [1, 3, 5, 7],
        "dp+tp": [0, 1, 2, 3],
        "tp+pp": [2, 3, 6, 7],
        "dp+cp": [1, 3],
        "pp+dp+cp+tp": list(range(8)),
    }


def test_a_joint_group_reduces_over_its_ranks() -> None:
    def body(mesh: ProcessMesh) -> float:
        total = torch.tensor(float(2**mesh.rank))
        dist.all_reduce(total, group=mesh.group("pp", "tp"))
        return total.item()

    assert in_world(Strategy(pp=2, dp=2, tp=2), body) == [51, 51, 204, 204, 51, 51, 204, 204]


def test_coordinates_follow_the_grid() -> None:
    places = in_world(Strategy(pp=2, tp=2), lambda mesh: mesh.coordinate)
    assert [(place.pp, place.tp) for place in places] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_a_world_of_another_size_is_refused(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        process_group.start(rank, 1, tmp_path / "store", "cpu", 10)
        with pytest.raises(ValueError, match="dp2 asks for 2 devices; 1 ranks started"):
            ProcessMesh.build(Strategy(dp=2))
        process_group.stop()

    values(fork_ranks(1, body, deadline_s=30, log_dir=tmp_path / "logs"))


def test_a_peer_that_never_comes_is_an_error_at_the_deadline(tmp_path: Path) -> None:
    def body(rank: int) -> float:
        process_group.start(rank, 2, tmp_path / "store", "cpu", 2)
        start = time.monotonic()
        if rank == 0:
            with pytest.raises(RuntimeError):
                dist.all_reduce(torch.ones(3))
        else:
            time.sleep(4)
        return time.monotonic() - start

    waited = values(fork_ranks(2, body, deadline_s=30, log_dir=tmp_path / "logs"))
    assert 1 < waited[0] < 6


def test_a_rank_leaves_a_world_whose_peer_died(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        process_group.start(rank, 2, tmp_path / "store", "cpu", 5)
        dist.barrier()
        if rank == 0:
            time.sleep(0.2)  # rank 1 is gone, without a word
            process_group.stop()

    values(fork_ranks(2, body, deadline_s=30, log_dir=tmp_path / "logs"))
