"""Coefficients with what is known of their errors, as a file. No torch here."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hybridpar.cost.coefficients import FITTED, Coefficients
from hybridpar.cost.hardware import HardwareError


@dataclass(frozen=True)
class Doubt:
    """How far predictions may be off, as found on the sources that the coefficients were fitted on.

    Attributes:
        low, high: measured over predicted time at the 10th and the 90th percentile.
        spread: standard deviation of the logarithm of measured over predicted memory.
        reserve: bytes that a device has beside what is predicted: CUDA's context, buffers of NCCL and cuBLAS.
    """

    low: float = 0.75
    high: float = 1.35
    spread: float = 0.1
    reserve: float = 1.5e9


@dataclass(frozen=True)
class Calibration:
    """Coefficients, the sources and the number of rows that they were fitted on, and their doubt."""

    coefficients: Coefficients
    doubt: Doubt
    sources: tuple[str, ...] = ()
    rows: int = 0


def write_calibration(found: Calibration, path: Path = FITTED) -> None:
    """As JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(found), indent=2) + "\n", encoding="utf-8")


def read_calibration(path: Path = FITTED) -> Calibration:
    """What `write_calibration` wrote.

    Raises:
        HardwareError: the file cannot be read, or is not one of these.
    """
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return Calibration(
            Coefficients(**content["coefficients"]),
            Doubt(**content["doubt"]),
            tuple(content["sources"]),
            int(content["rows"]),
        )
    except OSError as error:
        raise HardwareError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise HardwareError(f"{path} is no calibration: {error}") from None
