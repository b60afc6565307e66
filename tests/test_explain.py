"""Explanations add up to what the forms say."""

from __future__ import annotations

import pytest

from hybridpar.explain import QUANTITIES, explain, inputs
from hybridpar.parity_layouts import parity_run
from hybridpar.theory.rank_flops import flops_of_step
from hybridpar.theory.serving import served
from hybridpar.theory.traffic import traffic_of_step

RUN = parity_run("hybrid", {"dp": 2, "tp": 2, "zero": 1}, precision="fp32")


def test_terms_are_those_of_the_forms() -> None:
    (flops,), (comm,) = explain(RUN, 3, "flops"), explain(RUN, 3, "comm")
    assert sum(term.value for term in flops.terms) == sum(flops_of_step(RUN, 3).values())
    assert sum(term.value for term in comm.terms) == sum(row.bytes for row in traffic_of_step(RUN, 3))


def test_every_quantity_tells_its_formula() -> None:
    for quantity in QUANTITIES:
        assert all(one.formula and (one.terms or one.missing) for one in explain(RUN, 0, quantity))
    assert inputs(RUN, 3)["rank"] == "3 (pp 0, dp 1, cp 0, tp 1)"


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_serving_is_explained(phase: str) -> None:
    run = parity_run("hybrid", {"tp": 2}, workload={"phase": phase, "steps": 3})
    form = served(run, 1, 2)
    (memory,), (flops,), (comm,) = (explain(run, 1, quantity) for quantity in QUANTITIES)
    assert [term.value for term in memory.terms] == [form.parameters, form.cache]
    assert [term.value for term in flops.terms] == [form.flops["forward"]]
    assert sum(term.value for term in comm.terms) == sum(row.bytes for row in form.traffic)


def test_what_has_no_form_is_said() -> None:
    run = parity_run("transformer", {"engine": "deepspeed", "dp": 2}, precision="fp32")
    assert "has no closed form" in explain(run, 0, "flops")[0].missing
