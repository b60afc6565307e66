"""Ranks forked from this warm process: start-up in milliseconds, and no rank outlives a failure.

The parent imports what its ranks need once (`preload`), so that a fork starts a rank in a few milliseconds where a
fresh interpreter takes seconds. Rules that keep it safe: the parent starts no threads before it forks (no tensor is
computed in it), every rank is its own process group, dies with its parent (PR_SET_PDEATHSIG) and leaves by
`os._exit` (destructors of torch's reducers can deadlock with gloo's threads).
No torch at import.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from hybridpar.launch.environment import gpu_names

_POLL_S = 0.01
STACKS_GRACE_S = 0.5
_PR_SET_PDEATHSIG = 1
_TAIL_BYTES = 4000
_FRAMES = 16
_PRELOADED = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.pipelining",
    "hybridpar.launch.rank",
)
_PRELOADED_FOR_DEEPSPEED = ("hybridpar.parallel.deepspeed_engine", "hybridpar.parallel.deepspeed_pipeline")


@dataclass(frozen=True)
class RankExit:
    """How one rank ended. `killed_by_launcher` tells the victims of a failure from its cause, `ended_at` (unix s)
    the first failure from those that followed."""

    rank: int
    exit_code: int | None
    signal: int | None
    killed_by_launcher: bool
    log_tail: str
    stacks: str
    ended_at: float = 0.0
    value: Any = None

    @property
    def ok(self) -> bool:
        """Left by itself with exit code 0."""
        return self.exit_code == 0 and not self.killed_by_launcher


@dataclass
class _Rank:
    rank: int
    pid: int
    status: int | None = None
    killed: bool = False
    ended_at: float = 0.0

    def ended(self, status: int) -> None:
        self.status = status
        self.ended_at = time.time()


@dataclass
class _Ranks:
    members: list[_Rank] = field(default_factory=list)

    def poll(self) -> None:
        for member in self.running():
            pid, status = os.waitpid(member.pid, os.WNOHANG)
            if pid:
                member.ended(status)

    def running(self) -> list[_Rank]:
        return [member for member in self.members if member.status is None]

    def failed(self) -> bool:
        return any(member.status not in (None, 0) for member in self.members)

    def signal(self, number: int) -> None:
        for member in self.running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.pid, number)

    def kill(self, *, stacks: bool) -> None:
        """End all that run; first ask for their stacks where the ranks themselves did not fail."""
        for member in self.running():
            member.killed = True  # from now on, however it ends: peers that we take away make others fail
        if stacks and self.running():
            self.signal(signal.SIGUSR1)
            time.sleep(STACKS_GRACE_S)
            self.poll()
        for member in self.running():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(member.pid, signal.SIGKILL)
        for member in self.running():
            member.ended(os.waitpid(member.pid, 0)[1])


def fork_ranks(
    world: int,
    body: Callable[[int], Any],
    *,
    deadline_s: float,
    log_dir: Path,
    enter: Callable[[int], None] | None = None,
) -> tuple[RankExit, ...]:
    """Run `body(rank)` in `world` forked processes and wait for all of them.

    The first rank that fails takes the others down at once; so does the deadline, and an interrupt of this process.

    Args:
        world: number of ranks.
        body: what a rank does; what it returns (picklable) comes back as `RankExit.value`.
        deadline_s: wall time in seconds after which all are killed, their stacks kept.
        log_dir: folder for rank-<r>.log (stdout and stderr), rank-<r>.stacks and rank-<r>.value.
        enter: called in the rank before its body, while it has one thread: where a rank goes to its place on a
            testbed (network namespace, CPU quota). What it raises fails the rank like its body.

    Returns:
        One RankExit a rank, in order.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    for leftover in log_dir.glob("rank-*.*"):
        leftover.unlink()
    ranks = _Ranks()
    end = time.monotonic() + deadline_s
    with terminate_as_interrupt():
        try:
            for rank in range(world):
                ranks.members.append(_Rank(rank, _fork(rank, body, log_dir, enter)))
            _wait(ranks, end)
        finally:
            ranks.kill(stacks=False)
    return tuple(_exit_of(member, log_dir) for member in ranks.members)


def _wait(ranks: _Ranks, end: float) -> None:
    while ranks.running():
        ranks.poll()
        if ranks.failed() or time.monotonic() > end:
            ranks.kill(stacks=True)
        else:
            time.sleep(_POLL_S)


@contextlib.contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """SIGTERM (a scheduler's wish) unwinds like Ctrl-C, so that the ranks are ended with their launcher."""

    def interrupt(_signal: int, _frame: object) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not the main thread: whoever runs it has its own handling
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _fork(rank: int, body: Callable[[int], Any], log_dir: Path, enter: Callable[[int], None] | None) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        leave_after(lambda: _be_rank(rank, body, log_dir, parent, enter))
    with contextlib.suppress(OSError):  # both sides set it: whichever comes first, a kill reaches the group
        os.setpgid(pid, pid)
    return pid


def leave_after(work: Callable[[], None]) -> NoReturn:
    """Do the work and end this process at once, with code 0, or 1 and a traceback; no destructor runs after it."""
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _be_rank(
    rank: int, body: Callable[[int], Any], log_dir: Path, parent: int, enter: Callable[[int], None] | None
) -> None:
    _become_rank(rank, log_dir, parent)
    if enter is not None:
        enter(rank)
    value = body(rank)
    (log_dir / f"rank-{rank}.value").write_bytes(pickle.dumps(value))


def _become_rank(rank: int, log_dir: Path, parent: int) -> None:
    os.setpgid(0, 0)
    die_with(parent)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher ends its ranks
    write_to_logs(rank, log_dir)


def die_with(parent: int) -> None:
    """Let the kernel kill this process when `parent` dies, however it dies."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked to die with it
        os._exit(1)


def write_to_logs(rank: int, log_dir: Path) -> None:
    """Send stdout and stderr to rank-<r>.log, and the stacks of all threads to rank-<r>.stacks on SIGUSR1."""
    log = os.open(log_dir / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    stacks = (log_dir / f"rank-{rank}.stacks").open("w")
    faulthandler.enable(file=sys.stderr)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)


def _exit_of(member: _Rank, log_dir: Path) -> RankExit:
    status = member.status if member.status is not None else 0
    signalled = os.WIFSIGNALED(status)
    return RankExit(
        rank=member.rank,
        exit_code=None if signalled else os.WEXITSTATUS(status),
        signal=os.WTERMSIG(status) if signalled else None,
        killed_by_launcher=member.killed,
        log_tail=tail(log_dir / f"rank-{member.rank}.log"),
        stacks=innermost_frames(log_dir / f"rank-{member.rank}.stacks"),
        ended_at=member.ended_at,
        value=_take_value(log_dir / f"rank-{member.rank}.value") if status == 0 else None,
    )


def _take_value(path: Path) -> Any:
    """What the rank, our own child, left for us; None when it ended itself before it could."""
    if not path.exists():
        return None
    value = pickle.loads(path.read_bytes())
    path.unlink()
    return value


def tail(path: Path) -> str:
    """The end of a log; empty when there is none."""
    try:
        return path.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")
    except OSError:
        return ""


def innermost_frames(path: Path) -> str:
    """The stacks that faulthandler wrote, of each thread the innermost frames (which come first)."""
    try:
        threads = path.read_text(errors="replace").split("\n\n")
    except OSError:
        return ""
    return "\n".join("\n".join(thread.splitlines()[:_FRAMES]) for thread in threads)


def preload(*, deepspeed: bool = False) -> None:
    """Import all that a rank of a training run needs, so that forks find it; a second or five, once.

    Imports start no threads of torch (its pools come with the first operator, and none runs here); the BLAS of numpy
    ends its own at a fork.
    """
    if deepspeed and not gpu_names():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # an import that asks whether there is CUDA must not start it: a process that has cannot fork ranks that use it
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    for module in (*_PRELOADED, *(_PRELOADED_FOR_DEEPSPEED if deepspeed else ())):
        importlib.import_module(module)


def values(exits: Sequence[RankExit]) -> list[Any]:
    """What each rank returned.

    Raises:
        RuntimeError: naming the first rank that failed, with the end of its log.
    """
    for end in sorted(exits, key=lambda end: end.killed_by_launcher):
        if not end.ok:
            raise RuntimeError(
                f"rank {end.rank} failed (exit {end.exit_code}, signal {end.signal}):\n{end.log_tail}{end.stacks}"
            )
    return [end.value for end in exits]
