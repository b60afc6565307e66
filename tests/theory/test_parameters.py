"""Parameters in closed form against the program's and against what is published of public models."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hybridpar.mesh import RankGrid
from hybridpar.parallel.layout import Layout, build_part, dense_shapes
from hybridpar.parallel.sharding import stages_of
from hybridpar.parity_layouts import parity_run, torch_layouts
from hybridpar.specs import RunSpec, parse_run_spec
from hybridpar.theory.parameters import held_parameters, parameter_count, parameter_shapes

FAMILIES = ("transformer", "mamba2", "hybrid", "moe")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("model", [{}, {"tied_embeddings": True}, {"vocab": 3}])
def test_names_order_and_shapes_are_those_of_the_program(family: str, model: dict) -> None:
    run = parity_run(family, {}, model=model)
    assert list(parameter_shapes(run.model).items()) == [(n, tuple(s)) for n, s in dense_shapes(run).items()]


@pytest.mark.parametrize(
    ("preset", "published"),
    [("llama-3-8b", 8_030_261_248), ("llama-3-70b", 70_553_706_496), ("mixtral-8x7b", 46_702_792_704)],
)
def test_public_models_have_the_published_number(preset: str, published: int) -> None:
    """As their model cards and safetensors indices count them."""
    assert parameter_count(parse_run_spec({"model": {"preset": preset}}).model) == published


def _parts(run: RunSpec, rank: int) -> dict[str, tuple[int, ...]]:
    import torch

    coordinate = RankGrid.of(run.strategy).coordinate(rank)
    found = {}
    for stage in stages_of(run.strategy, coordinate.pp):
        lm = build_part(Layout(run, coordinate), torch.device("cpu"), stage)
        found |= {name: tuple(p.shape) for name, p in lm.named_parameters()}
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_every_rank_of_every_layout_holds_what_the_form_says(family: str) -> None:
    kinds = {}
    for layout in torch_layouts(family, largest=8):  # what decides who holds what
        run = parity_run(family, layout)
        s = run.strategy
        kinds.setdefault((s.tp, s.pp, s.dp, s.ep, s.stages, s.schedule), run)
    compared = 0
    for run in kinds.values():
        grid = RankGrid.of(run.strategy)
        for rank in {0, grid.size // 2, grid.size - 1}:
            held = held_parameters(run.model, run.strategy, grid.coordinate(rank))
            assert {one.name: one.shape for one in held} == _parts(run, rank), run.strategy.label
            compared += 1
    assert compared > 30


def test_the_forms_need_no_torch() -> None:
    code = "import sys, hybridpar.theory.parameters, hybridpar.theory.traffic; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
