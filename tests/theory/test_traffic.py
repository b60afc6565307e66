"""The closed form of what a rank sends against the metered program: the same calls, the same bytes, none left over."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hybridpar.comm.metered import meter
from hybridpar.comm.process_group import ProcessMesh
from hybridpar.launch.forked import preload
from hybridpar.legality import infeasible_reason
from hybridpar.parallel.apply import build_engine
from hybridpar.parity_layouts import parity_run, torch_layouts
from hybridpar.specs import RunSpec
from hybridpar.theory.coverage import NotCoveredError
from hybridpar.theory.traffic import ddp_buckets, traffic_of_step
from tests.parallel.ranks import batch_of, on_ranks

Rows = dict[tuple[str, str, int], tuple[int, int]]
FAMILIES = ("transformer", "mamba2", "hybrid", "moe")


def _metered(run: RunSpec, folder: Path) -> list[Rows]:
    def body(mesh: ProcessMesh) -> Rows:
        engine = build_engine(run, mesh)
        for seed in range(3):  # DDP lays its buckets out anew in the second
            meter().drain()
            engine.step(*batch_of(run, mesh.coordinate.dp, seed))
        return {(row.op, row.group, row.group_size): (row.calls, row.bytes) for row in meter().drain()}

    return on_ranks(run.strategy, folder, body)


def _forms(run: RunSpec) -> list[Rows]:
    ranks = (traffic_of_step(run, rank) for rank in range(run.strategy.devices))
    return [{(row.op, row.group, row.group_size): (row.calls, row.bytes) for row in rows} for rows in ranks]


def _differences(run: RunSpec, folder: Path) -> list[Any]:
    """Rows that differ, by rank; of tokens sent to experts, which the router decides, the sum over ranks."""
    found: list[Any] = []
    sums: Counter[tuple[Any, ...]] = Counter()
    for rank, (ours, theirs) in enumerate(zip(_forms(run), _metered(run, folder), strict=True)):
        for key in ours.keys() | theirs.keys():
            form, seen = ours.get(key, (0, 0)), theirs.get(key, (0, 0))
            if run.strategy.ep > 1 and key[0] == "all_to_all":
                sums[(*key, "calls")] += form[0] - seen[0]
                sums[(*key, "bytes")] += form[1] - seen[1]
            elif form != seen:
                found.append((run.strategy.label, rank, key, form, seen))
    return found + [(run.strategy.label, *key, difference) for key, difference in sums.items() if difference]


def _legal(family: str, largest: int) -> list[RunSpec]:
    runs = [parity_run(family, layout) for layout in torch_layouts(family, largest)]
    return [run for run in runs if infeasible_reason(run, on_text=False) is None]


@pytest.mark.parametrize("family", FAMILIES)
def test_layouts_on_two_devices_send_what_the_form_says(family: str, tmp_path: Path) -> None:
    preload()
    runs = _legal(family, 2)[::3]  # all of them, and those on more devices: the slow one below
    assert len(runs) > 7
    assert not [row for n, run in enumerate(runs) for row in _differences(run, _new(tmp_path, n))]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layout_on_up_to_eight_devices_sends_what_the_form_says(family: str, tmp_path: Path) -> None:
    preload()
    runs = _legal(family, 8)
    assert len(runs) > 70
    assert not [row for n, run in enumerate(runs) for row in _differences(run, _new(tmp_path, n))]


HYBRIDS: dict[str, list[dict[str, Any]]] = {
    "transformer": [{"dp": 4, "zero": 3, "zero_group": 2}, {"tp": 2, "cp": 2, "sp": True, "recompute": "full"}],
    "mamba2": [{"dp": 2, "tp": 2, "zero": 2}, {"tp": 2, "pp": 2, "schedule": "zb-v"}],
    "hybrid": [{"dp": 2, "pp": 2, "zero": 3, "recompute": "full"}, {"tp": 4, "sp": True}],
    "moe": [{"dp": 4, "ep": 2, "zero": 3}, {"dp": 2, "ep": 2, "tp": 2}, {"dp": 2, "ep": 2, "cp": 2}],
}


@pytest.mark.parametrize("family", FAMILIES)
def test_hybrids_send_what_the_form_says(family: str, tmp_path: Path) -> None:
    preload()
    runs = [parity_run(family, layout) for layout in HYBRIDS[family]]
    assert not [row for n, run in enumerate(runs) for row in _differences(run, _new(tmp_path, n))]


def _new(folder: Path, number: int) -> Path:
    place = folder / str(number)
    place.mkdir()
    return place


def test_one_device_sends_nothing() -> None:
    assert traffic_of_step(parity_run("hybrid", {}), 0) == ()


def test_what_has_no_form_says_so() -> None:
    run = parity_run("transformer", {"engine": "deepspeed", "dp": 2}, precision="fp32")
    with pytest.raises(NotCoveredError, match=r"strategy\.engine=deepspeed has no closed form"):
        traffic_of_step(run, 0)


def test_buckets_are_closed_when_they_are_full() -> None:
    assert ddp_buckets([3, 3, 3, 3, 3], first=4, others=6) == [6, 6, 3]
    assert ddp_buckets([]) == []
