"""Served in parts equals served whole, and a layout that serves something else is told from one that does not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hybridpar import parity_generation
from hybridpar.parallel import generation
from hybridpar.parity_generation import Generated, compare_generation
from hybridpar.parity_layouts import generation_layouts, parity_run, runs_to_compare
from hybridpar.specs import RunSpec

CORE = {
    "transformer": [{"tp": 2}, {"pp": 2}, {"dp": 2}, {"cp": 2}, {"tp": 2, "cp": 2}, {"cp": 2, "cp_kind": "ulysses"}],
    "mamba2": [{"tp": 2}, {"cp": 2}, {"tp": 2, "pp": 2}],
    "hybrid": [{"pp": 2, "cp": 2}, {"cp": 4, "cp_kind": "ulysses"}],
    "moe": [{"dp": 2, "ep": 2}, {"dp": 2, "ep": 2, "tp": 2}, {"dp": 2, "ep": 2, "cp": 2}],
}


def _run(family: str, layout: dict[str, Any], **workload: Any) -> RunSpec:
    usual = {"phase": "decode", "steps": 4, "micro_batch": 2, "global_batch": 4, "seq_len": 16}
    return parity_run(family, layout, model={"layers": 3}, workload={**usual, **workload})


@pytest.mark.parametrize("family", CORE)
def test_logits_and_tokens_equal_one_device(family: str) -> None:
    reports = list(compare_generation([_run(family, layout) for layout in CORE[family]]))
    assert not [report.row() for report in reports if report.verdict != "equal"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_way_to_serve_equals_one_device() -> None:
    runs = runs_to_compare(["transformer", "mamba2", "hybrid", "moe"], "torch", "decode")
    reports = list(compare_generation(runs))
    assert not [report.row() for report in reports if report.verdict not in ("equal", "refused")]
    assert len(reports) == sum(len(generation_layouts(family)) for family in ("transformer", "mamba2", "hybrid", "moe"))


@pytest.mark.parametrize("workload", [{"global_batch": 1, "micro_batch": 1}, {"seq_len": 16, "steps": 20}])
def test_one_sequence_and_more_tokens_than_the_prompt_has(workload: dict[str, Any]) -> None:
    (report,) = compare_generation([_run("hybrid", {"tp": 2, "cp": 2}, **workload)])
    assert report.verdict == "equal", report.row()


def test_an_illegal_layout_is_refused_with_its_reason_and_not_run() -> None:
    (report,) = compare_generation([_run("transformer", {"tp": 3})])
    assert report.verdict == "refused"
    assert "model.heads=8" in report.row()["reason"]


def test_a_rank_that_chooses_among_its_own_part_of_the_vocabulary_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def own(self: Any, logits: Any) -> Any:
        self._logits.append(self._whole(logits.squeeze(1)))
        return logits.squeeze(1).argmax(-1, keepdim=True)

    monkeypatch.setattr(generation.Generator, "_choose", own)
    (report,) = compare_generation([_run("transformer", {"tp": 2})])
    assert report.verdict in ("differs", "failed")


def test_one_wrong_logit_or_token_differs() -> None:
    run = _run("transformer", {"tp": 2})
    dense = Generated(np.zeros((2, 1), dtype=np.int64), np.ones((2, 1, 5)))

    def verdict(**change: np.ndarray) -> str:
        return parity_generation._report(run, Generated(**{**vars(dense), **change}), dense).verdict

    assert verdict() == "equal"
    assert verdict(tokens=np.array([[0], [1]])) == "differs"
    assert verdict(logits=np.full((2, 1, 5), 1 + 1e-8)) == "differs"
    assert verdict(logits=np.full((2, 1, 5), np.nan)) == "differs"
    assert verdict(logits=np.ones((1, 1, 5))) == "differs"
