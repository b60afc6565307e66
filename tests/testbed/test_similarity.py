"""A scale model has the dimensionless numbers of what it stands for, and says which it has not."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybridpar.specs import RunSpec, parse_run_spec
from hybridpar.testbed.check import Check, Reading
from hybridpar.testbed.clusters import REAL_CLUSTERS, RealCluster
from hybridpar.testbed.plan import PlanError
from hybridpar.testbed.similarity import Group, Rates, ScaleModel, SimilarityError, groups, rates_of, scale
from hybridpar.theory.parameters import parameter_count

PUBLISHED = Path(__file__).parents[2] / "data" / "published"
H100 = REAL_CLUSTERS["h100-nvlink-ib"]


def _run(model: str = "llama-3-8b", strategy: dict[str, Any] | None = None, **workload: Any) -> RunSpec:
    return parse_run_spec(
        {
            "model": {"preset": model},
            "workload": {"seq_len": 8192, "global_batch": 8, "precision": "bf16", **workload},
            "strategy": strategy or {"dp": 2, "tp": 2},
            "cluster": {"nodes": 2},
        }
    )


def _scaled(run: RunSpec, cluster: RealCluster = H100, factor: float = 1 / 32) -> ScaleModel:
    return scale(run, cluster, factor, 5e9)


def _by_name(found: tuple[Group, ...]) -> dict[str, Group]:
    return {group.name: group for group in found}


def test_llama_3_8b_at_one_thirty_second() -> None:
    scaled = _scaled(_run())
    model, small = scaled.model.model, scaled.model.workload
    assert (model.hidden, model.ffn_hidden, model.head_dim, model.vocab, small.seq_len) == (128, 448, 4, 4008, 256)
    assert (model.layers, model.heads, model.kv_heads) == (32, 32, 8), "these stay"
    assert scaled.model.strategy == scaled.real.strategy
    assert small.global_batch == 8
    assert parameter_count(model) == pytest.approx(8.03e9 / 32**2, rel=0.003)


def test_rates_and_memory_follow_the_laws() -> None:
    scaled, k = _scaled(_run()), 1 / 32
    real, asked = scaled.real_rates, scaled.asked
    assert asked.intra_bytes_s / asked.flops_per_s == pytest.approx(real.intra_bytes_s / real.flops_per_s / k)
    assert asked.inter_bytes_s / asked.flops_per_s == pytest.approx(real.inter_bytes_s / real.flops_per_s / k)
    assert asked.memory_bytes == pytest.approx(80e9 * k**2)
    assert asked.intra_latency_s is not None
    assert asked.intra_latency_s * asked.flops_per_s == pytest.approx(k**3 * 5e-6 * real.flops_per_s)


def test_the_example_of_an_h100_at_500_tflops() -> None:
    """By hand: 450 GB/s * 5e9 / 500e12 * 32 = 144 MB/s; 50 GB/s gives 16 MB/s; 80 GB / 1024 = 78 MB."""
    asked = _scaled(_run(), replace(H100, flops_per_s=500e12)).asked
    assert (asked.intra_bytes_s, asked.inter_bytes_s) == (pytest.approx(144e6), pytest.approx(16e6))
    assert asked.memory_bytes == pytest.approx(78.125e6)


def test_the_plan_gives_the_ranks_of_a_node_its_adapters_together() -> None:
    scaled = _scaled(_run())
    plan = scaled.plan(0.25)
    assert (plan.nodes, plan.devices_per_node, plan.device_share) == (2, 2, 0.25)
    assert plan.intra_bit_s == round(8 * scaled.asked.intra_bytes_s)
    assert plan.inter_bit_s == round(2 * 8 * scaled.asked.inter_bytes_s)
    assert plan.device_memory_bytes == round(scaled.asked.memory_bytes)
    shared = _scaled(_run(), REAL_CLUSTERS["a100-pcie-ethernet"])
    assert shared.real_rates.inter_bytes_s == 12.5e9 / 2, "one adapter a node, shared by two devices"


_MATCHED = ("communication/compute", "parameters/memory", "gradients/memory", "optimizer/memory", "all/memory")


@pytest.mark.parametrize("cluster", REAL_CLUSTERS.values(), ids=lambda cluster: cluster.name)
@pytest.mark.parametrize(
    ("model", "strategy"),
    [
        ("llama-3-8b", {"dp": 2, "tp": 2}),
        ("llama-3-8b", {"dp": 2, "tp": 2, "sp": True, "zero": 3}),
        ("llama-3-8b", {"pp": 2, "cp": 2}),
        ("llama-3-70b", {"dp": 4, "zero": 2, "recompute": "full"}),
        ("mixtral-8x7b", {"dp": 4, "ep": 4}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_communication_and_memory_keep_their_ratios_to_compute(
    model: str, strategy: dict[str, Any], cluster: RealCluster
) -> None:
    found = [g for g in groups(_scaled(_run(model, strategy), cluster)) if g.name.startswith(_MATCHED)]
    assert sum(group.name.startswith("communication/compute") for group in found) >= 1
    for group in found:
        assert group.departure == pytest.approx(0, abs=0.03), group


@pytest.mark.parametrize("model", ["mamba2-2.7b", "jamba-8b-like"])
def test_mamba_keeps_them_too_where_its_lengths_divide(model: str) -> None:
    """Its terms of lower order (convolution, one step width a head) weigh more; the table says how much."""
    scaled = _scaled(_run(model, {"dp": 4}))
    assert scaled.model.model.ssm_heads == scaled.real.model.ssm_heads
    for name, group in _by_name(groups(scaled)).items():
        if name.startswith(_MATCHED):
            assert abs(group.departure or 0) < 0.2, group


def test_a_model_in_another_precision_moves_and_holds_more_and_its_testbed_gives_more() -> None:
    wide, narrow = (_scaled(_run(precision=precision)) for precision in ("fp32", "bf16"))
    assert wide.real.workload.precision == narrow.real.workload.precision == "bf16"
    assert wide.asked.intra_bytes_s == 2 * narrow.asked.intra_bytes_s
    assert wide.asked.memory_bytes == 2 * narrow.asked.memory_bytes
    group = _by_name(groups(wide))["communication/compute, dp (across nodes)"]
    assert group.departure == pytest.approx(0, abs=0.01)


def test_axes_are_told_apart_by_where_they_run() -> None:
    names = set(_by_name(groups(_scaled(_run()))))
    assert {"communication/compute, tp (inside nodes)", "communication/compute, dp (across nodes)"} <= names


def test_at_factor_one_nothing_departs() -> None:
    for group in groups(scale(_run(), H100, 1.0, H100.flops_per_s)):
        if group.model is not None:
            assert group.departure == pytest.approx(0), group


def test_work_on_single_elements_is_named_as_not_kept_and_counted() -> None:
    found = _by_name(groups(_scaled(_run())))
    for name in ("elements of hidden states/FLOPs", "scores in softmax/FLOPs"):
        assert found[name].departure == pytest.approx(31, rel=0.01)
        assert "1/k times" in found[name].note


def test_latency_is_unknown_until_it_is_measured_and_then_compared() -> None:
    scaled = _scaled(_run())
    name = "latency/compute, tp (inside nodes)"
    before = _by_name(groups(scaled))[name]
    assert (before.model, before.departure) == (None, None)
    assert "similarity asks for 24.2 us inside a node and 82.4 us across" in before.note
    asked = _by_name(groups(scaled, scaled.asked))[name]
    assert asked.departure == pytest.approx(0, abs=0.01)
    slow = replace(scaled.asked, intra_latency_s=3 * (scaled.asked.intra_latency_s or 0))
    assert _by_name(groups(scaled, slow))[name].departure == pytest.approx(2, abs=0.02)


def test_buckets_of_gradients_do_not_shrink_with_the_model_and_are_named() -> None:
    group = _by_name(groups(_scaled(_run())))["latency/compute, dp (across nodes)"]
    assert "calls became" in group.note
    assert "buckets of fixed bytes hold more of a smaller model" in group.note


def test_measured_rates_take_the_place_of_asked_ones() -> None:
    scaled = _scaled(_run())
    measured = replace(scaled.asked, inter_bytes_s=scaled.asked.inter_bytes_s / 2)
    found = _by_name(groups(scaled, measured))
    assert found["communication/compute, dp (across nodes)"].departure == pytest.approx(1.0, abs=0.01)
    assert found["communication/compute, tp (inside nodes)"].departure == pytest.approx(0.0, abs=0.01)
    assert found["inter_bytes_s, measured/asked"].departure == pytest.approx(-0.5)


def test_a_check_gives_the_measured_rates() -> None:
    asked = _scaled(_run()).asked
    names = {
        "device": 4e9,
        "message inside a node": 6.4e8,
        "all-reduce across nodes, all at once": 4e7,
        "latency inside a node": 2e-4,
        "latency across nodes": 3e-4,
    }
    readings = tuple(Reading(name, "", None, value, value, value, 1) for name, value in names.items())
    assert rates_of(Check("bed", readings, 0.0, 2), asked) == Rates(4e9, 8e7, 5e6, asked.memory_bytes, 2e-4, 3e-4)
    alone = rates_of(Check("bed", readings[:1], 0.0, 2), asked)
    assert (alone.intra_bytes_s, alone.inter_bytes_s) == (asked.intra_bytes_s, asked.inter_bytes_s)
    assert (alone.intra_latency_s, alone.inter_latency_s) == (None, None)


def test_rounding_is_named() -> None:
    scaled = _scaled(_run(), factor=1 / 48)
    assert scaled.model.model.hidden == 86
    assert scaled.model.model.head_dim == 2
    found = _by_name(groups(scaled))
    assert found["hidden/(k*hidden)"].note == "85.3333 became 86"
    assert found["head_dim/hidden"].note == "2.66667 became 2"
    assert found["head_dim/hidden"].departure == pytest.approx(2 / 86 / (128 / 4096) - 1)


def test_what_has_no_closed_form_says_so() -> None:
    run = _run(phase="prefill")
    found = _by_name(groups(_scaled(run)))
    assert found["communication/compute"].real is None
    assert "workload.phase=prefill has no closed form yet" in found["communication/compute"].note


@pytest.mark.parametrize(
    ("run", "factor", "sentence"),
    [
        (_run(), 0.0, "factor=0 is not legal; legal: above 0, at most 1"),
        (_run(), 1.5, "factor=1.5 is not legal"),
        (_run(), float("nan"), "factor=nan is not legal"),
        (_run(), 1e-4, "leaves nothing of model.hidden=4096; legal: at least 0.00012"),
        (_run(strategy={"dp": 3}), 1 / 32, "cluster.nodes=2 with 2 devices each are not the 3 devices of strategy dp3"),
        (_run(strategy={"tp": 2, "cp": 64, "cp_kind": "ulysses"}), 1 / 32, "leaves no legal model: strategy.cp=64"),
    ],
)
def test_what_cannot_be_scaled_is_refused_in_one_sentence(run: RunSpec, factor: float, sentence: str) -> None:
    with pytest.raises(SimilarityError) as refused:
        _scaled(run, factor=factor)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_a_device_without_a_rate_is_refused(rate: float) -> None:
    with pytest.raises(SimilarityError, match=r"device_flops_per_s=.* is not legal; legal: above 0"):
        scale(_run(), H100, 1 / 32, rate)


def test_a_testbed_faster_than_any_is_refused_by_its_plan() -> None:
    with pytest.raises(PlanError, match=r"testbed.intra_bit_s=\d+ is not legal"):
        scale(_run(), H100, 1 / 32, 1e15).plan(1.0)


# Where the numbers are from


def _hardware() -> dict[str, dict[str, str]]:
    with (PUBLISHED / "hardware.csv").open(newline="") as file:
        return {row["accelerator"]: row for row in csv.DictReader(file)}


_COLUMNS = {
    "measured_mamf_bf16_tflops": ("flops_per_s", 1e12),
    "intra_link_gb_s_per_dir": ("intra_bytes_s", 1e9),
    "intra_p2p_gb_s_per_dir": ("intra_bytes_s", 1e9),
    "typical_nic_gbps_per_device": ("nic_bytes_s", 1e9 / 8),
    "hbm_gb": ("memory_bytes", 1e9),
}


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="data/published is not in this checkout")
@pytest.mark.parametrize("cluster", REAL_CLUSTERS.values(), ids=lambda cluster: cluster.name)
def test_every_number_is_in_the_row_that_it_names_or_is_called_an_assumption(cluster: RealCluster) -> None:
    row = _hardware()[cluster.hardware_row]
    assert set(cluster.sources) == {
        "flops_per_s", "intra_bytes_s", "nic_bytes_s", "memory_bytes", "intra_latency_s", "inter_latency_s",
    }  # fmt: skip
    for field, source in cluster.sources.items():
        if source.startswith("hardware.csv"):
            column = next(column for column in _COLUMNS if column in source)
            named, unit = _COLUMNS[column]
            assert named == field
            assert getattr(cluster, field) == pytest.approx(float(row[column]) * unit)
        else:
            assert source.startswith(("assumption: ", "collective_bench.csv, vidur_net"))


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="data/published is not in this checkout")
@pytest.mark.parametrize(
    "cluster", [c for c in REAL_CLUSTERS.values() if c.latency_row], ids=lambda cluster: cluster.name
)
def test_latencies_are_those_of_the_smallest_message_published(cluster: RealCluster) -> None:
    with (PUBLISHED / "collective_bench.csv").open(newline="") as file:
        rows = [
            row
            for row in csv.DictReader(file)
            if (row["source_id"], row["accelerator"], row["op"]) == ("vidur_net", cluster.latency_row, "send_recv")
        ]
    for nodes, latency in (("1", cluster.intra_latency_s), ("2", cluster.inter_latency_s)):
        smallest = min((row for row in rows if row["nodes"] == nodes), key=lambda row: float(row["bytes"]))
        assert float(smallest["bytes"]) == 2048
        assert float(smallest["time_us"]) * 1e-6 == pytest.approx(latency)
