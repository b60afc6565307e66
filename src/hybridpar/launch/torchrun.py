"""The same ranks started by torchrun, as on a cluster: slower to start, the same files. No torch here."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from hybridpar.events import read_events
from hybridpar.launch.folder import RunFolder
from hybridpar.launch.forked import STACKS_GRACE_S, RankExit, die_with, innermost_frames, tail, terminate_as_interrupt
from hybridpar.specs import RunSpec

_POLL_S = 0.05
_FAILURE = re.compile(r"^\s+rank\s*: (\d+) .*\n\s+exitcode\s*: (-?\d+)", re.MULTILINE)


def torchrun_ranks(run: RunSpec, folder: RunFolder, device: str, data: Path) -> tuple[RankExit, ...]:
    """Run the ranks of `run` under torchrun, whose own restarts are off, and wait for all of them.

    At the deadline, or on an interrupt, all are killed: workers die with their agent, the agent with this process.
    """
    parent, end = os.getpid(), time.monotonic() + run.cluster.deadline_s
    timed_out = False
    with terminate_as_interrupt(), (folder.logs / "torchrun.log").open("wb") as log:
        agent = subprocess.Popen(
            _command(run, folder, device, data),
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": str(run.cluster.threads_per_rank)},
            start_new_session=True,
            preexec_fn=lambda: die_with(parent),
        )
        try:
            while agent.poll() is None and not timed_out:
                time.sleep(_POLL_S)
                timed_out = time.monotonic() > end
            if timed_out:
                _ask_for_stacks(run, folder)
        finally:
            _end(agent, run, folder)
    failures = _failures(tail(folder.logs / "torchrun.log"))
    # a rank that torchrun's table does not name: done, or a victim, or (no table at all) lost with the agent
    unnamed = None if timed_out or failures else agent.returncode
    return tuple(_exit_of(rank, folder, failures.get(rank, unnamed)) for rank in range(run.strategy.devices))


def _command(run: RunSpec, folder: RunFolder, device: str, data: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "0"),
        *("--nproc-per-node", str(run.strategy.devices), "--log-dir", str(folder.logs / "torchrun")),
        *("-m", "hybridpar.launch.rank"),
        *(str(folder.spec.resolve()), str(folder.path.resolve()), device, str(data.resolve())),
    ]


def _worker_pids(run: RunSpec, folder: RunFolder) -> list[int]:
    starts = (read_events(folder.events(rank)) for rank in range(run.strategy.devices))
    return [events[0]["pid"] for events in starts if events]


def _ask_for_stacks(run: RunSpec, folder: RunFolder) -> None:
    for pid in _worker_pids(run, folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    time.sleep(STACKS_GRACE_S)


def _end(agent: subprocess.Popen[bytes], run: RunSpec, folder: RunFolder) -> None:
    """Kill what is left, and return when it is gone."""
    if agent.poll() is not None:
        return
    os.killpg(agent.pid, signal.SIGKILL)
    agent.wait()
    for pid in _worker_pids(run, folder):
        while _lives(pid):
            time.sleep(_POLL_S)


def _lives(pid: int) -> bool:
    """Whether the process runs: a zombie nobody has waited for is dead."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _failures(log: str) -> dict[int, int]:
    """Exit codes of the ranks in the table that torchrun prints at its end; negative ones are signals."""
    return {int(rank): int(code) for rank, code in _FAILURE.findall(log)}


def _exit_of(rank: int, folder: RunFolder, code: int | None) -> RankExit:
    """A rank as the forked launcher would tell of it. Without a code, or with torchrun's SIGTERM, it is a victim."""
    events = read_events(folder.events(rank))
    if any(event["kind"] == "end" for event in events):
        code = 0
    by_signal = -code if code is not None and code < 0 else None
    return RankExit(
        rank=rank,
        exit_code=code if by_signal is None else None,
        signal=by_signal,
        killed_by_launcher=code is None or by_signal == signal.SIGTERM,
        log_tail=tail(folder.logs / f"rank-{rank}.log") or tail(folder.logs / "torchrun.log"),
        stacks=innermost_frames(folder.logs / f"rank-{rank}.stacks"),
        ended_at=events[-1]["t"] if events else 0.0,
    )
