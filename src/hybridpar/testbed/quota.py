"""A device is a share of a core: CPU quotas by cgroup, version 1 or 2. No torch here.

Each rank has a group, and in it a group `device` whose threads together may use `quota` microseconds of CPU time in
each `period` (Linux, sched-bwc.rst). Threads of gloo, which carry bytes, leave the inner group (`let_communicate`): a
GPU's links, too, run beside its cores, and a share of a core that computes could not carry what they carry. So that
the quota alone makes a device's speed, the groups go before other work on the machine (the largest weight there is).
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

_PERIOD_US = 5000
_LEAST_QUOTA_US = 1000  # the kernel takes no less, and no period above a second
_LONGEST_PERIOD_US = 1_000_000
# File and value, by version, that let a group go first where cores are short.
_FIRST = {1: ("cpu.shares", "262144"), 2: ("cpu.weight", "10000")}
_MOUNTS = Path("/proc/self/mounts")
_TASKS = Path("/proc/self/task")
_DEVICE = "device"
_COMMUNICATING = "gloo"  # in the names of its threads: pt_gloo_runloop, gloo_tcp_loop
_LOOK_EVERY_S = 0.05
_EMPTY_WITHIN_S = 5.0
_POLL_S = 0.02


class QuotaError(Exception):
    """CPU quotas cannot be set here; one sentence."""


@dataclass(frozen=True)
class Quota:
    """CPU microseconds in each period of microseconds."""

    quota_us: int
    period_us: int

    @classmethod
    def of(cls, share: float) -> Quota:
        """The quota that gives `share` of a core: 2 ms in each 5 ms for 0.4.

        Raises:
            QuotaError: the kernel cannot give so little.
        """
        quota = round(share * _PERIOD_US)
        if quota >= _LEAST_QUOTA_US:
            return cls(quota, _PERIOD_US)
        period = round(_LEAST_QUOTA_US / share) if share > 0 else 0
        if not 0 < period <= _LONGEST_PERIOD_US:
            least = _LEAST_QUOTA_US / _LONGEST_PERIOD_US
            raise QuotaError(f"testbed.device_share={share:g} cannot be given by the kernel; legal: at least {least:g}")
        return cls(_LEAST_QUOTA_US, period)


@dataclass(frozen=True)
class Hierarchy:
    """Where the kernel keeps groups with a CPU quota."""

    version: int
    root: Path


def find_hierarchy(mounts: str | None = None) -> Hierarchy:
    """The hierarchy of cgroups that has the cpu controller, from the text of /proc/self/mounts.

    Raises:
        QuotaError: there is none.
    """
    lines = (_MOUNTS.read_text() if mounts is None else mounts).splitlines()
    for _, place, kind, options, *_ in (line.split(" ") for line in lines):
        if kind == "cgroup" and "cpu" in options.split(","):
            return Hierarchy(1, Path(place))
        if kind == "cgroup2" and "cpu" in _words(Path(place) / "cgroup.controllers"):
            return Hierarchy(2, Path(place))
    raise QuotaError("CPU quotas need a mounted cgroup hierarchy with the cpu controller, and there is none here")


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def group_of(hierarchy: Hierarchy, name: str, rank: int) -> Path:
    """The folder of a rank's group, which has no quota."""
    return hierarchy.root / name / f"rank-{rank}"


def device_of(hierarchy: Hierarchy, name: str, rank: int) -> Path:
    """The folder of the group that computes, which has one."""
    return group_of(hierarchy, name, rank) / _DEVICE


def create(hierarchy: Hierarchy, name: str, ranks: int, quota: Quota) -> None:
    """Make the groups `name`/rank-<r>/device, each with the quota.

    Raises:
        QuotaError: the kernel refuses; nothing is left behind.
    """
    try:
        (hierarchy.root / name).mkdir()
    except OSError as error:
        raise QuotaError(_refusal(hierarchy, error)) from None
    try:
        _delegate(hierarchy, name)
        file, weight = _FIRST[hierarchy.version]
        (hierarchy.root / name / file).write_text(weight)
        for rank in range(ranks):
            _add_rank(hierarchy, name, rank, quota)
    except OSError as error:
        remove(hierarchy, name)
        raise QuotaError(_refusal(hierarchy, error)) from None


def _add_rank(hierarchy: Hierarchy, name: str, rank: int, quota: Quota) -> None:
    group, device = group_of(hierarchy, name, rank), device_of(hierarchy, name, rank)
    group.mkdir()
    device.mkdir()
    if hierarchy.version == 2:
        # threads of one process may be in several groups only below a "domain threaded", which this makes of `group`
        (device / "cgroup.type").write_text("threaded")
        (group / "cgroup.subtree_control").write_text("+cpu")
    _limit(hierarchy, device, quota)


def _delegate(hierarchy: Hierarchy, name: str) -> None:
    """In version 2 a group may use a controller only where all above it hand it down."""
    if hierarchy.version == 1:
        return
    for folder in (hierarchy.root, hierarchy.root / name):
        if "cpu" not in _words(folder / "cgroup.subtree_control"):
            (folder / "cgroup.subtree_control").write_text("+cpu")


def _limit(hierarchy: Hierarchy, group: Path, quota: Quota) -> None:
    if hierarchy.version == 2:
        (group / "cpu.max").write_text(f"{quota.quota_us} {quota.period_us}")
        return
    (group / "cpu.cfs_period_us").write_text(str(quota.period_us))
    (group / "cpu.cfs_quota_us").write_text(str(quota.quota_us))


def _refusal(hierarchy: Hierarchy, error: OSError) -> str:
    where = error.filename or hierarchy.root
    why = os.strerror(error.errno) if error.errno else str(error)
    remedy = {
        errno.EACCES: "; run as root",
        errno.EPERM: "; run as root",
        errno.EROFS: "; mount the hierarchy writable (in a container: as privileged)",
        errno.EBUSY: "; processes live in the group above, which may then hand no controller down",
    }.get(error.errno or 0, "")
    return f"CPU quotas cannot be set by cgroup v{hierarchy.version} at {where}: {why}{remedy}"


def quota_now(hierarchy: Hierarchy, name: str, rank: int) -> Quota:
    """The quota of a rank as the kernel tells it.

    Raises:
        QuotaError: there is no such group, or it has no quota.
    """
    group = device_of(hierarchy, name, rank)
    try:
        if hierarchy.version == 2:
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota, period = ((group / f"cpu.cfs_{part}_us").read_text() for part in ("quota", "period"))
        return Quota(int(quota), int(period))
    except (OSError, ValueError) as error:
        raise QuotaError(f"{group} has no CPU quota: {error}") from None


def enter(hierarchy: Hierarchy, name: str, rank: int) -> None:
    """Put this process, while it has one thread, under the quota of a rank; threads that it starts begin there too.

    Raises:
        QuotaError: the kernel refuses.
    """
    group = group_of(hierarchy, name, rank)
    try:
        (group / "cgroup.procs").write_text(str(os.getpid()))
        _move(hierarchy, device_of(hierarchy, name, rank), os.getpid())
    except OSError as error:
        raise QuotaError(
            f"rank {rank} cannot enter its CPU quota at {error.filename or group}: {error.strerror}"
        ) from None


def let_communicate(hierarchy: Hierarchy, name: str, rank: int) -> None:
    """Keep threads of gloo outside the quota from now on: groups of ranks come at any time, each with its threads."""
    group = group_of(hierarchy, name, rank)

    def watch() -> None:
        free = {threading.get_native_id()}
        _move(hierarchy, group, threading.get_native_id())
        while True:
            for thread in _communicating() - free:
                with contextlib.suppress(OSError):  # it has just ended
                    _move(hierarchy, group, thread)
                    free.add(thread)
            time.sleep(_LOOK_EVERY_S)

    threading.Thread(target=watch, name="quota", daemon=True).start()


def _communicating() -> set[int]:
    found = set()
    for task in _TASKS.iterdir():
        with contextlib.suppress(OSError):
            if _COMMUNICATING in (task / "comm").read_text():
                found.add(int(task.name))
    return found


def _move(hierarchy: Hierarchy, group: Path, thread: int) -> None:
    (group / ("tasks" if hierarchy.version == 1 else "cgroup.threads")).write_text(str(thread))


def members(hierarchy: Hierarchy, name: str) -> list[int]:
    """Processes in the groups `name`/*. In version 2 the outer group lists those of the inner one."""
    groups = [group for pattern in ("rank-*", f"rank-*/{_DEVICE}") for group in (hierarchy.root / name).glob(pattern)]
    return sorted({int(pid) for group in groups for pid in _words(group / "cgroup.procs")})


def remove(hierarchy: Hierarchy, name: str) -> None:
    """Remove the groups `name`/*, if they are there; processes that are just leaving are waited for.

    Raises:
        QuotaError: a group is still in use.
    """
    top = hierarchy.root / name
    for group in (*sorted(top.glob(f"rank-*/{_DEVICE}")), *sorted(top.glob("rank-*")), top):
        _remove_group(group)


def _remove_group(group: Path) -> None:
    end = time.monotonic() + _EMPTY_WITHIN_S
    while True:
        try:
            group.rmdir()
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > end:
                raise QuotaError(f"{group} cannot be removed: {error.strerror}") from None
            time.sleep(_POLL_S)
        else:
            return
