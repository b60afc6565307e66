"""Verdicts are counted and worded as they are, and what is predicted is what the closed forms say."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from hybridpar.artifacts import findings, inputs, layer_forms, numbers, theory_artifacts
from hybridpar.artifacts.artifact import Missing, TableArtifact
from hybridpar.artifacts.inputs import InputError, Study
from hybridpar.theory.activations import peak_activations
from hybridpar.theory.model_flops import attention_flops, mamba2_flops, mlp_flops, moe_flops
from hybridpar.theory.parameters import layer_shapes


def _with(study: Study, *verdicts: str) -> Study:
    return replace(study, theory=study.theory[study.theory["verdict"].isin(verdicts)])


def _text(study: Study, key: str) -> str:
    (found,) = [one.text for one in findings.theory(study) if one.key == key]
    return found


def test_comparisons_are_counted_by_quantity_tier_and_verdict(small: Study) -> None:
    table = theory_artifacts.comparisons(small).set_index(["quantity", "tier"])

    assert table["compared"].sum() == len(small.theory)
    verdicts = {"exact": 2, "explained": 0, "deviates": 3, "uncovered": 3}
    assert table.loc[("activations", "traced")].to_dict() == verdicts | {"compared": 8, "layouts": 4}
    assert table.loc[("activations", "measured"), "exact"] == 8


def test_what_differs_is_grouped_by_reason_with_its_largest_difference(small: Study) -> None:
    worse = small.theory["layout"].eq("tp2-pp2") & small.theory["family"].eq("mamba2")
    worse &= small.theory["verdict"].eq("deviates")
    frame = theory_artifacts.deviations(replace(small, theory=small.theory.assign(
        predicted=small.theory["predicted"].mask(worse, 50)
    )))  # fmt: skip

    assert list(frame["verdict"]) == ["deviates", "explained"]
    assert list(frame["numbers"]) == [3, 3]
    assert list(frame["largest"]) == [0.5, 0.2]
    assert list(frame["note"]) == ["", "it is gathered later"]


def test_a_difference_is_relative_to_the_larger_number() -> None:
    rows = pd.DataFrame({"predicted": [0, 80, 100], "seen": [7, 100, 80]})

    assert list(theory_artifacts.relative_difference(rows)) == [1.0, 0.2, 0.2]


def test_what_has_no_form_comes_with_its_reason(small: Study) -> None:
    (row,) = theory_artifacts.uncovered(small).to_dict("records")

    assert row["reason"] == "nobody wrote it down"
    assert row["numbers"] == 6
    assert row["quantities"] == "activations, flops"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (theory_artifacts.theory_deviations, "No number differs among the"),
        (theory_artifacts.theory_uncovered, "have a form"),
    ],
)
def test_where_there_is_nothing_to_list_it_is_said(make: object, words: str, small: Study) -> None:
    artifact = make(_with(small, "exact"))  # type: ignore[operator]

    assert isinstance(artifact, Missing)
    assert words in artifact.caption


def test_the_finding_names_what_deviates_most(small: Study) -> None:
    text = _text(small, "theory-verdicts")

    counts = small.theory["verdict"].value_counts()
    assert f"{counts['exact']} are exactly" in text
    assert "3 deviate." in text
    assert "6 trained and 2 served layouts of 4 families" in text
    assert "The largest deviation is 10 %, of activations (peak) for tp2-pp2, parity-" in text


def test_the_finding_says_that_none_deviates(small: Study) -> None:
    text = _text(_with(small, "exact", "uncovered"), "theory-verdicts")

    assert "none deviates" in text
    assert "largest deviation" not in text


def test_the_finding_says_what_is_uncovered(small: Study) -> None:
    assert "6 numbers without a closed form: 6 of activations, flops (nobody" in _text(small, "theory-uncovered")
    assert _text(_with(small, "exact"), "theory-uncovered") == "Every number that was seen has a closed form."


def test_without_comparisons_only_what_is_predicted_is_said(lone: Study) -> None:
    assert [one.key for one in findings.theory(lone)] == ["theory-verdicts", "theory-schedules"]
    assert _text(lone, "theory-verdicts") == theory_artifacts.NOT_COMPARED


def test_numbers_of_theory_add_up(small: Study) -> None:
    quoted = numbers.collect(small)
    parts = ("exact", "explained", "deviating")

    assert quoted["theory-deviating"].value == 3
    assert quoted["theory-layouts"].value == 8
    assert sum(quoted[f"theory-{part}"].value for part in parts) == quoted["theory-predicted"].value
    for halves in (("predicted", "uncovered"), ("traced", "measured")):
        assert sum(quoted[f"theory-{half}"].value for half in halves) == quoted["theory-comparisons"].value


def test_a_column_that_is_missing_is_named(small_paths: tuple[Path, Path], tmp_path: Path) -> None:
    tables, bench = small_paths
    for path in tables.glob("*.parquet"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    pd.read_parquet(tables / "theory.parquet").drop(columns="verdict").to_parquet(tmp_path / "theory.parquet")

    with pytest.raises(InputError, match=r"theory\.parquet has no column verdict"):
        inputs.load(tmp_path, bench)


@pytest.mark.parametrize("schedule", layer_forms.SCHEDULES)
def test_what_is_held_over_a_step_peaks_where_theory_says_and_ends_with_nothing(schedule: str) -> None:
    run = layer_forms.schedule_run(schedule)

    for rank in range(0, run.strategy.devices, run.strategy.devices // run.strategy.pp):
        line = layer_forms.held_over_work(run, rank)
        assert max(held for _, held in line) == peak_activations(run, rank)
        assert (line[0], line[-1]) == ((0.0, 0), (3.0 * run.micro_batches, 0))


def test_the_drawn_ranks_are_first_middle_and_last() -> None:
    table = layer_forms.schedules()
    first_1f1b = table[(table["schedule"] == "1f1b") & (table["place"] == "first")]

    assert table.groupby("place")["pp"].unique().map(list).to_dict() == {"first": [0], "middle": [2], "last": [3]}
    assert len(first_1f1b) == 2 * layer_forms.schedule_run("1f1b").micro_batches + 1


@pytest.mark.parametrize("model", layer_forms.LAYERS)
def test_a_layer_on_one_device_costs_what_the_models_own_forms_say(model: str) -> None:
    cost, run = layer_forms.layer_cost(model, {}), layer_forms.layer_run(model, {})
    (kind,) = set(run.model.layer_kinds)
    flops = {
        "A": lambda *shape: attention_flops(*shape) + mlp_flops(*shape),
        "E": lambda *shape: attention_flops(*shape) + moe_flops(*shape),
        "M": mamba2_flops,
    }[kind](run.model, run.workload.micro_batch, run.workload.seq_len)

    assert cost.parameters == sum(math.prod(shape) for shape in layer_shapes(kind, run.model).values())
    assert cost.forward == flops
    assert (cost.recompute, cost.again, cost.calls, cost.bytes) == (0, 0, 0, 0)


@pytest.mark.parametrize(("sp", "calls"), [(False, 4), (True, 8)])
def test_tensor_parallelism_sends_what_megatron_says(sp: bool, calls: int) -> None:
    cost = layer_forms.layer_cost("llama-3-8b", {"tp": 4, "sp": sp})
    run = layer_forms.layer_run("llama-3-8b", {})

    assert cost.calls == calls
    assert cost.bytes == calls * run.workload.seq_len * run.model.hidden * 2


def test_full_recomputation_makes_again_what_else_is_kept() -> None:
    plain, again = (layer_forms.layer_cost("llama-3-8b", {"recompute": option}) for option in ("none", "full"))

    assert again.again == plain.kept
    assert again.kept < plain.kept / 10


def test_there_is_a_row_for_each_strategy_that_is_legal() -> None:
    methods = layer_forms.layers().groupby("model")["method"].agg(set)

    assert methods["llama-3-8b"] == set(layer_forms.STRATEGIES) - {"EP"}
    assert methods["mixtral-8x7b"] == set(layer_forms.STRATEGIES)
    assert methods["mamba2-2.7b"] == set(layer_forms.STRATEGIES) - {"EP", "CP ring", "CP Ulysses"} | {"CP states"}


def test_the_table_of_layers_shows_them_all(small: Study) -> None:
    table = theory_artifacts.block_forms(small)

    assert isinstance(table, TableArtifact)
    assert len(table.cells()) == len(layer_forms.layers())


# The equations of the paper (paper/sections/theory.typ and derivations.typ), for one device or tp ranks with whole
# chunks: b sequences of S tokens.


@pytest.mark.parametrize("strategy", [{}, {"tp": 4}, {"tp": 4, "sp": True}], ids=["one device", "tp", "tp-sp"])
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_the_paper_s_activations_of_attention_and_mlp(strategy: dict[str, object], recompute: str) -> None:
    run = layer_forms.layer_run("llama-3-8b", {**strategy, "recompute": recompute})
    model, t = run.model, run.strategy.tp
    tokens, e, u = run.workload.micro_batch * run.workload.seq_len, 2, 4
    of_norm, d, h = tokens // t if run.strategy.sp else tokens, model.hidden, model.head_dim
    heads, kv_heads, f = model.heads // t, model.kv_heads // t, model.ffn_hidden // t
    none = (
        *(4 * of_norm * d * u, 2 * of_norm * u, 2 * tokens * d * e, 4 * run.workload.seq_len * h * e),
        *(2 * tokens * h * (heads + kv_heads) * e, tokens * heads * u, 4 * tokens * f * e),
    )
    given_up = tokens * heads * u + tokens * f * e

    kept = layer_forms.layer_cost("llama-3-8b", {**strategy, "recompute": recompute}).kept
    assert kept == sum(none) - (given_up if recompute == "selective" else 0)


def test_the_paper_s_activations_of_experts() -> None:
    run = layer_forms.layer_run("mixtral-8x7b", {})
    model, e, u, index = run.model, 2, 4, 8
    tokens = run.workload.micro_batch * run.workload.seq_len
    chosen, d, f, width = tokens * model.top_k, model.hidden, model.ffn_hidden, model.head_dim
    attention = (
        *(4 * tokens * d * u, 2 * tokens * u, 2 * tokens * d * e, 4 * run.workload.seq_len * width * e),
        *(2 * tokens * width * (model.heads + model.kv_heads) * e, tokens * model.heads * u),
    )
    router = tokens * model.experts * u + chosen * (index + u) + tokens * u
    experts = index * chosen + chosen * d * e + 4 * chosen * f * e
    answers = index * chosen + chosen * (d + 1) * e
    balance = model.experts * u if model.aux_loss else 0

    kept = layer_forms.layer_cost("mixtral-8x7b", {}).kept
    assert kept == sum(attention) + router + experts + answers + balance


def test_the_paper_s_activations_of_mamba2() -> None:
    run = layer_forms.layer_run("mamba2-2.7b", {})
    model, b, length = run.model, run.workload.micro_batch, run.workload.seq_len
    tokens, e, u, d = b * length, 2, 4, model.hidden
    inner, heads, groups, state, chunk = (
        *(model.ssm_inner, model.ssm_heads, model.ssm_groups, model.ssm_state, model.ssm_chunk),
    )
    chunks = length // chunk
    start = 2 * tokens * d * u + tokens * u + tokens * d * e
    convolutions = (2 * tokens + b * (model.ssm_conv - 1)) * (inner + 2 * groups * state) * e
    rates = 4 * tokens * heads * u + 2 * heads * u
    within = tokens * chunk * (2 * heads + groups) * u + chunk**2
    wide = 9 * tokens * inner * u + 3 * tokens * inner * e
    states = (2 * chunks - 1) * b * state * inner * u + b * heads * (chunks - 1) ** 2 * u + (chunks - 1) ** 2
    groups_of = 2 * tokens * groups * state * u + tokens * groups * u

    assert layer_forms.layer_cost("mamba2-2.7b", {}).kept == (
        start + convolutions + rates + within + wide + states + groups_of
    )


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_the_paper_s_traffic_of_context_parallelism(kind: str) -> None:
    strategy = {"cp": 4, "cp_kind": kind}
    run = layer_forms.layer_run("llama-3-8b", strategy)
    model, n, e, u = run.model, run.strategy.cp, 2, 4
    tokens = run.workload.micro_batch * run.workload.seq_len // n
    ring = 2 * tokens * model.kv_heads * model.head_dim * (2 * (n - 1) * e + n * u)
    ulysses = 4 * tokens * (model.heads + model.kv_heads) * model.head_dim * e

    assert layer_forms.layer_cost("llama-3-8b", strategy).bytes == (ring if kind == "ring" else ulysses)
