"""Testbeds that are up: made, found again, taken down whatever happened to their owner. No torch here.

Each testbed has a file `<id>.json` in a registry, written before anything is made: its plan, and its owner by process
id, start time and boot. Whoever starts the next one removes what owners left that no longer live. A kept testbed has no
owner, and stands until it is taken down.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hybridpar.launch.forked import terminate_as_interrupt
from hybridpar.testbed import quota
from hybridpar.testbed.plan import Command, Plan, PlanError, down_commands, prefix_of, up_commands

REGISTRY = Path("/run/hybridpar/testbeds")
_NAMESPACES = Path("/run/netns")
_PROC = Path("/proc")
_CLONE_NEWNET = 0x40000000
_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}
_GONE_WITHIN_S = 5.0
_POLL_S = 0.02


class TestbedError(Exception):
    """A testbed cannot be had, or not be taken down; one sentence."""


class Testbed(Protocol):
    """Where ranks run."""

    @property
    def label(self) -> str:
        """Its name in tables."""

    def enter(self, rank: int) -> None:
        """Called in a fresh rank, while it has one thread: go to its place."""


@dataclass(frozen=True)
class PlainTestbed:
    """Loopback of this machine, nothing shaped: for those who may not do more, and never the same as a scale model."""

    label: str = "plain-loopback"

    def enter(self, rank: int) -> None:
        """Nowhere to go."""


@dataclass(frozen=True)
class ScaledTestbed:
    """A plan that is up."""

    plan: Plan
    hierarchy: quota.Hierarchy

    @property
    def label(self) -> str:
        """Its name in tables."""
        return self.plan.label

    def enter(self, rank: int) -> None:
        """Enter the rank's network namespace and CPU quota, and tell gloo its interface. For good: never in a parent.

        Raises:
            TestbedError: the testbed is not up, or has no such rank.
        """
        try:
            self.plan.node_of(rank)
            quota.enter(self.hierarchy, self.plan.prefix, rank)
            _enter_namespace(self.plan.namespace(rank))
        except (quota.QuotaError, PlanError) as error:
            raise TestbedError(str(error)) from None
        quota.let_communicate(self.hierarchy, self.plan.prefix, rank)
        os.environ["GLOO_SOCKET_IFNAME"] = self.plan.interface(rank)


@dataclass(frozen=True)
class Entry:
    """A testbed of the registry. `standing` says whose it is: kept, owned (by `owner_pid`) or left (owner is dead)."""

    testbed_id: str
    plan: Plan | None
    standing: str
    owner_pid: int | None
    namespaces: tuple[str, ...]
    members: tuple[int, ...]


def lacking() -> str | None:
    """What keeps this process from bringing a scale model up, in one sentence; None when nothing does."""
    for program, package in (("ip", "iproute2"), ("tc", "iproute2")):
        if shutil.which(program) is None:
            return f"the scale model needs the program {program}, which is not here; install {package}"
    missing = [name for name, bit in _CAPABILITIES.items() if not _effective_capabilities() >> bit & 1]
    if missing:
        return (
            f"the scale model makes network namespaces and needs {' and '.join(missing)}, which this process lacks; "
            "run as root, or choose the plain testbed (unshaped loopback, not comparable with a scale model)"
        )
    try:
        quota.find_hierarchy()
    except quota.QuotaError as error:
        return str(error)
    return None


def _effective_capabilities() -> int:
    lines = (_PROC / "self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("CapEff")).split()[1], 16)


@contextlib.contextmanager
def owned(plan: Plan, registry: Path = REGISTRY) -> Iterator[ScaledTestbed]:
    """A testbed for as long as the block runs; down after success, failure, Ctrl-C and SIGTERM.

    Raises:
        TestbedError: it cannot be had.
    """
    with terminate_as_interrupt(), _claimed(plan, registry) as claim:
        try:
            yield _build(plan, claim)
        finally:
            _take_down(plan.testbed_id, registry)


def keep(plan: Plan, registry: Path = REGISTRY) -> ScaledTestbed:
    """A testbed that stands until `down`; nothing is left when it fails or is interrupted.

    Raises:
        TestbedError: it cannot be had.
    """
    with terminate_as_interrupt(), _claimed(plan, registry) as claim:
        try:
            testbed = _build(plan, claim)
            with _locked(registry):
                _write_state(plan, None, registry)
        except BaseException:
            _take_down(plan.testbed_id, registry)
            raise
    return testbed


def down(testbed_id: str, registry: Path = REGISTRY) -> None:
    """Take a testbed down, whoever owns it; processes in its namespaces are killed.

    Raises:
        TestbedError: there is none of that name, or the kernel does not let go of it.
    """
    reason = lacking()
    if reason:
        raise TestbedError(reason)
    known = [entry.testbed_id for entry in entries(registry)]
    if testbed_id not in known:
        legal = ", ".join(known) or "there is no testbed"
        raise TestbedError(f"testbed={testbed_id!r} is unknown; legal: {legal}")
    _take_down(testbed_id, registry)


def standing(testbed_id: str, registry: Path = REGISTRY) -> ScaledTestbed:
    """A testbed that is up, to run ranks on.

    Raises:
        TestbedError: there is none of that name, or its owner is dead.
    """
    found = {entry.testbed_id: entry for entry in entries(registry)}
    entry = found.get(testbed_id)
    usable = [name for name, one in found.items() if one.standing != "left"]
    if entry is None or entry.plan is None or entry.standing == "left":
        raise TestbedError(f"testbed={testbed_id!r} is not up; legal: {', '.join(usable) or 'there is no testbed'}")
    return ScaledTestbed(entry.plan, _hierarchy())


def sweep(registry: Path = REGISTRY) -> tuple[str, ...]:
    """Remove what dead owners left; the names of their testbeds."""
    if not registry.is_dir():
        return ()
    with _locked(registry):
        left = tuple(entry.testbed_id for entry in entries(registry) if entry.standing == "left")
        for testbed_id in left:
            _wait_until_free(_held_file(testbed_id, registry))
            _take_down(testbed_id, registry)
    return left


def _wait_until_free(held: Path) -> None:
    """Until the last command of a dead owner has ended, and can make nothing more."""
    end = time.monotonic() + _GONE_WITHIN_S
    with contextlib.suppress(FileNotFoundError), held.open() as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > end:  # a rank that does not end; taking down kills it, or says that it cannot
                    return
                time.sleep(_POLL_S)
            else:
                return


def entries(registry: Path = REGISTRY) -> tuple[Entry, ...]:
    """All testbeds of the registry."""
    return tuple(_entry(path) for path in sorted(registry.glob("*.json")))


def _entry(path: Path) -> Entry:
    content = _content(path)
    try:
        plan: Plan | None = Plan.from_json(content.get("plan", {}))
    except PlanError:  # torn, or of another version: its owner and its name still count
        plan = None
    owner = content.get("owner", {})
    return Entry(
        testbed_id=path.stem,
        plan=plan,
        standing=_standing(owner),
        owner_pid=owner.get("pid") if isinstance(owner, dict) else None,
        namespaces=_namespaces(path.stem),
        members=tuple(sorted(_members(path.stem))),
    )


def _content(path: Path) -> dict[str, Any]:
    """Empty where the file is torn, or just gone."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _standing(owner: Any) -> str:
    if owner is None:
        return "kept"
    lives = isinstance(owner, dict) and bool(owner) and owner == _identity(owner.get("pid", 0))
    return "owned" if lives else "left"


# Up


@dataclass(frozen=True)
class _Claim:
    """What is needed to build. The file `held` is locked by this process and by all that it starts: ranks, and commands
    that a killed owner left in the middle of their work. Only when the lock is free is nobody building any more."""

    hierarchy: quota.Hierarchy
    held: int


@contextlib.contextmanager
def _claimed(plan: Plan, registry: Path) -> Iterator[_Claim]:
    """All that comes before anything is made. An interrupt at its end leaves files, which the next start removes."""
    reason = lacking()
    if reason:
        raise TestbedError(reason)
    sweep(registry)
    hierarchy = _hierarchy()
    held = _claim(plan, registry)
    try:
        yield _Claim(hierarchy, held)
    finally:
        os.close(held)


def _build(plan: Plan, claim: _Claim) -> ScaledTestbed:
    try:
        quota.create(claim.hierarchy, plan.prefix, plan.world, quota.Quota.of(plan.device_share))
    except quota.QuotaError as error:
        raise TestbedError(str(error)) from None
    for command in up_commands(plan):
        _run(command, claim.held)
    return ScaledTestbed(plan, claim.hierarchy)


def _hierarchy() -> quota.Hierarchy:
    try:
        return quota.find_hierarchy()
    except quota.QuotaError as error:
        raise TestbedError(str(error)) from None


def _claim(plan: Plan, registry: Path) -> int:
    """Tell of the testbed before it is there, so that nothing is ever there untold; the locked file."""
    try:
        registry.mkdir(parents=True, exist_ok=True)
        with _locked(registry):
            if _state_file(plan.testbed_id, registry).exists():
                raise TestbedError(f"testbed.testbed_id={plan.testbed_id} is up already; take it down, or leave it out")
            held = os.open(_held_file(plan.testbed_id, registry), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(held, fcntl.LOCK_EX)
            _write_state(plan, _identity(os.getpid()), registry)
            return held
    except OSError as error:
        raise TestbedError(f"{error.filename or registry} cannot be used: {error.strerror}") from None


@contextlib.contextmanager
def _locked(registry: Path) -> Iterator[None]:
    with (registry / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _state_file(testbed_id: str, registry: Path) -> Path:
    return registry / f"{testbed_id}.json"


def _held_file(testbed_id: str, registry: Path) -> Path:
    return registry / f"{testbed_id}.held"


def _write_state(plan: Plan, owner: dict[str, Any] | None, registry: Path) -> None:
    path = _state_file(plan.testbed_id, registry)
    written = path.with_suffix(".tmp")
    written.write_text(json.dumps({"plan": plan.as_json(), "owner": owner}))
    written.replace(path)


def _identity(pid: int) -> dict[str, Any]:
    """What tells a process from all others, also later ones with its number; empty for one that does not live."""
    try:
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return {}
    if fields[0] in "ZX":
        return {}
    return {"pid": pid, "started": int(fields[19]), "boot": boot}


def _run(command: Command, *inherited: int) -> None:
    # a session of its own: Ctrl-C at the terminal reaches this process, which then takes everything down
    done = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, start_new_session=True, pass_fds=inherited
    )
    if done.returncode:
        said = (done.stderr.strip() or "(it said nothing)").splitlines()[-1]
        raise TestbedError(f"`{' '.join(command)}` failed: {said}")


def _enter_namespace(name: str) -> None:
    """Move this thread, the only one, into a network namespace."""
    library = ctypes.CDLL(None, use_errno=True)
    try:
        with (_NAMESPACES / name).open() as namespace:
            if library.setns(namespace.fileno(), _CLONE_NEWNET) == 0:
                return
            code = ctypes.get_errno()
    except OSError as error:
        code = error.errno or 0
    raise TestbedError(f"the network namespace {name} cannot be entered: {os.strerror(code)}")


# Down


def _take_down(testbed_id: str, registry: Path) -> None:
    """Idempotent; an interrupt waits until it is done."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        _end_members(testbed_id)
        for name in _namespaces(testbed_id):
            _delete(name)
        _remove_groups(testbed_id)
        _state_file(testbed_id, registry).unlink(missing_ok=True)
        _held_file(testbed_id, registry).unlink(missing_ok=True)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _delete(namespace: str) -> None:
    """Gone when this returns, also where another process was faster."""
    (command,) = down_commands([namespace])
    try:
        _run(command)
    except TestbedError:
        if (_NAMESPACES / namespace).exists():
            raise


def _remove_groups(testbed_id: str) -> None:
    try:
        hierarchy = quota.find_hierarchy()
    except quota.QuotaError:  # without a hierarchy there are no groups
        return
    try:
        quota.remove(hierarchy, prefix_of(testbed_id))
    except quota.QuotaError as error:
        raise TestbedError(str(error)) from None


def _namespaces(testbed_id: str) -> tuple[str, ...]:
    return tuple(sorted(path.name for path in _NAMESPACES.glob(f"{prefix_of(testbed_id)}-*")))


def _members(testbed_id: str) -> set[int]:
    """Processes that hold the testbed: in its namespaces, or its groups; never this one."""
    inside = set(_inodes(_namespaces(testbed_id)))
    found = set(_pids_in(inside)) if inside else set()
    with contextlib.suppress(quota.QuotaError):
        found |= set(quota.members(quota.find_hierarchy(), prefix_of(testbed_id)))
    return found - {os.getpid()}


def _inodes(namespaces: Sequence[str]) -> Iterator[int]:
    for name in namespaces:
        with contextlib.suppress(FileNotFoundError):
            yield (_NAMESPACES / name).stat().st_ino


def _pids_in(namespaces: set[int]) -> Iterator[int]:
    for path in _PROC.glob("[0-9]*/ns/net"):
        with contextlib.suppress(OSError):
            if path.stat().st_ino in namespaces:
                yield int(path.parts[2])


def _end_members(testbed_id: str) -> None:
    """Kill what would keep namespaces and groups alive: ranks of a dead owner, children that ranks left."""
    end = time.monotonic() + _GONE_WITHIN_S
    while members := _members(testbed_id):
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > end:
            raise TestbedError(f"testbed {testbed_id} is held by processes that do not end: {_listed(members)}")
        time.sleep(_POLL_S)


def _listed(pids: set[int]) -> str:
    return ", ".join(map(str, sorted(pids)))
