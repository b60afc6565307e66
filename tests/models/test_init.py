"""Initial parameters depend on seed, name and shape alone, and have the scales they are said to have."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from hybridpar.models.init import dense_parameter, initialise
from hybridpar.models.lm import LanguageModel
from hybridpar.specs import ModelSpec

HYBRID = ModelSpec.model_validate({"preset": "hybrid-toy"})


def _parameters(seed: int) -> dict[str, torch.Tensor]:
    model = LanguageModel(HYBRID).double()
    initialise(model, HYBRID, seed)
    return dict(model.named_parameters())


def test_the_same_seed_gives_the_same_parameters() -> None:
    for (name, first), second in zip(_parameters(7).items(), _parameters(7).values(), strict=True):
        assert torch.equal(first, second), name


def test_neither_the_global_generator_nor_the_order_of_creation_matters() -> None:
    torch.manual_seed(123)
    expected = dense_parameter("blocks.0.mamba.w_x.weight", (8, 4), HYBRID, 0)
    before = torch.random.get_rng_state()
    dense_parameter("embed.weight", (5, 5), HYBRID, 0)
    assert torch.equal(dense_parameter("blocks.0.mamba.w_x.weight", (8, 4), HYBRID, 0), expected)
    assert torch.equal(torch.random.get_rng_state(), before), "the global generator is left alone"


@pytest.mark.parametrize("name", ["blocks.0.mamba.w_x.weight", "blocks.0.mamba.A_log", "embed.weight"])
def test_another_seed_or_name_gives_other_values(name: str) -> None:
    values = dense_parameter(name, (64,), HYBRID, 0)
    assert not torch.equal(values, dense_parameter(name, (64,), HYBRID, 1))
    assert not torch.equal(values, dense_parameter("blocks.2." + name, (64,), HYBRID, 0))


def test_every_parameter_of_a_model_is_filled_by_its_name() -> None:
    model = LanguageModel(HYBRID).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    initialise(model, HYBRID, 3)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, dense_parameter(name, parameter.shape, HYBRID, 3)), name


def test_a_part_filled_under_its_prefix_equals_the_same_part_of_the_whole() -> None:
    whole, part = _parameters(3), LanguageModel(HYBRID).double().blocks["1"]
    initialise(part, HYBRID, 3, prefix="blocks.1.")
    for name, parameter in part.named_parameters():
        assert torch.equal(parameter, whole[f"blocks.1.{name}"]), name


def test_float32_parameters_are_the_rounded_float64_ones() -> None:
    model = LanguageModel(HYBRID)
    initialise(model, HYBRID, 3)
    for name, exact in _parameters(3).items():
        assert torch.equal(dict(model.named_parameters())[name], exact.float()), name


@pytest.mark.parametrize(
    ("name", "deviation"),
    [
        ("embed.weight", 0.02),
        ("head.weight", 0.02),
        ("blocks.0.attention.wq.weight", 0.02),
        ("blocks.0.attention.wo.weight", 0.02 / math.sqrt(2 * HYBRID.layers)),
        ("blocks.0.mlp.w_down.weight", 0.02 / math.sqrt(2 * HYBRID.layers)),
        ("blocks.0.mamba.w_out.weight", 0.02 / math.sqrt(2 * HYBRID.layers)),
    ],
)
def test_matrices_are_normal_and_those_into_the_residual_stream_smaller(name: str, deviation: float) -> None:
    weight = dense_parameter(name, (256, 256), HYBRID, 0)
    assert weight.mean().abs() < deviation / 20
    assert weight.std().item() == pytest.approx(deviation, rel=0.02)


def test_decay_rates_and_step_sizes_cover_the_ranges_of_mamba_2() -> None:
    decay = dense_parameter("blocks.0.mamba.A_log", (4096,), HYBRID, 0).exp()
    step = functional.softplus(dense_parameter("blocks.0.mamba.dt_bias", (4096,), HYBRID, 0))
    assert 1 <= decay.min() < 1.1
    assert 15.9 < decay.max() <= 16
    assert decay.mean().item() == pytest.approx(8.5, rel=0.03)
    assert 1e-3 <= step.min().item() * (1 + 1e-9) < 1.1e-3
    assert 0.09 < step.max().item() <= 0.1 * (1 + 1e-9)
    assert step.log().mean().item() == pytest.approx((math.log(1e-3) + math.log(0.1)) / 2, rel=0.03)


def test_norms_and_skips_start_at_one_biases_at_zero() -> None:
    for name, parameter in _parameters(0).items():
        if ".norm" in f".{name}" or name.endswith(".D"):
            assert (parameter == 1).all(), name
        if name.endswith(".bias"):
            assert (parameter == 0).all(), name
