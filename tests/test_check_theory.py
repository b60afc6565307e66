"""Closed forms equal traces and real ranks, to the byte and the FLOP, over layouts of every family."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from hybridpar.check_theory import (
    Comparison,
    compare_measured,
    compare_traced,
    evenly,
    full_size_runs,
    small_runs,
)
from hybridpar.legality import infeasible_reason
from hybridpar.parity_layouts import MODELS, parity_run

FAMILIES = list(MODELS)


def _deviating(rows: list[Comparison]) -> list[dict[str, object]]:
    return [row.row() for row in rows if row.verdict == "deviates"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_forms_equal_traces(family: str, precision: str) -> None:
    runs = evenly(small_runs([family], 8, precision), 2)
    rows = [row for run in runs for row in compare_traced(run)]
    assert not _deviating(rows)
    assert Counter(row.verdict for row in rows)["exact"] > 20


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_forms_equal_traces_of_every_layout(family: str) -> None:
    assert not _deviating([row for run in small_runs([family], 8, "fp32") for row in compare_traced(run)])


@pytest.mark.parametrize("family", FAMILIES)
def test_forms_equal_real_ranks(family: str) -> None:
    runs = evenly(small_runs([family], 4, "fp32"), 2)
    assert not _deviating([row for run in runs for row in compare_measured(run)])


@pytest.mark.parametrize("place", range(5))
def test_forms_equal_traces_at_public_size(place: int) -> None:
    run = full_size_runs()[place]
    assert infeasible_reason(run, on_text=False) is None
    rows = compare_traced(run, [run.strategy.devices - 1])
    assert not _deviating(rows)
    assert {row.quantity for row in rows} == {"flops", "calls", "bytes", "state", "activations"}


def test_a_number_that_is_off_by_one_deviates() -> None:
    row = compare_traced(parity_run("transformer", {}, precision="fp32"))[0]
    assert row.verdict == "exact"
    assert row.predicted is not None
    wrong = replace(row, predicted=row.predicted + 1)
    assert (wrong.verdict, replace(wrong, note="why").verdict) == ("deviates", "explained")
    assert replace(row, predicted=None).verdict == "uncovered"
