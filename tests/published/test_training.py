"""The reader of published training runs: the real table, and tables that are not what they should be."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hybridpar.legality import violations
from hybridpar.published.training import COLUMNS, TABLE, PublishedDataError, PublishedRun, read_training
from hybridpar.specs import ModelSpec, RunSpec, Strategy
from hybridpar.theory.parameters import parameter_count

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def rows() -> tuple[PublishedRun, ...]:
    return read_training(ROOT / TABLE)


@pytest.fixture(scope="module")
def by_id(rows: tuple[PublishedRun, ...]) -> dict[str, PublishedRun]:
    return {row.row_id: row for row in rows}


def test_all_rows_of_the_table_are_read_and_named_once(rows: tuple[PublishedRun, ...]) -> None:
    assert len(rows) == 4653
    assert len({row.row_id for row in rows}) == 4653
    assert sum(row.complete for row in rows) == 3489  # as data/published/README.md says


def test_a_row_is_what_its_source_printed(by_id: dict[str, PublishedRun]) -> None:
    row = by_id["simumax_b200-0001"]
    assert (row.layers, row.hidden, row.kv_heads, row.dp, row.pp, row.zero_stage) == (12, 8192, 8, 4, 2, 1)
    assert (row.step_time_s, row.peak_mem_gb, row.status, row.num_experts, row.sp) == (0.843, 71.458, "ok", None, None)
    assert row.complete
    assert row.seconds == 0.843


def test_a_complete_row_is_a_run(by_id: dict[str, PublishedRun]) -> None:
    run = by_id["simumax_b200-0043"].run()
    assert isinstance(run, RunSpec)
    assert run.strategy == Strategy(tp=2, cp=4, sp=True, zero=1)
    assert (run.workload.seq_len, run.micro_batches) == (131072, 4)
    assert run.model.kv_heads == 16
    assert not violations(run, on_text=False)


def test_what_sources_ran_is_legal_but_for_what_we_ask_of_pipelines_and_zero(rows: tuple[PublishedRun, ...]) -> None:
    """nanotron runs pp-1 micro-batches, and stages without layers; ZeRO-1 with one replica shards nothing."""
    runs = {row.row_id: run for row in rows if row.status == "ok" and isinstance(run := row.run(), RunSpec)}
    assert len(runs) == 1751
    refused = {name: {one.field for one in violations(run, on_text=False)} for name, run in runs.items()}
    odd = {name: fields for name, fields in refused.items() if fields}
    assert set().union(*odd.values()) == {"strategy.pp", "strategy.zero"}
    for name, fields in odd.items():
        strategy, m = runs[name].strategy, runs[name].micro_batches
        if "strategy.zero" in fields:
            assert strategy.dp * strategy.cp == 1
        if "strategy.pp" in fields:
            assert m == strategy.pp - 1 or strategy.pp > runs[name].model.layers


def test_gpt_is_told_from_llama(rows: tuple[PublishedRun, ...]) -> None:
    ungated = {row.source_id for row in rows if row.mlp == "gelu"}
    assert {"narayanan2021_t1", "bigscience_a100", "vtrain_multi", "llmfoundry"} <= ungated
    assert {row.mlp for row in rows if row.model_family in ("llama", "moe")} == {"swiglu"}
    assert {row.mlp for row in rows if row.model_family in ("mamba", "hybrid")} == {None}


def test_tied_embeddings_follow_the_parameters_that_the_source_counts(rows: tuple[PublishedRun, ...]) -> None:
    """nanotron ties below 4 billion parameters: scripts/scaling_benchmarks.py, tie_word_embeddings."""
    tied = {}
    for row in rows:
        model = row.model()
        if row.source_id == "nanotron_ultrascale" and isinstance(model, ModelSpec):
            tied[row.model_name] = model.tied_embeddings
            assert parameter_count(model) / 1e9 == pytest.approx(row.params_b, rel=0.01)
    assert tied == {
        "nanotron-llama-1B": True,
        "nanotron-llama-3B": True,
        "nanotron-llama-8B": False,
        "nanotron-llama-80B": False,
    }


@pytest.mark.parametrize(
    ("row_id", "reason"),
    [
        ("primus_pipeline-0001", "zero_stage, recompute not stated; seq_len, micro_batch, global_batch not stated"),
        ("simumax_b200-0005", "deepseek_v2 truncated to 4 layers has latent attention"),
        ("torchtitan_202412-0005", "precision='fp8(linear)+bf16' is not bf16 or fp16"),
        ("msamp-0002", "precision='fp8 (TE)' is not bf16 or fp16"),
        ("nanotron_ultrascale-1380", ""),
    ],
)
def test_a_row_that_is_no_run_says_why(by_id: dict[str, PublishedRun], row_id: str, reason: str) -> None:
    run = by_id[row_id].run()
    assert isinstance(run, str) == bool(reason)
    assert reason in str(run)


def test_a_reason_names_what_the_row_lacks(rows: tuple[PublishedRun, ...]) -> None:
    """Filling in what a reason names first changes the reason: none is an excuse."""
    lacking = [row for row in rows if row.complete and str(row.run()).startswith("vocab not stated")]
    assert len(lacking) > 1000
    filled = [row.assuming(vocab=51200).run() for row in lacking]
    assert not any(run.startswith("vocab") for run in filled if isinstance(run, str))
    zero = [row.assuming(vocab=51200, zero_stage=0, sp=False).run() for row in lacking]
    assert sum(isinstance(run, RunSpec) for run in zero) > 1000


def test_degrees_that_are_not_the_devices_are_no_layout(by_id: dict[str, PublishedRun]) -> None:
    row = by_id["simumax_b200-0001"]
    assert isinstance(row.strategy(), Strategy)
    assert replace(row, num_devices=16).strategy() == "dp*tp*pp*cp=8 are not its 16 devices"
    assert replace(row, ep=3).strategy() == "ep=3 does not divide dp=4"
    assert replace(row, recompute="custom").strategy() == "recompute='custom' is none of none, selective, full"
    assert replace(row, pp_schedule="").strategy() == "pp_schedule not stated"
    assert replace(row, micro_batch=0.5).run() == "micro_batch=0.5 is no whole number of sequences"


def test_batches_that_contradict_each_other_are_no_run(by_id: dict[str, PublishedRun]) -> None:
    bad = [
        row
        for row in by_id.values()
        if row.source_id == "nanotron_ultrascale" and "INCONSISTENT" in row.notes and row.kv_heads is not None
    ]
    assert bad
    assert all(isinstance(row.run(), str) for row in bad)


def test_what_is_assumed_fills_only_what_is_empty(by_id: dict[str, PublishedRun]) -> None:
    row = next(row for row in by_id.values() if row.source_id == "vtrain_multi" and row.vocab is None)
    filled = row.assuming(vocab=51200, zero_stage=0, sp=False, layers=1)
    assert isinstance(row.run(), str)
    run = filled.run()
    assert isinstance(run, RunSpec)
    assert (run.model.vocab, run.model.layers) == (51200, row.layers)
    with pytest.raises(KeyError, match="vocabulary"):
        row.assuming(vocabulary=51200)


def test_a_missing_table_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(PublishedDataError, match=r"none\.csv cannot be read: No such file or directory$"):
        read_training(tmp_path / "none.csv")


def test_a_missing_column_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text(",".join(name for name in COLUMNS if name not in ("dp", "status")) + "\n")
    with pytest.raises(PublishedDataError, match="has no column status, dp; is it the table of training runs"):
        read_training(path)


@pytest.mark.parametrize(
    ("column", "text", "message"),
    [
        ("layers", "many", "line 2: layers='many' is not a number"),
        ("layers", "1.5", "line 2: layers='1.5' is not a whole number"),
        ("sp", "perhaps", "line 2: sp='perhaps' is not true or false"),
    ],
)
def test_a_bad_cell_is_named(tmp_path: Path, column: str, text: str, message: str) -> None:
    path = tmp_path / "table.csv"
    path.write_text(",".join(COLUMNS) + "\n" + ",".join(text if name == column else "" for name in COLUMNS) + "\n")
    with pytest.raises(PublishedDataError, match=message):
        read_training(path)


def test_reading_needs_no_torch_and_no_pandas() -> None:
    code = "import sys, hybridpar.published.memory; sys.exit('torch' in sys.modules or 'pandas' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
