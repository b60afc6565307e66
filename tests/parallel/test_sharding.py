"""Which rank holds what, and that all shards together are the dense model: no rank is started here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybridpar.mesh import Coordinate, RankGrid
from hybridpar.models.init import dense_parameter
from hybridpar.parallel.layout import Layout, build_part, dense_shapes
from hybridpar.parallel.sharding import (
    has_partial_gradient,
    held_box,
    holder_of_stage,
    holders,
    is_expert,
    layers_of_stage,
    part,
    stages_of,
    tensor_dim,
)
from hybridpar.parity_layouts import SCHEDULES
from hybridpar.specs import Strategy
from tests.parallel.ranks import parity_run

WK = "blocks.0.attention.wk.weight"
ROUTER = "blocks.0.mlp.router.weight"
EXPERTS = "blocks.0.mlp.experts.w_down"


def _strategy(**given: Any) -> Strategy:
    return Strategy.model_validate(given)


def test_parts_of_a_dim_cover_it_and_the_first_take_what_is_left_over() -> None:
    assert [part(67, 4, index) for index in range(4)] == [slice(0, 17), slice(17, 34), slice(34, 51), slice(51, 67)]


@pytest.mark.parametrize(
    ("given", "layers"),
    [
        ({"pp": 4}, [[0, 1, 2], [3, 4], [5, 6], [7, 8]]),
        ({"pp": 2, "virtual": 2, "schedule": "interleaved"}, [[0, 1, 2], [3, 4], [5, 6], [7, 8]]),
        ({"pp": 3, "stage_layers": (1, 6, 2)}, [[0], [1, 2, 3, 4, 5, 6], [7, 8]]),
    ],
)
def test_layers_go_to_stages_in_order_and_as_evenly_as_can_be_unless_told_otherwise(
    given: dict[str, Any], layers: list[list[int]]
) -> None:
    model, strategy = parity_run("transformer").model, _strategy(**given)
    assert [list(layers_of_stage(model, strategy, stage)) for stage in range(strategy.stages)] == layers


@pytest.mark.parametrize(
    ("given", "stages"),
    [
        ({"pp": 3}, [(0,), (1,), (2,)]),
        ({"pp": 3, "schedule": "interleaved", "virtual": 2}, [(0, 3), (1, 4), (2, 5)]),
        ({"pp": 2, "schedule": "interleaved", "virtual": 3}, [(0, 2, 4), (1, 3, 5)]),
        ({"pp": 3, "schedule": "zb-v"}, [(0, 5), (1, 4), (2, 3)]),
        ({"pp": 3, "schedule": "dualpipe-v"}, [(0, 5), (1, 4), (2, 3)]),
    ],
)
def test_stages_come_back_in_a_loop_or_turn_round_in_a_v(given: dict[str, Any], stages: list[tuple[int, ...]]) -> None:
    strategy = _strategy(**given)
    assert [stages_of(strategy, rank) for rank in range(strategy.pp)] == stages


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_stage_has_one_holder(schedule: str) -> None:
    strategy = _strategy(pp=4, schedule=schedule)
    held = [stage for rank in range(strategy.pp) for stage in stages_of(strategy, rank)]
    assert sorted(held) == list(range(strategy.stages))
    assert all(stage in stages_of(strategy, holder_of_stage(strategy, stage)) for stage in held)


@pytest.mark.parametrize(
    ("name", "dim"),
    [
        ("blocks.0.attention.wq.weight", 0),
        ("blocks.0.attention.wo.weight", 1),
        ("blocks.0.mlp.w_down.weight", 1),
        ("blocks.0.mlp.shared.w_up.weight", 0),
        ("blocks.0.mlp.shared.w_down.weight", 1),
        ("blocks.0.mlp.experts.w_gate", 1),
        ("blocks.0.mlp.experts.w_up", 1),
        ("blocks.0.mlp.experts.w_down", 2),
        ("blocks.0.mlp.router.weight", None),
        ("blocks.0.mamba.A_log", 0),
        ("blocks.0.mamba.norm.weight", 0),
        ("blocks.0.norm.weight", None),
        ("norm.weight", None),
        ("embed.weight", 0),
        ("head.weight", 0),
    ],
)
def test_megatrons_split(name: str, dim: int | None) -> None:
    model = parity_run("hybrid").model
    assert tensor_dim(name, model, 2) == dim
    assert tensor_dim(name, model, 1) is None


def test_only_routed_experts_are_dealt_out() -> None:
    names = dense_shapes(parity_run("moe"))
    leaves = {name.split("mlp.")[-1] for name in names if is_expert(name)}
    assert leaves == {"experts.w_gate", "experts.w_up", "experts.w_down"}


def test_shared_b_and_c_are_whole_with_partial_gradients_and_grouped_ones_are_split() -> None:
    shared, grouped = parity_run("mamba2").model, parity_run("hybrid").model
    name = "blocks.0.mamba.w_B.weight"
    assert tensor_dim(name, shared, 2) is None
    assert has_partial_gradient(name, shared, 2, sequence_parallel=False)
    assert tensor_dim(name, grouped, 2) == 0
    assert not has_partial_gradient(name, grouped, 2, sequence_parallel=False)


@pytest.mark.parametrize(("tp", "same"), [(1, 1), (2, 1), (4, 2), (8, 4)])
def test_key_value_heads_fewer_than_ranks_are_held_by_neighbours_that_sum_their_gradients(tp: int, same: int) -> None:
    model = parity_run("transformer").model  # 2 key/value heads of 4
    assert holders(WK, model, tp) == same
    assert has_partial_gradient(WK, model, tp, sequence_parallel=False) == (same > 1)
    boxes = [held_box(WK, (8, 32), model, _strategy(tp=tp), Coordinate(0, 0, 0, rank))[0] for rank in range(tp)]
    assert boxes == [part(8, tp // same, rank // same) for rank in range(tp)]
    assert len(set(map(str, boxes))) == min(tp, model.kv_heads)


def test_what_is_split_has_one_holder_and_what_is_whole_has_them_all() -> None:
    model = parity_run("moe").model
    assert [holders(name, model, 4) for name in ("blocks.0.attention.wq.weight", EXPERTS, ROUTER)] == [1, 1, 4]


def test_a_router_sees_some_of_every_experts_width() -> None:
    model = parity_run("moe").model
    assert has_partial_gradient(ROUTER, model, 2, sequence_parallel=False)
    assert not has_partial_gradient(ROUTER, model, 1, sequence_parallel=False)
    assert not has_partial_gradient(EXPERTS, model, 2, sequence_parallel=True)


def test_norms_have_partial_gradients_only_on_shards_of_the_sequence() -> None:
    model = parity_run("transformer").model
    assert has_partial_gradient("norm.weight", model, 2, sequence_parallel=True)
    assert not has_partial_gradient("norm.weight", model, 2, sequence_parallel=False)
    assert not has_partial_gradient("norm.weight", model, 1, sequence_parallel=True)


def test_experts_are_dealt_out_again_to_every_block_of_replicas_and_split_by_width_within() -> None:
    model, strategy = parity_run("moe").model, _strategy(dp=4, ep=2, tp=2)
    boxes = {
        (dp, tp): held_box(EXPERTS, (5, 32, 24), model, strategy, Coordinate(0, dp, 0, tp))
        for dp in range(4)
        for tp in range(2)
    }
    for (dp, tp), box in boxes.items():
        assert box == (slice(0, 3) if dp % 2 == 0 else slice(3, 5), slice(0, 32), part(24, 2, tp))


def test_a_rank_that_shares_nothing_holds_whole_parameters() -> None:
    model = parity_run("moe").model
    coordinate = Coordinate(1, 1, 1, 0)
    for name, shape in dense_shapes(parity_run("moe")).items():
        box = held_box(name, shape, model, _strategy(dp=2, pp=2, cp=2), coordinate)
        assert box == tuple(slice(0, length) for length in shape), name


@pytest.mark.parametrize(
    ("family", "given"),
    [
        ("transformer", {"tp": 4, "pp": 2}),
        ("mamba2", {"tp": 4, "pp": 2, "schedule": "zb-v"}),
        ("hybrid", {"tp": 4, "pp": 2, "schedule": "interleaved", "cp": 2}),
        ("moe", {"tp": 4, "dp": 4, "ep": 2, "pp": 2, "stage_layers": (2, 7)}),
    ],
)
def test_all_shards_together_are_the_dense_model(family: str, given: dict[str, Any]) -> None:
    """Every entry of every parameter is held as often as there are ranks over its own shards, with its dense value."""
    run = parity_run(family, **given)
    strategy, grid = run.strategy, RankGrid.of(run.strategy)
    shapes = dense_shapes(run)
    times = {name: torch.zeros(shape) for name, shape in shapes.items()}
    for rank in range(grid.size):
        layout = Layout(run, grid.coordinate(rank))
        for stage in stages_of(strategy, layout.coordinate.pp):
            for name, held in build_part(layout, torch.device("cpu"), stage).named_parameters():
                box = layout.box(name, shapes[name])
                assert torch.equal(held, dense_parameter(name, shapes[name], run.model, run.seed)[box]), name
                times[name][box] += 1
    for name, count in times.items():
        replicas = strategy.dp * strategy.cp * holders(name, run.model, strategy.tp)
        assert torch.equal(count, torch.full_like(count, replicas / (strategy.ep if is_expert(name) else 1))), name
