"""What `hybridpar testbed` does, as functions that take text and numbers and give data. No torch at import.

Faults that a user can cause are TestbedError, PlanError or SimilarityError: one sentence each.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from hybridpar.specs import RunSpec
from hybridpar.testbed import network
from hybridpar.testbed.clusters import REAL_CLUSTERS
from hybridpar.testbed.network import REGISTRY, Entry, TestbedError
from hybridpar.testbed.plan import Plan, PlanError
from hybridpar.testbed.plan import caution as plan_caution
from hybridpar.testbed.similarity import Group, ScaleModel, SimilarityError, groups, rates_of, scale

if TYPE_CHECKING:
    from hybridpar.testbed.check import Check

_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kMG]?)(?:bit(?:/s)?)?")
_UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9}


def bit_s(field: str, text: str) -> int:
    """A rate as written: 800M, 1.5Gbit/s, 250000000.

    Raises:
        PlanError: it is none.
    """
    found = _RATE.fullmatch(text.strip())
    if found is None:
        raise PlanError(f"{field}={text!r} is no rate; legal: bits a second, such as 800M or 1.5Gbit/s")
    return round(float(found.group(1)) * _UNITS[found.group(2)])


def up(plan: Plan, registry: Path = REGISTRY) -> Entry:
    """Bring a scale model up that stands until `down`.

    Raises:
        TestbedError: it cannot be had.
    """
    network.keep(plan, registry)
    return next(entry for entry in network.entries(registry) if entry.testbed_id == plan.testbed_id)


def caution(plan: Plan) -> str | None:
    """What to tell before `up`: that this machine is too small, in one sentence; None where it is not."""
    return plan_caution(plan, len(os.sched_getaffinity(0)))


def down(testbed_id: str | None = None, registry: Path = REGISTRY) -> tuple[str, ...]:
    """Take one testbed down, or all that are kept or left behind; those of living owners only by name.

    Returns:
        Their names.

    Raises:
        TestbedError: there is none of that name, or it does not go.
    """
    chosen = [testbed_id] if testbed_id else [e.testbed_id for e in network.entries(registry) if e.standing != "owned"]
    for one in chosen:
        network.down(one, registry)
    return tuple(chosen)


def status(registry: Path = REGISTRY) -> tuple[Entry, ...]:
    """All testbeds that are up, or left behind."""
    return network.entries(registry)


def check(testbed_id: str, registry: Path = REGISTRY) -> Check:
    """Measure a testbed that is up; some ten seconds.

    Raises:
        TestbedError: it is not up, or one of its ranks failed.
    """
    from hybridpar.testbed.check import check_scaled

    testbed = network.standing(testbed_id, registry)
    try:
        return check_scaled(testbed)
    except RuntimeError as error:
        raise TestbedError(f"testbed {testbed_id} cannot be measured: {_last_line(error)}") from error


def check_plain(world: int) -> Check:
    """The same of `world` ranks on unshaped loopback.

    Raises:
        TestbedError: fewer than two ranks, or one of them failed.
    """
    from hybridpar.testbed.check import check_plain

    try:
        return check_plain(world)
    except ValueError as error:
        raise TestbedError(str(error)) from None
    except RuntimeError as error:
        raise TestbedError(f"plain loopback cannot be measured: {_last_line(error)}") from error


def scale_model(run: RunSpec, cluster: str, factor: float, device_flops_per_s: float) -> ScaleModel:
    """The scale model of a run on a real cluster, by name.

    Raises:
        SimilarityError: no such cluster, or no such model.
    """
    if cluster not in REAL_CLUSTERS:
        raise SimilarityError(f"cluster={cluster!r} is unknown; legal: {', '.join(REAL_CLUSTERS)}")
    return scale(run, REAL_CLUSTERS[cluster], factor, device_flops_per_s)


def _last_line(error: Exception) -> str:
    return next((line for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)


# As text


def status_lines(entries: tuple[Entry, ...]) -> Iterator[str]:
    """One line a testbed."""
    if not entries:
        yield "no testbed is up"
    for entry in entries:
        owner = {"kept": "kept", "owned": f"owned by process {entry.owner_pid}"}.get(entry.standing, "its owner died")
        label = entry.plan.label if entry.plan else "its file is torn"
        held = f"{len(entry.namespaces)} namespaces, {len(entry.members)} processes"
        yield f"{entry.testbed_id}: {label}; {owner}; {held}"


def check_lines(found: Check) -> Iterator[str]:
    """A head line, then one line a reading."""
    yield f"{found.testbed}, {found.cores} cores, load average before the check {found.load:.1f}"
    for reading in found.readings:
        asked = "" if reading.asked is None else f", asked {reading.asked:.4g} ({reading.ratio:.2f} of it)"
        spread = f" ({reading.least:.4g} to {reading.largest:.4g}, n={reading.samples})"
        yield f"{reading.name}: {reading.measured:.4g} {reading.unit}".rstrip() + spread + asked


def scale_lines(scaled: ScaleModel, found: Check | None = None) -> Iterator[str]:
    """The model, what its testbed should do, then one line a group; with a check, what the testbed does."""
    asked, model = scaled.asked, scaled.model.model
    uplink = 8 * asked.inter_bytes_s * scaled.devices_per_node
    yield (
        f"{model.name}: hidden {model.hidden}, seq_len {scaled.model.workload.seq_len}, vocab {model.vocab}; "
        f"{scaled.nodes} nodes of {scaled.devices_per_node} devices of {asked.flops_per_s:.4g} FLOP/s and "
        f"{asked.memory_bytes:.4g} B, links of {8 * asked.intra_bytes_s:.4g} bit/s, uplinks of {uplink:.4g} bit/s"
    )
    for group in groups(scaled, rates_of(found, scaled.asked) if found else None):
        yield _group_line(group)


def _group_line(group: Group) -> str:
    real, model = ("unknown" if value is None else f"{value:.4g}" for value in (group.real, group.model))
    departure = "" if group.departure is None else f" ({group.departure:+.1%})"
    note = f"; {group.note}" if group.note else ""
    return f"{group.name}: real {real}, model {model}{departure}{note}"
