"""Illegal strategies are told apart from malformed specs: all constraints at once, with the legal values."""

import pytest

from hybridpar.legality import infeasible_reason, violations
from hybridpar.specs import parse_run_spec


def _run(preset: str = "llama-toy", workload: dict | None = None, model: dict | None = None, **strategy: object):
    return parse_run_spec(
        {"model": {"preset": preset, **(model or {})}, "workload": workload or {}, "strategy": strategy}
    )


@pytest.mark.parametrize(
    ("strategy", "sentence"),
    [
        ({"dp": 3}, "strategy.dp=3: does not divide workload.global_batch=8; legal: 1, 2, 4, 8"),
        ({"tp": 3}, "strategy.tp=3: does not divide model.heads=4; legal: 1, 2, 4"),
        ({"sp": True}, "strategy.sp=true: splits the sequence over tp ranks, and tp=1; legal: false, or tp of 2"),
        ({"pp": 8}, "strategy.pp=8: exceeds model.layers=4; legal: 1 to 4"),
        ({"zero": 2}, "strategy.zero=2: shards over data replicas, and dp*cp=1; legal: 0, or dp*cp of 2 or more"),
        ({"overlap": False}, "strategy.overlap=false: concerns gradients of data replicas, and dp*cp=1; legal: true"),
        ({"dp": 2, "zero": 3, "overlap": False}, "strategy.overlap=false: FSDP2 (zero=3) always overlaps; legal: true"),
        ({"cp": 3}, "workload.seq_len=128: does not split into 6 equal pieces (two to each cp rank"),
        ({"ep": 2}, "strategy.ep=2: spreads experts, and model.family=transformer has none"),
        ({"dp": 2, "pp": 4, "zero": 3, "engine": "deepspeed"}, "DeepSpeed's PipelineModule refuses ZeRO-2 and ZeRO-3"),
        ({"engine": "deepspeed", "tp": 2, "sp": True}, "strategy.sp=true: AutoTP keeps activations whole"),
    ],
)
def test_a_violation_names_field_value_reason_and_legal_values(strategy: dict, sentence: str) -> None:
    assert any(sentence in str(violation) for violation in violations(_run(**strategy)))


def test_all_violations_are_told_at_once() -> None:
    found = violations(_run(dp=3, tp=3, pp=8, cp=3))
    assert {violation.field for violation in found} >= {"strategy.dp", "strategy.tp", "strategy.pp", "workload.seq_len"}


def test_1f1b_needs_a_micro_batch_for_every_stage() -> None:
    reason = infeasible_reason(_run(pp=4, workload={"global_batch": 4, "micro_batch": 2}))
    assert reason is not None
    assert "there are 2" in reason


def test_text_needs_a_vocabulary_of_bytes() -> None:
    run = _run(model={"vocab": 67})
    assert "model.vocab=67: text is read as bytes" in str(infeasible_reason(run))
    assert infeasible_reason(run, on_text=False) is None


def test_tp_may_not_cut_through_a_norm_group_of_mamba() -> None:
    reason = infeasible_reason(_run("mamba2-toy", tp=4, model={"ssm_groups": 2}))
    assert reason is not None
    assert "ssm_groups=2" in reason


@pytest.mark.parametrize("preset", ["llama-toy", "mamba2-toy", "hybrid-toy"])
def test_the_product_of_dp_tp_and_pp_is_legal(preset: str) -> None:
    assert infeasible_reason(_run(preset, dp=2, tp=2, pp=2)) is None


def test_a_cluster_too_small_is_named() -> None:
    run = parse_run_spec({"model": {"preset": "llama-toy"}, "strategy": {"dp": 4}, "cluster": {"devices_per_node": 2}})
    assert "cluster.devices_per_node=2" in str(infeasible_reason(run))
