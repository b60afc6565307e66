"""Memory of GPU frameworks: the forms against the papers' formulas by hand, and against Megatron-LM's own report."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest

from hybridpar.specs import RunSpec, parse_run_spec
from hybridpar.theory.gpu_memory import (
    DEEPSPEED_FP16,
    FSDP2,
    GPT,
    LLAMA,
    MEGATRON,
    NANOTRON,
    bytes_per_parameter,
    elements_of_place,
    in_flight,
    layer_activations,
    memory_of_place,
    peak_of_run,
)
from hybridpar.theory.parameters import parameter_count
from hybridpar.theory.schedule import actions_of_rank

# Korthikanti et al. 2022, table 3: heads, hidden, layers, tensor, pipeline, interleaved stages, micro-batch; s = 2048,
# v = 51200. Batches of 4, 64, 280 and 512 sequences.
PAPER = {
    "22B": (64, 6144, 48, 8, 1, 1, 4, 4),
    "175B": (96, 12288, 96, 8, 8, 3, 1, 64),
    "530B": (128, 20480, 105, 8, 35, 3, 1, 280),
    "1T": (160, 25600, 128, 8, 64, 1, 1, 512),
}
S, V = 2048, 51200
# The paper counts fp32 logits alone, and no gradients or buffers.
AS_PRINTED = replace(MEGATRON, logit=4, gather_buffers=0)


def _run(model: dict[str, Any], strategy: dict[str, Any], batch: tuple[int, int], seq_len: int = S) -> RunSpec:
    workload = {"seq_len": seq_len, "micro_batch": batch[0], "global_batch": batch[1], "precision": "bf16"}
    return parse_run_spec({"model": model, "strategy": strategy, "workload": workload})


def _gpt(heads: int, hidden: int, layers: int, vocab: int = V) -> dict[str, Any]:
    shape = {"layers": layers, "hidden": hidden, "heads": heads, "head_dim": hidden // heads, "ffn_hidden": 4 * hidden}
    return {"family": "transformer", "vocab": vocab, "kv_heads": heads, "tied_embeddings": True, **shape}


def _paper(size: str, **strategy: Any) -> RunSpec:
    a, h, layers, t, p, virtual, b, batch = PAPER[size]
    schedule = {"schedule": "interleaved", "virtual": virtual} if virtual > 1 else {}
    return _run(_gpt(a, h, layers), {"tp": t, "pp": p, **schedule, **strategy}, (b, batch))


def _layer(size: str, **strategy: Any) -> float:
    run = _paper(size, **strategy)
    tokens = run.workload.micro_batch * S
    return layer_activations(run.model, "A", tokens, run.strategy, GPT, context=S)


@pytest.mark.parametrize("size", PAPER)
def test_table_2_of_korthikanti_by_hand(size: str) -> None:
    a, h, _, t, _, _, b, _ = PAPER[size]
    sbh, ratio = S * b * h, 5 * a * S / h
    assert _layer(size, tp=1) == pytest.approx(sbh * (34 + ratio))
    assert _layer(size) == pytest.approx(sbh * (10 + 24 / t + ratio / t))
    assert _layer(size, sp=True) == pytest.approx(sbh * (34 / t + ratio / t))
    assert _layer(size, recompute="selective") == pytest.approx(sbh * (10 + 24 / t))
    assert _layer(size, sp=True, recompute="selective") == pytest.approx(sbh * 34 / t)
    assert _layer(size, recompute="full") == 2 * sbh


def test_the_share_of_the_scores_is_the_papers() -> None:
    """Section 5: 5as/h is 80 for GPT-3 and 64 for MT-NLG, 70% and 65% of the activations."""
    for size, ratio, share in (("175B", 80, 0.70), ("530B", 64, 0.65)):
        a, h, *_ = PAPER[size]
        assert 5 * a * S / h == ratio
        kept = _layer(size, sp=True, recompute="selective") / _layer(size, sp=True)
        assert 1 - kept == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize("size", PAPER)
def test_the_first_stage_holds_what_section_4_2_3_says(size: str) -> None:
    """sbhL (1 + (p-1)/(p m)) (34/t + 5as/(ht)) with interleaving in m stages, sbhL times it without."""
    a, h, layers, t, p, virtual, b, _ = PAPER[size]
    penalty = 1 + (p - 1) / (p * virtual) if virtual > 1 else 1
    expected = S * b * h * layers * penalty * (34 + 5 * a * S / h) / t
    ends = S * b * p * penalty * (8 + h / t)  # token numbers and the mask of the embedding's dropout
    ends += 4 * S * b * h / t if p == 1 else 0
    found = memory_of_place(_paper(size, sp=True), 0, GPT, AS_PRINTED).activations
    assert found == pytest.approx(expected + ends, rel=1e-6)


def test_logits_and_the_last_norm_where_there_is_one_stage() -> None:
    """Section 4.3: 4sbh/t (1 + v/h) more."""
    a, h, layers, t, _, _, b, _ = PAPER["22B"]
    found = memory_of_place(_paper("22B", sp=True), 0, GPT, AS_PRINTED)
    stored = S * b * h * layers * (34 + 5 * a * S / h) / t
    expected = stored + S * b * (8 + h / t) + 4 * S * b * h / t * (1 + V / h)
    assert found.activations + found.transient == pytest.approx(expected, rel=1e-6)
    assert found.transient == 4 * S * b * V // t


def test_scores_that_are_recomputed_are_there_for_one_layer() -> None:
    a, _, _, t, _, _, b, _ = PAPER["22B"]
    again = memory_of_place(_paper("22B", sp=True, recompute="selective"), 0, GPT, AS_PRINTED)
    assert again.transient == 5 * a * S * S * b // t  # more than the logits, which are gone by then


def test_parameters_of_the_papers_models() -> None:
    """Their names: 22, 175, 530 and 1000 billion."""
    for size, billions in (("22B", 22), ("175B", 175), ("530B", 530), ("1T", 1008)):
        run = _paper(size, tp=1, pp=1, schedule="1f1b", virtual=1)
        elements = elements_of_place(run.model, run.strategy, 0, replace(GPT, positions=S))
        _, h, layers, *_ = PAPER[size]
        # Narayanan et al. 2021, arXiv 2104.04473, equation 2, whose 13/12h are biases and norms
        printed = 12 * layers * h * h * (1 + 13 / (12 * h) + (V + S) / (12 * layers * h))
        # the final norm is left out there
        assert elements.dense - 2 * h == pytest.approx(printed, rel=1e-12)
        assert elements.dense / 1e9 == pytest.approx(billions, rel=0.02)


@pytest.mark.parametrize(
    ("zero", "ranks", "expected"), [(0, 8, 18), (1, 8, 6 + 12 / 8), (2, 8, 2 + 16 / 8), (3, 8, 18 / 8), (1, 1, 18)]
)
def test_bytes_of_a_parameter_in_megatron(zero: int, ranks: int, expected: float) -> None:
    """Megatron-LM's own report: 18, or 6 + 12/dp with its distributed optimizer; Rajbhandari et al. 2020, figure 1."""
    assert bytes_per_parameter(MEGATRON, zero, ranks) == expected


def test_bytes_of_a_parameter_in_the_zero_paper() -> None:
    """Rajbhandari et al. 2020, figure 1: 7.5 billion parameters on 64 ranks need 120, 31.4, 16.6 and 1.9 GB."""
    for zero, gigabytes in enumerate((120, 31.4, 16.6, 1.9)):
        assert 7.5 * bytes_per_parameter(DEEPSPEED_FP16, zero, 64) == pytest.approx(gigabytes, abs=0.06)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("pp", [1, 4])
def test_megatrons_report_of_the_most_loaded_shard(pp: int, tied: bool) -> None:
    """theoretical_memory_usage.py: (layers/pp + embedding)/tp parameters, both embeddings where pp is 1 and they are
    untied; norms, which it divides by tp though every rank has them, are left to the tolerance."""
    model = {"preset": "llama-3-8b", "tied_embeddings": tied}
    run = _run(model, {"dp": 4, "tp": 2, "pp": pp, "zero": 1, "sp": True}, (1, 16), 4096)
    d, f, vocab = 4096, 14336, 128256
    block = 32 * (2 * d * d * (1 + 8 / 32) + 3 * d * f + 2 * d) + d
    shard = (block / pp + vocab * d * (1 if tied or pp > 1 else 2)) / 2
    assert memory_of_place(run, 0).state == pytest.approx(shard * (6 + 12 / 4), rel=1e-4)


def test_zero_stages_shard_what_they_say() -> None:
    model = {"preset": "llama-3-8b"}
    whole = parameter_count(_run(model, {}, (1, 8)).model)
    by_stage = {zero: memory_of_place(_run(model, {"dp": 8, "zero": zero}, (1, 8)), 0) for zero in (0, 1, 2, 3)}
    assert [by_stage[0].weights, by_stage[0].gradients, by_stage[0].optimizer] == [2 * whole, 4 * whole, 12 * whole]
    assert by_stage[1].optimizer == by_stage[0].optimizer // 8
    assert by_stage[2].gradients == by_stage[0].gradients // 8
    assert by_stage[3].weights == by_stage[0].weights // 8
    assert [by_stage[zero].gathered > 0 for zero in (0, 1, 2, 3)] == [False, False, False, True]


def test_context_ranks_share_the_optimizer_and_cut_the_sequence() -> None:
    model = {"preset": "llama-3-8b"}
    alone = memory_of_place(_run(model, {"zero": 1}, (1, 8), 8192), 0)
    split = memory_of_place(_run(model, {"zero": 1, "cp": 4}, (1, 8), 8192), 0)
    assert split.optimizer == alone.optimizer // 4
    assert split.activations == alone.activations // 4


def test_fsdp_holds_sixteen_bytes_a_parameter_over_its_ranks() -> None:
    run = _run({"preset": "llama-3-8b"}, {"dp": 64, "zero": 3}, (1, 64))
    memory = memory_of_place(run, 0, LLAMA, FSDP2)
    assert memory.state == pytest.approx(16 * parameter_count(run.model) / 64, abs=3)
    layer = 2 * 4096**2 + 2 * 1024 * 4096 + 3 * 4096 * 14336 + 2 * 4096
    assert memory.gathered == 2 * (2 * layer + 2 * 128256 * 4096 + 4096)


def test_a_llama_layer_by_hand() -> None:
    """Grouped queries, SwiGLU in one kernel, FlashAttention: 16h, q, k, v and output, 6f, 4 bytes a head."""
    run = _run({"preset": "llama-3-8b"}, {"tp": 4, "sp": True}, (2, 8), 4096)
    tokens = 2 * 4096
    by_hand = tokens * (8 * 4096 + 2 * (4096 + 2 * 1024) + 2 * 4096 + 6 * 14336 + 4 * 32) / 4
    assert layer_activations(run.model, "A", tokens, run.strategy, context=4096) == by_hand
    kept_apart = layer_activations(run.model, "A", tokens, run.strategy, LLAMA, NANOTRON, context=4096)
    assert kept_apart - by_hand == tokens * 2 * 14336 / 4
    longer = layer_activations(run.model, "A", 2 * tokens, run.strategy, context=8192)
    assert longer == 2 * by_hand  # nothing grows with the square


def test_key_heads_fewer_than_ranks_are_on_several() -> None:
    model = _run({"preset": "llama-3-8b"}, {}, (1, 8)).model
    run = _run({"preset": "llama-3-8b"}, {"tp": 16}, (1, 8))
    with_one_head = layer_activations(model, "A", 1, run.strategy, context=1)
    assert with_one_head == 8 * 4096 + 4 * 4096 / 16 + 4 * 128 + 6 * 14336 / 16 + 4 * 32 / 16


def test_experts_by_hand() -> None:
    """Mixtral: two of eight experts a token on an even load, inputs and outputs of both."""
    run = _run({"preset": "mixtral-8x7b"}, {"dp": 8, "ep": 8, "zero": 1}, (1, 8), 4096)
    by_hand = 4096 * (8 * 4096 + 4 * 4096 + 4 * 1024 + 4 * 32 + 2 * (4 * 4096 + 6 * 14336) + 8 * 8)
    assert layer_activations(run.model, "E", 4096, run.strategy, context=4096) == by_hand
    experts, everything = 32 * 8 * 3 * 4096 * 14336, parameter_count(run.model)
    memory = memory_of_place(run, 0)
    assert memory.weights == 2 * (everything - experts + experts // 8)
    # One rank in eight has an expert, so that there is nobody to share its optimizer with.
    assert memory.optimizer == 12 * ((everything - experts) // 8 + experts // 8)


@pytest.mark.parametrize("m", [1, 3, 8, 16])
@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize(("schedule", "virtual"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4)])
def test_in_flight_is_what_the_schedule_has_open(schedule: str, virtual: int, place: int, m: int) -> None:
    if schedule == "interleaved" and m % 4:
        return  # rounds of fewer micro-batches than ranks are torch's own
    strategy = {"pp": 4, "schedule": schedule, "virtual": virtual}
    run = _run({"preset": "llama-toy", "layers": 16}, strategy, (1, m), 128)
    opened = accumulate({"F": 1, "B": -1}[action.kind] for action in actions_of_rank(run, place))
    assert in_flight(schedule, 4, place, m, virtual) == max(opened) / virtual


def test_interleaving_costs_the_first_stage_the_papers_factor() -> None:
    for p, virtual in ((8, 3), (35, 3), (4, 2)):
        assert in_flight("interleaved", p, 0, 10 * p, virtual) == pytest.approx(p * (1 + (p - 1) / (p * virtual)))


def test_the_first_stage_holds_most_and_the_last_has_the_logits() -> None:
    run = _run({"preset": "llama-3-70b"}, {"tp": 8, "sp": True, "pp": 8, "dp": 2, "zero": 1}, (1, 64), 8192)
    places = [memory_of_place(run, place) for place in range(8)]
    assert [one.activations for one in places] == sorted((one.activations for one in places), reverse=True)
    assert max(places, key=lambda one: one.transient) == places[-1]
    assert peak_of_run(run) == places[0]
    assert places[-1].transient == 6 * 8192 * 128256 // 8


def test_recomputation_keeps_inputs_and_one_layer() -> None:
    strategy = {"tp": 8, "sp": True, "pp": 4, "zero": 1}
    model = {"preset": "llama-3-70b"}
    kept, again = (memory_of_place(_run(model, {**strategy, "recompute": how}, (1, 64)), 0) for how in ("none", "full"))
    assert again.activations == pytest.approx(4 * 20 * 2 * S * 8192 / 8 + 4 * 8 * S)
    layer = (kept.activations - 4 * 8 * S) / 4 / 20
    assert again.transient - kept.transient == pytest.approx(layer)


def test_gradients_on_their_way_count_where_they_outlive_the_activations() -> None:
    """nanotron: of a small batch the bf16 gradients at the end of a pass are more than the activations at its start."""
    run = _run({"preset": "llama-3-8b", "vocab": 1024}, {}, (1, 1), 128)
    parameters = parameter_count(run.model)
    assert memory_of_place(run, 0, LLAMA, NANOTRON).total == 20 * parameters
    assert memory_of_place(run, 0).total < 18.2 * parameters
    replicas = _run({"preset": "llama-3-8b", "vocab": 1024}, {"dp": 2}, (1, 2), 128)
    assert memory_of_place(replicas, 0, LLAMA, NANOTRON).total == 22 * parameters  # DDP's buckets


@pytest.mark.parametrize(
    ("model", "strategy", "place", "message"),
    [
        ({"preset": "llama-toy"}, {"pp": 2}, 2, "place=2 is not in the pipeline; legal: 0 to 1"),
        ({"preset": "mamba2-toy"}, {}, 0, "Mamba-2 layers have no form here"),
        ({"preset": "llama-toy"}, {"pp": 2, "schedule": "zb-v"}, 0, "schedule='zb-v' has no form here"),
        ({"preset": "llama-toy"}, {"offload": "optimizer"}, 0, "offload=optimizer has no form here"),
    ],
)
def test_what_has_no_form_is_refused(model: Any, strategy: Any, place: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        memory_of_place(_run(model, strategy, (1, 8), 128), place)


def test_only_training_in_bf16_has_a_form() -> None:
    with pytest.raises(ValueError, match="precision=fp32"):
        memory_of_place(parse_run_spec({"model": {"preset": "llama-toy"}}), 0)


def test_the_forms_need_no_torch() -> None:
    code = "import sys, hybridpar.theory.gpu_memory; sys.exit('torch' in sys.modules or 'pandas' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
