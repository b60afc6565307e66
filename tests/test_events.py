"""Events survive the death of their writer."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybridpar.events import EventWriter, events_path, read_all_events, read_events


def test_what_is_written_is_read_in_order(tmp_path: Path) -> None:
    before = time.time()
    with EventWriter(tmp_path, 3) as events:
        events.emit("start", pid=7, host="here", device="cpu")
        events.emit("step", step=0, loss=5.5, grad_norm=1.0, seconds=0.1, warmup=True)
    first, second = read_events(events_path(tmp_path, 3))
    assert (first["kind"], first["rank"], first["pid"]) == ("start", 3, 7)
    assert (second["kind"], second["loss"], second["warmup"]) == ("step", 5.5, True)
    assert before <= first["t"] <= second["t"] <= time.time()


def test_each_event_is_in_the_file_at_once(tmp_path: Path) -> None:
    with EventWriter(tmp_path, 0) as events:
        events.emit("phase", name="build")
        assert [event["name"] for event in read_events(events_path(tmp_path, 0))] == ["build"]


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    with EventWriter(tmp_path, 0) as events:
        events.emit("phase", name="build")
        events.emit("phase", name="train")
    path = events_path(tmp_path, 0)
    path.write_bytes(path.read_bytes()[:-9])
    assert [event["name"] for event in read_events(path)] == ["build"]


@pytest.mark.parametrize("junk", [b"\x00\xff\x00\n", b"[1, 2]\n", b"{}\n", b"\n", b'{"t": 1, "rank": 0}\n'])
def test_what_is_no_event_is_left_out(tmp_path: Path, junk: bytes) -> None:
    with EventWriter(tmp_path, 0) as events:
        events.emit("end")
    path = events_path(tmp_path, 0)
    path.write_bytes(junk + path.read_bytes())
    assert [event["kind"] for event in read_events(path)] == ["end"]


def test_a_rank_that_never_wrote_has_no_events(tmp_path: Path) -> None:
    with EventWriter(tmp_path, 1) as events:
        events.emit("end")
    assert [len(events) for events in read_all_events(tmp_path, 3)] == [0, 1, 0]


def test_numbers_that_json_cannot_hold_are_refused(tmp_path: Path) -> None:
    with EventWriter(tmp_path, 0) as events, pytest.raises(ValueError, match="JSON"):
        events.emit("step", loss=float("nan"))


def test_importing_events_and_launch_does_not_import_torch() -> None:
    program = (
        "import sys, hybridpar.events, hybridpar.launch, hybridpar.launch.forked; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env=os.environ)
