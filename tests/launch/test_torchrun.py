"""The same run started by torchrun: the same losses, and the same ends."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from hybridpar.events import Event, read_all_events
from hybridpar.launch.batch import run_one
from hybridpar.specs import RunSpec
from tests.launch.doubles import toy_run
from tests.launch.processes import lives, wait_for

pytestmark = pytest.mark.usefixtures("fixed_ceiling")
ENDLESS = 1_000_000


def _under_torchrun(run: RunSpec, **cluster: object) -> RunSpec:
    return run.model_copy(update={"cluster": run.cluster.model_copy(update={"launcher": "torchrun", **cluster})})


def _starts(folder: Path) -> list[Event]:
    return [event for events in read_all_events(folder, 2) for event in events if event["kind"] == "start"]


def test_torchrun_gives_the_losses_of_forked_ranks(tmp_path: Path, text: Path) -> None:
    run = toy_run(text, dp=2)
    forked, torchrun = run_one(run, tmp_path / "forked"), run_one(_under_torchrun(run), tmp_path / "torchrun")
    assert torchrun["outcome"] == forked["outcome"] == "ok", torchrun
    assert torchrun["loss"] == forked["loss"]
    assert torchrun["grad_norm"] == forked["grad_norm"]
    assert torchrun["run_id"] != forked["run_id"], "the launcher is part of the spec"


def test_a_worker_killed_by_force_is_a_crash_that_names_it(tmp_path: Path, text: Path) -> None:
    def kill_rank_1_when_it_trains() -> None:
        wait_for(lambda: any(event["kind"] == "step" for event in read_all_events(tmp_path, 2)[1]), 60)
        os.kill(read_all_events(tmp_path, 2)[1][0]["pid"], signal.SIGKILL)

    killer = threading.Thread(target=kill_rank_1_when_it_trains)
    killer.start()
    result = run_one(_under_torchrun(toy_run(text, dp=2, steps=ENDLESS)), tmp_path)
    killer.join()
    assert (result["outcome"], result["reason"]) == ("crash", "rank 1 was ended by signal 9 (SIGKILL)")
    assert not any(lives(start["pid"]) for start in _starts(tmp_path))


@pytest.mark.slow  # the deadline must leave two fresh interpreters the time to import torch
def test_the_deadline_ends_torchrun_and_its_workers(tmp_path: Path, text: Path) -> None:
    result = run_one(_under_torchrun(toy_run(text, dp=2, steps=ENDLESS), deadline_s=30.0), tmp_path)
    assert result["outcome"] == "timeout", result
    assert "stacks of rank 0" in "\n".join(result["evidence"])
    assert len(_starts(tmp_path)) == 2
    assert not any(lives(start["pid"]) for start in _starts(tmp_path))
