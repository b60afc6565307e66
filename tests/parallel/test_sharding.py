"""Which rank holds what, and that all shards together are the dense model: no rank is started here."""

from __future__ import annotations

import pytest
import torch

from hybridpar.mesh import RankGrid
from hybridpar.models.init import dense_parameter
from hybridpar.parallel.layout import Layout, build_part, dense_shapes
from hybridpar.parallel.sharding import has_partial_gradient, names_on_stage, part, stage_layers, tensor_dim
from tests.parallel.ranks import parity_run


def test_parts_of_a_dim_cover_it_and_the_first_take_what_is_left_over() -> None:
    assert [part(67, 4, index) for index in range(4)] == [slice(0, 17), slice(17, 34), slice(34, 51), slice(51, 67)]


def test_earlier_stages_take_the_layers_that_do_not_divide() -> None:
    assert [list(stage_layers(5, 3, stage)) for stage in range(3)] == [[0, 1], [2, 3], [4]]


def test_every_parameter_is_on_one_stage() -> None:
    names = ["embed.weight", "blocks.0.a", "blocks.1.a", "blocks.10.a", "norm.weight", "head.weight"]
    assert names_on_stage(names, 11, 2, 0) == ["embed.weight", "blocks.0.a", "blocks.1.a"]
    assert names_on_stage(names, 11, 2, 1) == ["blocks.10.a", "norm.weight", "head.weight"]


@pytest.mark.parametrize(
    ("name", "dim"),
    [
        ("blocks.0.attention.wq.weight", 0),
        ("blocks.0.attention.wo.weight", 1),
        ("blocks.0.mlp.w_down.weight", 1),
        ("blocks.0.mamba.A_log", 0),
        ("blocks.0.mamba.norm.weight", 0),
        ("blocks.0.norm.weight", None),
        ("norm.weight", None),
        ("embed.weight", 0),
    ],
)
def test_megatrons_split(name: str, dim: int | None) -> None:
    model = parity_run("hybrid").model
    assert tensor_dim(name, model, 2) == dim
    assert tensor_dim(name, model, 1) is None


def test_shared_b_and_c_are_whole_with_partial_gradients_and_grouped_ones_are_split() -> None:
    shared, grouped = parity_run("mamba2").model, parity_run("hybrid").model
    name = "blocks.0.mamba.w_B.weight"
    assert tensor_dim(name, shared, 2) is None
    assert has_partial_gradient(name, shared, 2, sequence_parallel=False)
    assert tensor_dim(name, grouped, 2) == 0
    assert not has_partial_gradient(name, grouped, 2, sequence_parallel=False)


def test_norms_have_partial_gradients_only_on_shards_of_the_sequence() -> None:
    model = parity_run("transformer").model
    assert has_partial_gradient("norm.weight", model, 2, sequence_parallel=True)
    assert not has_partial_gradient("norm.weight", model, 2, sequence_parallel=False)


@pytest.mark.parametrize("family", ["transformer", "mamba2", "hybrid"])
def test_all_shards_together_are_the_dense_model(family: str) -> None:
    run = parity_run(family, tp=4, pp=2)
    grid = RankGrid.of(run.strategy)
    parts = [build_part(Layout(run, grid.coordinate(rank)), torch.device("cpu")) for rank in range(grid.size)]
    held = [dict(lm.named_parameters()) for lm in parts]
    for name, shape in dense_shapes(run).items():
        slices = [tensors[name] for tensors in held if name in tensors]
        dim = tensor_dim(name, run.model, run.strategy.tp)
        whole = slices[0] if dim is None else torch.cat(slices, dim)
        assert len(slices) == run.strategy.tp, name
        assert torch.equal(whole, dense_parameter(name, shape, run.model, run.seed)), name
