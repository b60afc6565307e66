"""What lies in a folder of checkpoints, and whether a run may start from one. No torch here.

`step-<N>/checkpoint.json` tells what was trained, how far, and the losses on the way; the tensors beside it are written
and read by `hybridpar.parallel.checkpoint`. A folder with another name is not whole.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hybridpar.specs import RunSpec

PREFIX = "step-"
UNFINISHED = ".part"
_ABOUT = "checkpoint.json"
_FORMAT = 1


class CheckpointError(ValueError):
    """A checkpoint cannot be used; one sentence."""


@dataclass(frozen=True)
class PastStep:
    """One optimizer step of the run that wrote a checkpoint; seconds of the rank that wrote this down."""

    step: int
    loss: float
    grad_norm: float
    seconds: float


def latest(folder: Path) -> Path | None:
    """The last whole checkpoint of a folder; None if there is none."""
    whole = [path for path in folder.glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdigit()]
    return max(whole, key=lambda path: int(path.name.removeprefix(PREFIX)), default=None)


def steps_done(checkpoint: Path, run: RunSpec) -> int:
    """Number of optimizer steps behind a checkpoint, if `run` may start from it.

    Raises:
        CheckpointError: it is not a whole checkpoint, or one of another model, precision or optimizer.
    """
    about = _read(checkpoint)
    then, now = about["run"], run.model_dump(mode="json")
    kept = {"model": sorted(set(now["model"]) - {"name"}), "workload": ["optimizer", "precision"]}
    for section, names in kept.items():
        for name in names:
            was, wanted = then.get(section, {}).get(name), now[section][name]
            if was != wanted:
                raise CheckpointError(
                    f"{section}.{name}={wanted!r} does not fit checkpoint {checkpoint}; legal: {was!r}, as its run had"
                )
    return int(about["step"])


def past_of(checkpoint: Path) -> list[PastStep]:
    """The steps that the run which wrote a checkpoint had taken by then.

    Raises:
        CheckpointError: it is not a whole checkpoint.
    """
    return [PastStep(**step) for step in _read(checkpoint)["past"]]


def write_about(checkpoint: Path, run: RunSpec, step: int, past: Sequence[PastStep]) -> None:
    """Write `checkpoint.json`, and have it on disk."""
    content = {"format": _FORMAT, "step": step, "run": run.model_dump(mode="json"), "past": [asdict(p) for p in past]}
    with (checkpoint / _ABOUT).open("w") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    sync(checkpoint)


def sync(folder: Path) -> None:
    """Have the names in a folder on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(checkpoint: Path) -> Mapping[str, Any]:
    try:
        about = json.loads((checkpoint / _ABOUT).read_text())
    except OSError as error:
        raise CheckpointError(f"{checkpoint} is no checkpoint: {_ABOUT} cannot be read: {error.strerror}") from None
    except ValueError:
        raise CheckpointError(f"{checkpoint} is no checkpoint: {_ABOUT} is not JSON") from None
    whole = isinstance(about, dict) and about.get("format") == _FORMAT
    if not whole or not {"step", "run", "past"} <= about.keys():
        raise CheckpointError(f"{checkpoint} is no checkpoint of format {_FORMAT}")
    return about
