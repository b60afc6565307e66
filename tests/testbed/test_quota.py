"""CPU quotas: arithmetic, files of both versions, and the real kernel where it lets us."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridpar.launch.forked import fork_ranks, values
from hybridpar.testbed import quota
from hybridpar.testbed.quota import Hierarchy, Quota, QuotaError


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (0.4, Quota(2000, 5000)),
        (1.0, Quota(5000, 5000)),
        (2.5, Quota(12500, 5000)),
        (0.2, Quota(1000, 5000)),
        (0.1, Quota(1000, 10000)),
        (0.03, Quota(1000, 33333)),
    ],
)
def test_a_share_is_a_quota_in_a_short_period_and_never_below_a_millisecond(share: float, expected: Quota) -> None:
    assert Quota.of(share) == expected


@pytest.mark.parametrize("share", [0.0, -1.0, 0.0001])
def test_a_share_that_the_kernel_cannot_give_is_refused(share: float) -> None:
    with pytest.raises(QuotaError, match=r"testbed.device_share=\S+ cannot be given by the kernel; legal: at least"):
        Quota.of(share)


def test_the_hierarchy_with_the_cpu_controller_is_found(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io memory\n")
    second = f"cgroup2 {tmp_path} cgroup2 rw,relatime 0 0"
    first = "cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,cpu,cpuacct 0 0"
    other = "cgroup /sys/fs/cgroup/cpuset cgroup rw,cpuset 0 0"
    assert quota.find_hierarchy(f"{other}\n{first}\n") == Hierarchy(1, Path("/sys/fs/cgroup/cpu,cpuacct"))
    assert quota.find_hierarchy(f"{other}\n{second}\n") == Hierarchy(2, tmp_path)
    (tmp_path / "cgroup.controllers").write_text("memory\n")
    assert quota.find_hierarchy(f"{second}\n{first}\n").version == 1, "version 2 beside it, without the controller"


def test_a_machine_without_cgroups_gets_a_sentence() -> None:
    with pytest.raises(QuotaError, match="there is none here"):
        quota.find_hierarchy("proc /proc proc rw 0 0\n")


def test_files_of_version_1(tmp_path: Path) -> None:
    hierarchy = Hierarchy(1, tmp_path)
    quota.create(hierarchy, "bed", 2, Quota(2000, 5000))
    group = tmp_path / "bed" / "rank-1" / "device"
    assert (group / "cpu.cfs_period_us").read_text() == "5000"
    assert (group / "cpu.cfs_quota_us").read_text() == "2000"
    assert (tmp_path / "bed" / "cpu.shares").read_text() == "262144"
    assert quota.quota_now(hierarchy, "bed", 1) == Quota(2000, 5000)


def test_files_of_version_2(tmp_path: Path) -> None:
    hierarchy = Hierarchy(2, tmp_path)
    (tmp_path / "cgroup.subtree_control").write_text("memory cpu")
    quota.create(hierarchy, "bed", 2, Quota(2000, 5000))
    assert (tmp_path / "bed" / "cgroup.subtree_control").read_text() == "+cpu"
    assert (tmp_path / "cgroup.subtree_control").read_text() == "memory cpu", "handed down already"
    rank = tmp_path / "bed" / "rank-0"
    assert (rank / "cgroup.subtree_control").read_text() == "+cpu"
    assert (rank / "device" / "cgroup.type").read_text() == "threaded"
    assert (rank / "device" / "cpu.max").read_text() == "2000 5000"
    assert (tmp_path / "bed" / "cpu.weight").read_text() == "10000"
    assert quota.quota_now(hierarchy, "bed", 0) == Quota(2000, 5000)


def test_groups_that_cannot_be_written_get_a_sentence_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(QuotaError, match=r"cgroup v2 at /nowhere/bed: Permission denied; run as root"):
        quota.create(Hierarchy(2, Path("/nowhere")), "bed", 1, Quota(2000, 5000))


def test_another_testbeds_groups_are_left_alone(tmp_path: Path) -> None:
    hierarchy = Hierarchy(1, tmp_path)
    quota.create(hierarchy, "bed", 1, Quota(2000, 5000))
    with pytest.raises(QuotaError, match="File exists"):
        quota.create(hierarchy, "bed", 1, Quota(1000, 5000))
    assert quota.quota_now(hierarchy, "bed", 0) == Quota(2000, 5000)


def _burn(seconds: float) -> float:
    """Share of a core that this process got."""
    wall, cpu = time.perf_counter(), time.process_time()
    while time.perf_counter() - wall < seconds:
        pass
    return (time.process_time() - cpu) / (time.perf_counter() - wall)


@pytest.fixture
def real() -> Iterator[tuple[Hierarchy, str]]:
    """The kernel's own hierarchy, and a name that no other test has."""
    name = f"hptest-{os.getpid()}"
    try:
        hierarchy = quota.find_hierarchy()
        quota.create(hierarchy, name, 1, Quota.of(0.2))
    except QuotaError as reason:
        pytest.skip(str(reason))
    yield hierarchy, name
    quota.remove(hierarchy, name)


def test_a_rank_gets_no_more_than_its_share(real: tuple[Hierarchy, str], tmp_path: Path) -> None:
    hierarchy, name = real
    assert quota.quota_now(hierarchy, name, 0) == Quota(1000, 5000)
    exits = fork_ranks(
        1, lambda _: _burn(0.6), deadline_s=20, log_dir=tmp_path, enter=lambda rank: quota.enter(hierarchy, name, rank)
    )
    (share,) = values(exits)
    assert 0.02 < share < 0.25


def test_groups_are_gone_once_removed(real: tuple[Hierarchy, str]) -> None:
    hierarchy, name = real
    quota.remove(hierarchy, name)
    assert not (hierarchy.root / name).exists()
    quota.remove(hierarchy, name)  # again is no fault
    with pytest.raises(QuotaError, match="cannot enter its CPU quota"):
        quota.enter(hierarchy, name, 0)
