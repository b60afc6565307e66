"""Medians with spread, decided winners, shares, rank correlation: on studies small enough to work out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from hybridpar.artifacts import comparison
from hybridpar.artifacts.comparison import Spread, spearman, winners
from hybridpar.artifacts.inputs import Study


def _cells(*rows: tuple[str, float, float, float]) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {
                "family": "transformer",
                "size": "small",
                "model": "m",
                "world": 2,
                "kind": "data",
                "strategy": name,
                "method": name,
                "steps": 3,
                "mfu": 0.3,
                "run_ids": (name,),
                "tokens_low": low,
                "tokens_per_s": median,
                "tokens_high": high,
            }
            for name, low, median, high in rows
        ]
    )


def test_a_spread_holds_median_range_and_count() -> None:
    assert Spread.of([3.0, 1.0, 2.0, 10.0]) == Spread(2.5, 1.0, 10.0, 4)


def test_a_spread_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one value"):
        Spread.of([])


def test_the_winner_has_the_highest_median_and_is_decided_where_ranges_are_apart() -> None:
    (row,) = winners(_cells(("a", 8, 9, 10), ("b", 11, 12, 13), ("c", 1, 2, 30))).to_dict("records")

    assert (row["strategy"], row["runner_up"], row["compared"]) == ("b", "a", 3)
    assert row["lead"] == pytest.approx(12 / 9)
    assert row["decided"]


def test_overlapping_ranges_leave_the_winner_undecided() -> None:
    (row,) = winners(_cells(("a", 8, 9, 11.5), ("b", 11, 12, 13))).to_dict("records")

    assert row["strategy"] == "b"
    assert not row["decided"]


def test_a_strategy_alone_wins_nothing() -> None:
    assert winners(_cells(("a", 8, 9, 10))).empty


@pytest.mark.parametrize(
    ("first", "second", "rho"),
    [([1, 2, 3], [10, 20, 30], 1.0), ([1, 2, 3], [3, 2, 1], -1.0), ([1, 2, 3, 4], [2, 1, 4, 3], 0.6)],
)
def test_spearman_of_rankings_known_by_hand(first: list[float], second: list[float], rho: float) -> None:
    assert spearman(first, second) == pytest.approx(rho)


def test_spearman_of_a_constant_is_undefined() -> None:
    assert np.isnan(spearman([1, 1, 1], [1, 2, 3]))


def test_a_cell_pools_the_timed_steps_of_its_repeats(full: Study) -> None:
    table = comparison.cells(full)
    (cell,) = table[(table["model"] == "llama-medium") & (table["strategy"] == "tp2")].to_dict("records")
    steps = full.steps[full.steps["run_id"].isin(cell["run_ids"]) & ~full.steps["warmup"]]
    seconds = steps["seconds"]

    assert cell["runs"] == 2
    assert cell["steps"] == len(seconds) == 8
    assert cell["tokens_per_s"] == pytest.approx(np.median(8 * 64 / seconds))
    assert cell["tokens_low"] == pytest.approx(8 * 64 / seconds.max())
    assert cell["tokens_high"] == pytest.approx(8 * 64 / seconds.min())


def test_the_fastest_cell_of_a_model_and_ranks_is_the_measure_of_the_others(full: Study) -> None:
    best = comparison.cells(full).groupby(["model", "world"])["relative"].max()

    assert (best == 1).all()


def test_communication_share_is_blocked_time_over_the_step(small: Study) -> None:
    run = small.finished[small.finished["strategy"] == "dp2"]["run_id"].iloc[0]
    blocked = small.collectives[small.collectives["run_id"] == run]["exposed_seconds"].sum()
    step = small.steps[(small.steps["run_id"] == run) & ~small.steps["warmup"]]["seconds"].median()
    shares = comparison.communication(small).set_index("run_id")

    assert shares.loc[run, "comm_share"] == pytest.approx(blocked / step)
    assert shares.loc[run, "wire_mb"] == pytest.approx(1.5)


def test_one_device_communicates_nothing(lone: Study) -> None:
    assert (comparison.communication(lone)[["wire_mb", "comm_share"]] == 0).all(axis=None)


def test_losses_are_compared_step_by_step_with_one_device(small: Study) -> None:
    runs = comparison.loss_deviations(small).set_index(["model", "strategy"])

    assert runs.loc[("llama-small", "tp4"), "deviation"] == pytest.approx(3e-7, rel=1e-3)
    assert runs.loc[("llama-small", "dp4"), "deviation"] == 0
    assert (runs["steps"] == 6).all()
    assert "one-device" not in runs.index.get_level_values("strategy")


def test_engines_are_paired_by_what_they_do(full: Study) -> None:
    pairs = comparison.engine_pairs(full)
    named = set(pairs[["method_t", "method_d"]].itertuples(index=False, name=None))

    assert ("DDP", "DeepSpeed ZeRO-0") in named
    assert ("FSDP2 resharding", "DeepSpeed ZeRO-3") in named
    assert ("ZeRO-1 × PP 1F1B", "DeepSpeed ZeRO-1 × PP 1F1B") in named
    assert not any(method == "PP GPipe" for method, _ in named)


def test_families_with_the_same_times_rank_alike(small: Study) -> None:
    shared = small.trained.groupby(["strategy", "family"])["run_id"].first().unstack().dropna()
    transformer = small.steps.set_index(["run_id", "step"])["seconds"].to_dict()
    twin = dict(zip(shared["mamba2"], shared["transformer"], strict=True))
    seconds = [
        transformer[(twin.get(run, run), step)] for run, step in small.steps[["run_id", "step"]].itertuples(index=False)
    ]
    table = comparison.family_correlations(replace(small, steps=small.steps.assign(seconds=seconds)))

    assert (table["rho"] > 0.999).all()
    assert table["same_winner"].all()


def test_the_interval_of_a_correlation_repeats_and_holds_it(full: Study) -> None:
    first, second = (comparison.family_correlations(full) for _ in range(2))

    pd.testing.assert_frame_equal(first, second)
    assert (first["rho_low"] <= first["rho_high"]).all()
    assert first["rho"].between(-1, 1).all()
