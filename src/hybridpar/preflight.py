"""Looks at the machine before anything is queued: each finding says what is wrong and how to mend it.

Only cheap looks: nothing is launched, no torch is imported (its version is read from the installed metadata).
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

GIB = 1 << 30
# A rank of the CPU study holds torch, its model and its activations; measured below 0.6 GiB each.
BYTES_PER_RANK = 0.75 * GIB
BYTES_ON_DISK = 2 * GIB


@dataclass(frozen=True)
class Finding:
    """One look: `ok`, what was seen, and the one-line remedy where it is not ok."""

    name: str
    ok: bool
    seen: str
    remedy: str = ""


def inspect(world: int, data_dir: Path, engines: frozenset[str]) -> tuple[Finding, ...]:
    """All findings for a study whose largest run has `world` ranks and whose runs land under `data_dir`."""
    looks: tuple[Callable[[], Finding], ...] = (
        _python,
        lambda: _package("torch"),
        *([lambda: _package("deepspeed"), _compiler] if "deepspeed" in engines else []),
        lambda: _cores(world),
        lambda: _memory(world),
        lambda: _disk(data_dir),
        _loopback,
        lambda: _corpus(data_dir),
    )
    return tuple(look() for look in looks)


def _python() -> Finding:
    seen = ".".join(map(str, sys.version_info[:3]))
    return Finding("python", sys.version_info >= (3, 11), seen, "install Python 3.11 or newer and run make env again")


def _package(name: str) -> Finding:
    try:
        return Finding(name, True, version(name))
    except PackageNotFoundError:
        return Finding(name, False, "not installed", "run make env")


def _compiler() -> Finding:
    found = shutil.which("g++") or shutil.which("c++")
    # DeepSpeed's CPU optimizer and its shared-memory collectives compile on first use; the study uses neither.
    return Finding("C++ compiler", True, found or "none: DeepSpeed's compiled extras are not available")


def _cores(world: int) -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    shared = f"; the largest run has {world} ranks, which share them" if world > cores else ""
    return Finding("cores", cores >= 1, f"{cores}{shared}")


def _memory(world: int) -> Finding:
    free, needed = psutil.virtual_memory().available, world * BYTES_PER_RANK
    remedy = f"free {needed / GIB:.1f} GiB, or take a study with fewer ranks (make smoke)"
    return Finding("memory", free >= needed, f"{free / GIB:.1f} GiB free, {needed / GIB:.1f} asked", remedy)


def _disk(data_dir: Path) -> Finding:
    existing = next(path for path in (data_dir, *data_dir.resolve().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    remedy = f"free {BYTES_ON_DISK / GIB:.0f} GiB on the file system of {data_dir}"
    return Finding("disk", free >= BYTES_ON_DISK, f"{free / GIB:.1f} GiB free", remedy)


def _loopback() -> Finding:
    try:
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            return Finding("loopback", True, f"port {server.getsockname()[1]} could be opened")
    except OSError as error:
        return Finding("loopback", False, str(error), "bring up the interface lo; ranks talk over it")


def _corpus(data_dir: Path) -> Finding:
    prepared = sorted((data_dir / "corpus").glob("*"))
    seen = f"{len(prepared)} files" if prepared else "not prepared yet; the first run downloads it"
    return Finding("corpus", True, seen)
