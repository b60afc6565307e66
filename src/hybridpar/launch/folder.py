"""The folder of one run: its files, who may write them, and that they are whole or not there. No torch here."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridpar.events import events_path
from hybridpar.launch.result import is_result


class LaunchError(Exception):
    """A run cannot be started or its result cannot be kept; one sentence."""


class InUseError(LaunchError):
    """Another launcher works on the folder."""


@dataclass(frozen=True)
class RunFolder:
    """`path` with spec.json, environment.json, result.json, events-<rank>.jsonl and logs/."""

    path: Path

    @property
    def spec(self) -> Path:
        """The resolved RunSpec."""
        return self.path / "spec.json"

    @property
    def logs(self) -> Path:
        """stdout, stderr and stacks of the ranks."""
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        """Checkpoints of the run, which outlast a try that failed."""
        return self.path / "checkpoints"

    def events(self, rank: int) -> Path:
        """What one rank told."""
        return events_path(self.path, rank)

    @property
    def store(self) -> Path:
        """The file in which the ranks find one another."""
        return self.logs / "store"

    def create(self) -> None:
        """Make the folder.

        Raises:
            LaunchError: it cannot be.
        """
        with one_sentence(self.path):
            self.path.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def locked(self, *, wait: bool) -> Iterator[None]:
        """Hold the folder for this launcher alone; the lock goes with the process, however it ends.

        Raises:
            InUseError: another launcher holds it, and `wait` is False.
        """
        with one_sentence(self.path), (self.path / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                raise InUseError(
                    f"{self.path} is in use by another launcher; wait for it or name another folder"
                ) from None
            yield

    def result(self, run_id: str) -> dict[str, Any] | None:
        """The finished result of the run `run_id`; None where there is none, a torn one, or another run's."""
        try:
            content = json.loads((self.path / "result.json").read_bytes())
        except (OSError, ValueError):
            return None
        return content if is_result(content, run_id) else None

    def clear(self) -> None:
        """Remove what an earlier try left; the result first, so that none is ever beside events of another try."""
        (self.path / "result.json").unlink(missing_ok=True)
        for leftover in (*self.path.glob("events-*.jsonl"), *self.path.glob(".*.tmp")):
            leftover.unlink()
        shutil.rmtree(self.logs, ignore_errors=True)
        self.logs.mkdir()

    def write(self, name: str, content: Mapping[str, Any]) -> None:
        """Write one JSON file whole or not at all."""
        written = self.path / f".{name}.tmp"
        with written.open("w", encoding="utf-8") as file:
            json.dump(content, file, indent=1, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        written.replace(self.path / name)


@contextlib.contextmanager
def one_sentence(path: Path) -> Iterator[None]:
    """Turn what the file system refuses into a LaunchError that names the file."""
    try:
        yield
    except OSError as error:
        raise LaunchError(f"{error.filename or path} cannot be used: {error.strerror or error}") from error
