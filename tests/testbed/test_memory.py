"""A device's memory as a rule."""

from __future__ import annotations

from hybridpar.specs import parse_run_spec
from hybridpar.testbed.memory import foreseen, over_limit

_HELD = {"parameters": 400, "gradients": 400, "optimizer": 800, "activations": 300, "host": 10_000}


def test_what_fits_is_no_outcome_and_the_host_does_not_count() -> None:
    assert over_limit([_HELD, _HELD], 1900) is None
    assert over_limit([_HELD], 0) is None, "without limit"


def test_the_fullest_rank_and_the_category_that_breaks_the_limit_are_named() -> None:
    fuller = {**_HELD, "activations": 500}
    outcome = over_limit([_HELD, fuller], 1899)
    assert outcome is not None
    assert outcome.kind == "oom"
    assert outcome.reason == (
        "rank 1 holds 2100 B at its peak, 1.11 times the 1899 B of its device; over the limit with optimizer"
    )
    assert outcome.evidence == ("parameters: 400 B", "activations: 500 B", "gradients: 400 B", "optimizer: 800 B")


def test_the_category_follows_the_order_of_a_step() -> None:
    for limit, category in ((399, "parameters"), (500, "activations"), (1000, "gradients"), (1899, "optimizer")):
        outcome = over_limit([_HELD], limit)
        assert outcome is not None
        assert outcome.reason.endswith(f"over the limit with {category}")


def test_a_run_can_be_refused_before_it_runs() -> None:
    run = parse_run_spec({"model": {"preset": "llama-toy"}, "workload": {"seq_len": 64}, "strategy": {"dp": 2}})
    held = [foreseen(run, rank) for rank in range(2)]
    whole = sum(held[0].values())
    assert held[0]["optimizer"] > held[0]["parameters"] > 0
    assert over_limit(held, whole) is None
    assert over_limit(held, whole - 1) is not None
