"""Ranks forked from a warm parent: what comes back, and that nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybridpar.launch.forked import RankExit, fork_ranks, values
from tests.launch.processes import lives, wait_for


def test_each_rank_runs_its_body_and_gives_its_value_back(tmp_path: Path) -> None:
    exits = fork_ranks(3, lambda rank: {"square": rank**2}, deadline_s=10, log_dir=tmp_path)
    assert values(exits) == [{"square": 0}, {"square": 1}, {"square": 4}]
    assert all(end.ok and end.exit_code == 0 and end.signal is None for end in exits)
    assert not list(tmp_path.glob("*.value")), "values are handed over, not left lying"


def test_output_of_a_rank_is_in_its_log(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        print(f"printed by {rank}")
        os.system(f"echo from a child of {rank}")

    exits = fork_ranks(2, body, deadline_s=10, log_dir=tmp_path)
    assert "printed by 1" in exits[1].log_tail
    assert "from a child of 1" in exits[1].log_tail
    assert "of 1" not in exits[0].log_tail


def _one_fails(rank: int) -> None:
    if rank == 1:
        raise ValueError("rank one gives up")
    time.sleep(60)


def test_a_rank_that_raises_takes_the_others_down_at_once(tmp_path: Path) -> None:
    start = time.monotonic()
    exits = fork_ranks(3, _one_fails, deadline_s=30, log_dir=tmp_path)
    assert time.monotonic() - start < 10
    assert (exits[1].exit_code, exits[1].killed_by_launcher) == (1, False)
    assert "ValueError: rank one gives up" in exits[1].log_tail
    assert [end.killed_by_launcher for end in exits] == [True, False, True]
    assert "time.sleep" not in exits[1].stacks
    assert "_one_fails" in exits[0].stacks, "victims tell where they were"
    with pytest.raises(RuntimeError, match="rank 1 failed"):
        values(exits)


def test_a_rank_that_is_killed_is_told_from_those_the_launcher_killed(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    first, second = fork_ranks(2, body, deadline_s=30, log_dir=tmp_path)
    assert (first.signal, first.killed_by_launcher) == (signal.SIGKILL, False)
    assert second.killed_by_launcher
    assert first.ended_at <= second.ended_at


def test_the_deadline_ends_all_and_keeps_their_stacks(tmp_path: Path) -> None:
    start = time.monotonic()
    exits = fork_ranks(2, lambda rank: time.sleep(60), deadline_s=2.0, log_dir=tmp_path)
    assert 2.0 <= time.monotonic() - start < 10
    assert all(end.killed_by_launcher for end in exits)
    assert all("most recent call first" in end.stacks for end in exits)


def test_a_rank_that_ignores_terminate_is_killed_with_its_children(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen(["sleep", "60"])
        (tmp_path / "child").write_text(str(child.pid))
        child.wait()

    fork_ranks(1, body, deadline_s=0.7, log_dir=tmp_path / "logs")
    assert wait_for(lambda: not lives(int((tmp_path / "child").read_text())), 2)


_LAUNCHER = """
import os, sys, time
from pathlib import Path
from hybridpar.launch.forked import fork_ranks
folder = Path(sys.argv[1])
def body(rank):
    (folder / f"pid-{rank}.tmp").write_text(str(os.getpid()))
    (folder / f"pid-{rank}.tmp").rename(folder / f"pid-{rank}")
    time.sleep(60)
fork_ranks(2, body, deadline_s=60, log_dir=folder / "logs")
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_rank_outlives_its_launcher(tmp_path: Path, number: signal.Signals) -> None:
    launcher = subprocess.Popen([sys.executable, "-c", _LAUNCHER, str(tmp_path)], stderr=subprocess.DEVNULL)
    files = [tmp_path / "pid-0", tmp_path / "pid-1"]
    assert wait_for(lambda: all(file.exists() for file in files), 20)
    ranks = [int(file.read_text()) for file in files]
    assert all(lives(rank) for rank in ranks)
    launcher.send_signal(number)
    launcher.wait(10)
    assert wait_for(lambda: not any(lives(rank) for rank in ranks), 3)


def test_a_rank_that_ends_itself_gives_no_value(tmp_path: Path) -> None:
    (end,) = fork_ranks(1, lambda rank: os._exit(0), deadline_s=10, log_dir=tmp_path)
    assert (end.exit_code, end.value) == (0, None)


def test_a_rank_enters_its_place_before_its_body_and_its_parent_stays(tmp_path: Path) -> None:
    places = [tmp_path / f"place-{rank}" for rank in range(2)]
    for place in places:
        place.mkdir()
    here = Path.cwd()
    exits = fork_ranks(
        2,
        lambda rank: Path.cwd(),
        deadline_s=10,
        log_dir=tmp_path / "logs",
        enter=lambda rank: os.chdir(places[rank]),
    )
    assert values(exits) == places
    assert Path.cwd() == here


def test_a_rank_that_cannot_enter_its_place_fails_without_running_its_body(tmp_path: Path) -> None:
    def enter(_rank: int) -> None:
        raise PermissionError("no such place")

    (end,) = fork_ranks(1, lambda rank: print("body"), deadline_s=10, log_dir=tmp_path, enter=enter)
    assert end.exit_code == 1
    assert "PermissionError: no such place" in end.log_tail
    assert "body\n" not in end.log_tail


def test_logs_of_an_earlier_try_are_not_mixed_in(tmp_path: Path) -> None:
    fork_ranks(2, lambda rank: print("first try"), deadline_s=10, log_dir=tmp_path)
    (end,) = fork_ranks(1, lambda rank: print("second try"), deadline_s=10, log_dir=tmp_path)
    assert end.log_tail == "second try\n"
    assert not (tmp_path / "rank-1.log").exists()


def test_an_exit_is_ok_only_when_the_rank_left_by_itself_with_zero() -> None:
    def end(code: int | None, number: int | None, killed: bool) -> RankExit:
        return RankExit(0, code, number, killed, "", "")

    assert end(0, None, False).ok
    assert not end(1, None, False).ok
    assert not end(None, signal.SIGKILL, True).ok
