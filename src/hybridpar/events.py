"""The diary of one rank: `events-<rank>.jsonl`, append-only, one JSON object a line. No torch here.

Every line holds `t` (unix seconds), `rank`, `kind` and the fields of its kind:

    start   pid, host, device
    phase   name: join | build | warmup | train | prefill | decode | leave
    model   parameters: their number in the whole model (rank 0 only)
    memory  parameters, gradients, optimizer, activations, buffers, host, cache: peak bytes
    prefill seconds: from the prompts to the first token (phase decode only)
    step    step, loss, grad_norm (null in inference), seconds, warmup
    checkpoint  step, seconds: written after so many steps
    comm    step, op, group, group_size, calls, bytes, wire_bytes, seconds, exposed_seconds (timed steps only)
    error   type, message, traceback
    end     nothing: the rank finished its work

A rank may die at any moment, so each line is one write to the file, and the reader leaves out what is no whole line.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

Event = Mapping[str, Any]


class Emit(Protocol):
    """Writes one event."""

    def __call__(self, kind: str, **fields: Any) -> None: ...


class EventWriter:
    """Appends the events of one rank to its file in `directory`."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._rank = rank
        self._file = os.open(events_path(directory, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def emit(self, kind: str, **fields: Any) -> None:
        """Write one line, at once.

        Raises:
            ValueError: a field is no finite JSON value.
        """
        line = json.dumps({"t": time.time(), "rank": self._rank, "kind": kind, **fields}, allow_nan=False)
        os.write(self._file, line.encode() + b"\n")

    def close(self) -> None:
        """Close the file; no event can follow."""
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()


def events_path(directory: Path, rank: int) -> Path:
    """Where the events of `rank` are."""
    return directory / f"events-{rank}.jsonl"


def read_events(path: Path) -> list[Event]:
    """The events of one file in order; torn lines and a missing file count as nothing written."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    parsed = (_parse(line) for line in lines)
    return [event for event in parsed if event is not None]


def read_all_events(directory: Path, world: int) -> tuple[list[Event], ...]:
    """The events of each of `world` ranks."""
    return tuple(read_events(events_path(directory, rank)) for rank in range(world))


def _parse(line: bytes) -> Event | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and {"t", "rank", "kind"} <= event.keys() else None
