"""Files of a run folder are whole or not there, and belong to one launcher at a time."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from hybridpar.launch.folder import InUseError, LaunchError, RunFolder, one_sentence


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path)
    folder.write("result.json", {"loss": 1})

    def full(_file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        folder.write("result.json", {"loss": 2})
    assert json.loads((tmp_path / "result.json").read_text()) == {"loss": 1}


def test_numbers_that_json_cannot_hold_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        RunFolder(tmp_path).write("result.json", {"loss": float("nan")})
    assert not (tmp_path / "result.json").exists()


def test_clearing_leaves_only_what_no_run_wrote(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for name in ("result.json", "events-0.jsonl", "events-12.jsonl", ".result.json.tmp", "notes.txt"):
        (tmp_path / name).write_text("")
    folder.logs.mkdir()
    (folder.logs / "rank-0.log").write_text("")
    folder.clear()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logs", "notes.txt"]
    assert not list(folder.logs.iterdir())


def test_a_folder_is_held_by_one_and_free_again_afterwards(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with folder.locked(wait=False), pytest.raises(InUseError, match="is in use by another launcher"):
        folder.locked(wait=False).__enter__()
    with folder.locked(wait=False):
        pass


def test_what_the_file_system_refuses_is_one_sentence(tmp_path: Path) -> None:
    with (
        pytest.raises(LaunchError, match="nowhere/file cannot be used: No such file or directory"),
        one_sentence(tmp_path),
    ):
        (tmp_path / "nowhere/file").write_text("")
