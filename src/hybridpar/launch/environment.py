"""What a run ran on: versions, processor, devices, commit. No torch here, and nothing that would start CUDA:
a process that has started it cannot fork ranks that use it."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from hybridpar.specs import TRAINING_CODE_VERSION, RunSpec

Device = Literal["cpu", "cuda"]
_VERSIONED = ("torch", "deepspeed", "numpy")


def describe(run: RunSpec, device: Device, peak: dict[str, Any] | None) -> dict[str, Any]:
    """The content of environment.json; `peak` says how the per-device peak was found, None where nothing ran."""
    return {
        "python": platform.python_version(),
        **{name: _installed(name) for name in _VERSIONED},
        "platform": platform.platform(),
        "cpu_model": cpu_model(),
        "cores": cores(),
        "threads_per_rank": run.cluster.threads_per_rank,
        "device": device,
        "gpus": list(gpu_names()),
        "launcher": run.cluster.launcher,
        "testbed": testbed(run, device),
        "peak_flops": peak,
        "git_commit": git_commit(),
        "training_code_version": TRAINING_CODE_VERSION,
    }


def resolve_device(run: RunSpec) -> Device:
    """`cpu` or `cuda`; `auto` takes CUDA where there are GPUs."""
    wanted = run.cluster.device
    if wanted == "auto":
        return "cuda" if gpu_names() else "cpu"
    return wanted


def lacking(run: RunSpec, device: Device) -> str | None:
    """What this machine has too little of for the run, in one sentence; None when it has enough."""
    gpus, world = len(gpu_names()), run.strategy.devices
    if device == "cpu" or gpus >= world:
        return None
    asked = f"cluster.device={run.cluster.device}: the strategy asks for {world} devices, and this machine has"
    return f"{asked} {gpus} GPUs; legal: cpu, or at most {gpus} devices" if gpus else f"{asked} no GPU; legal: cpu"


def testbed(run: RunSpec, device: Device) -> str:
    """The name of the cluster with the kind of device, which decides what its times can be compared with."""
    name = run.cluster.name
    return name if name.endswith(device) else f"{name}-{device}"


def peak_flops_per_s(run: RunSpec, device: Device, per_unit: float) -> float:
    """What all ranks together could reach, from the measured rate of one core or one GPU [FLOP/s].

    On CPUs a rank has `threads_per_rank` cores of its own until the machine has no more; beyond that ranks share the
    cores, and more ranks add nothing.
    """
    world = run.strategy.devices
    return per_unit * (world if device == "cuda" else min(world * run.cluster.threads_per_rank, cores()))


@cache
def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def cpu_model() -> str:
    """The processor's name as the kernel gives it."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found.group(1).strip() if found else platform.machine()


@cache
def gpu_names() -> tuple[str, ...]:
    """Names of the NVIDIA GPUs that this process may use, as the driver lists them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = tuple(
        found.group(1).strip()
        for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
        if (found := re.search(r"^Model:\s*(.+)$", path.read_text(), re.MULTILINE))
    )
    return names if visible is None else names[: len([index for index in visible.split(",") if index.strip()])]


@cache
def git_commit() -> str | None:
    """The commit of the code, or None outside a git checkout."""
    try:
        told = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return told.stdout.strip()


def kernel_oom_kills() -> int:
    """How many processes the kernel's out-of-memory killer has ended since boot; 0 where it does not tell."""
    try:
        found = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return int(found.group(1)) if found else 0


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
