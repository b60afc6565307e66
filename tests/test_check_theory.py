"""Closed forms equal traces and real ranks, to the byte and the FLOP, over layouts of every family."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from hybridpar.check_theory import Comparison, compare_measured, compare_traced
from hybridpar.legality import infeasible_reason
from hybridpar.parity_layouts import MODELS, parity_run
from hybridpar.theory_sweep import FULL_SIZE, evenly, full_size_runs, random_runs, small_runs

FAMILIES = list(MODELS)


def _deviating(rows: list[Comparison]) -> list[dict[str, object]]:
    return [row.row() for row in rows if row.verdict == "deviates"]


@pytest.mark.parametrize("family", FAMILIES)
def test_forms_equal_traces(family: str) -> None:
    runs = [run for precision in ("fp32", "bf16") for run in evenly(small_runs(family, "train", 8, precision), 2)]
    rows = [row for run in runs for row in compare_traced(run, [run.strategy.devices - 1])]
    assert not _deviating(rows)
    assert Counter(row.verdict for row in rows)["exact"] > 20


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_forms_of_serving_equal_traces(family: str, phase: str) -> None:
    rows = [row for run in evenly(small_runs(family, phase, 8, "bf16"), 4) for row in compare_traced(run)]
    assert not _deviating(rows)
    assert {row.item for row in rows} >= {"forward", "cache", "parameters"}


@pytest.mark.parametrize("family", FAMILIES)
def test_forms_equal_traces_of_random_runs(family: str) -> None:
    rows = [row for run in random_runs(family, 3, 8, seed=1) for row in compare_traced(run, [0])]
    assert not _deviating(rows)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_forms_equal_traces_of_every_layout(family: str) -> None:
    assert not _deviating([row for run in small_runs(family, "train", 8, "fp32") for row in compare_traced(run)])


@pytest.mark.parametrize("family", FAMILIES)
def test_forms_equal_real_ranks(family: str) -> None:
    trained, served = evenly(small_runs(family, "train", 4, "fp32"), 2), small_runs(family, "decode", 4, "fp32")
    assert not _deviating([row for run in [*trained, served[-1]] for row in compare_measured(run)])


@pytest.mark.parametrize("place", range(len(FULL_SIZE)))
def test_forms_equal_traces_at_public_size(place: int) -> None:
    run = full_size_runs()[place]
    assert infeasible_reason(run, on_text=False) is None
    rows = compare_traced(run, [run.strategy.devices - 1])
    assert not _deviating(rows)
    assert {row.quantity for row in rows} >= {"flops", "calls", "bytes", "state"}


def test_a_number_that_is_off_by_one_deviates() -> None:
    row = compare_traced(parity_run("transformer", {}, precision="fp32"))[0]
    assert row.verdict == "exact"
    assert row.predicted is not None
    wrong = replace(row, predicted=row.predicted + 1)
    assert (wrong.verdict, replace(wrong, note="why").verdict) == ("deviates", "explained")
    assert replace(row, predicted=None).verdict == "uncovered"
