"""Accelerators: peaks, memory and links, every number with its source. No torch here.

One file an accelerator in `data/hardware/`, checked when it is read. Units as in data sheets: TFLOP/s of dense matrix
products by number format, GB (10^9 bytes; of memory 2^30, as vendors count it), GB/s in one direction. `best_tflops` is
the fastest product that anybody measured over all shapes; where nobody did, `USUAL_CEILING` of the peak stands in.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

FOLDER = Path(__file__).parents[3] / "data" / "hardware"
FORMATS = ("bf16", "fp8", "fp4", "fp32")
# Median of best_tflops over peak of the accelerators that have both (a test computes it again).
USUAL_CEILING = 0.776
# FLOP/s of bf16 a watt: 312e12 / 400
A100_DENSITY = 0.78e12

Number = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class HardwareError(ValueError):
    """A file or a name that is not what it should be; one sentence."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Sourced(_Frozen):
    """A number and where it was read."""

    value: Number
    source: Annotated[str, Field(min_length=1)]


class Accelerator(_Frozen):
    """One kind of device and the node that it usually sits in."""

    name: Annotated[str, Field(min_length=1)]
    aliases: tuple[str, ...] = ()
    note: str = ""
    peak_tflops: dict[str, Sourced]
    best_tflops: dict[str, Sourced] = {}
    memory_gb: Sourced
    memory_gb_s: Sourced
    link_gb_s: Sourced
    nic_gb_s: Sourced
    devices_per_node: Sourced
    power_w: Sourced | None = None

    def peak(self, number_format: str = "bf16") -> float:
        """FLOP/s of dense matrix products.

        Raises:
            HardwareError: a format that the accelerator has no peak for.
        """
        if number_format not in self.peak_tflops:
            raise HardwareError(
                f"precision={number_format!r} has no peak on {self.name}; legal: {', '.join(self.peak_tflops)}"
            )
        return self.peak_tflops[number_format].value * 1e12

    def ceiling(self, number_format: str = "bf16") -> float:
        """The best measured product over the peak; that of the nearest format where this one was not measured."""
        for name in (number_format, "bf16"):
            if name in self.best_tflops:
                return self.best_tflops[name].value * 1e12 / self.peak(name)
        return USUAL_CEILING

    @property
    def density(self) -> float:
        """FLOP/s of bf16 products for each watt that the board may draw, over those of an A100; 1 where power is not
        known."""
        return 1.0 if self.power_w is None else self.peak("bf16") / self.power_w.value / A100_DENSITY

    @property
    def memory_bytes(self) -> float:
        """Bytes of device memory."""
        return self.memory_gb.value * 2**30

    @property
    def memory_rate(self) -> float:
        """Bytes a second of device memory."""
        return self.memory_gb_s.value * 1e9

    @property
    def link(self) -> float:
        """Bytes a second from a device to others of its node, one direction."""
        return self.link_gb_s.value * 1e9

    @property
    def nic(self) -> float:
        """Bytes a second from a device to other nodes, one direction."""
        return self.nic_gb_s.value * 1e9

    @property
    def node(self) -> int:
        """Devices that share the fast links."""
        return int(self.devices_per_node.value)


def read_accelerator(path: Path) -> Accelerator:
    """One file, checked.

    Raises:
        HardwareError: it cannot be read, or a field is missing, unknown or out of range.
    """
    try:
        content: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise HardwareError(f"{path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise HardwareError(f"{path} is not valid YAML: {error}") from None
    try:
        found = Accelerator.model_validate(content)
    except ValidationError as error:
        raise HardwareError("; ".join(_sentence(path, fault) for fault in error.errors())) from None
    unknown = [name for name in (*found.peak_tflops, *found.best_tflops) if name not in FORMATS]
    if unknown or "bf16" not in found.peak_tflops:
        raise HardwareError(f"{path}: peak_tflops needs bf16, and formats are {', '.join(FORMATS)}, not {unknown}")
    return found


def _sentence(path: Path, fault: Any) -> str:
    field = ".".join(str(part) for part in fault["loc"]) or "the file"
    return f"{path}: {field}={fault['input']!r} is not legal: {fault['msg'].lower()}"


@lru_cache(maxsize=8)
def accelerators(folder: Path = FOLDER) -> Mapping[str, Accelerator]:
    """All of a folder by name and alias.

    Raises:
        HardwareError: see `read_accelerator`; no files; two of the same name.
    """
    found: dict[str, Accelerator] = {}
    for path in sorted(folder.glob("*.yaml")):
        one = read_accelerator(path)
        for name in (one.name, *one.aliases):
            if name in found:
                raise HardwareError(f"{path}: {name!r} is already the name of {found[name].name}")
            found[name] = one
    if not found:
        raise HardwareError(f"{folder} holds no accelerator (*.yaml)")
    return found


def accelerator(name: str, folder: Path = FOLDER) -> Accelerator:
    """The accelerator of a name or alias.

    Raises:
        HardwareError: there is none of that name.
    """
    known = accelerators(folder)
    if name not in known:
        names = sorted({one.name for one in known.values()})
        raise HardwareError(f"accelerator={name!r} is unknown; legal: {', '.join(names)}")
    return known[name]
