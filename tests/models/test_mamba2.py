"""Mamba-2: the chunked form is the recurrence, whatever the chunk; the mixer is that of the published code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hybridpar.models.init import initialise
from hybridpar.models.lm import LanguageModel
from hybridpar.models.mamba2 import GatedRMSNorm, causal_convolution, segment_decay, ssd
from hybridpar.specs import ModelSpec
from tests.models.transformers_twin import twin_of


def _recurrence(x: Tensor, dt: Tensor, log_a: Tensor, b_in: Tensor, c_out: Tensor) -> Tensor:
    """h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t^T; y_t = C_t^T h_t; token by token, head by head."""
    batch, length, heads, width = x.shape
    groups, state = b_in.shape[-2:]
    y = torch.zeros_like(x)
    for head in range(heads):
        group = head // (heads // groups)
        h = torch.zeros(batch, state, width, dtype=x.dtype)
        for t in range(length):
            decay = torch.exp(dt[:, t, head] * log_a[head])[:, None, None]
            outer = b_in[:, t, group, :, None] * x[:, t, head, None, :]
            h = decay * h + dt[:, t, head, None, None] * outer
            y[:, t, head] = (c_out[:, t, group, :, None] * h).sum(1)
    return y


def _ssd_inputs(length: int, heads: int = 4, groups: int = 2) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(length)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    x, b_in, c_out = draw(2, length, heads, 5), draw(2, length, groups, 3), draw(2, length, groups, 3)
    return x, functional.softplus(draw(2, length, heads)), -draw(heads).exp(), b_in, c_out


@pytest.mark.parametrize("chunk", [1, 2, 4, 7, 16, 64])
@pytest.mark.parametrize("length", [1, 7, 16, 29])
def test_the_chunked_form_equals_the_recurrence(length: int, chunk: int) -> None:
    inputs = _ssd_inputs(length)
    torch.testing.assert_close(ssd(*inputs, chunk), _recurrence(*inputs), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("chunk", [4, 5, 32])
def test_so_do_its_gradients(chunk: int) -> None:
    inputs = [t.requires_grad_() for t in _ssd_inputs(13)]
    weights = torch.linspace(-1, 1, inputs[0].numel(), dtype=torch.float64).view(inputs[0].shape)
    chunked = torch.autograd.grad((ssd(*inputs, chunk) * weights).sum(), inputs)
    plain = torch.autograd.grad((_recurrence(*inputs) * weights).sum(), inputs)
    torch.testing.assert_close(chunked, plain, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_heads_of_a_group_share_its_b_and_c(groups: int) -> None:
    inputs = _ssd_inputs(11, groups=groups)
    torch.testing.assert_close(ssd(*inputs, 4), _recurrence(*inputs), rtol=1e-11, atol=1e-11)


def test_strong_decay_over_a_long_chunk_stays_finite() -> None:
    x, dt, log_a, b_in, c_out = (t.float() for t in _ssd_inputs(256))
    inputs = [t.requires_grad_() for t in (x, dt * 10, log_a * 16, b_in, c_out)]
    y = ssd(*inputs, 256)
    assert y.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(y.sum(), inputs))


def test_segment_decay_multiplies_the_steps_between() -> None:
    a = torch.tensor([0.5, 0.25, 0.1], dtype=torch.float64)
    expected = torch.tensor([[1, 0, 0], [0.25, 1, 0], [0.025, 0.1, 1]], dtype=torch.float64)
    torch.testing.assert_close(segment_decay(a.log()), expected)


def test_the_last_tap_of_the_convolution_is_the_current_token() -> None:
    x = torch.arange(1.0, 6.0, dtype=torch.float64).view(1, 5, 1)
    weight = torch.tensor([[[100.0, 10.0, 1.0]]], dtype=torch.float64)
    out = causal_convolution(x, weight, torch.tensor([0.5], dtype=torch.float64))
    assert out.flatten().tolist() == [1.5, 12.5, 123.5, 234.5, 345.5]


@pytest.mark.parametrize("groups", [1, 2])
def test_the_gated_norm_divides_each_group_by_its_root_mean_square(groups: int) -> None:
    torch.manual_seed(0)
    norm = GatedRMSNorm(6, groups, eps=1e-5).double()
    torch.nn.init.uniform_(norm.weight)
    y, z = torch.randn(2, 3, 6, dtype=torch.float64), torch.randn(2, 3, 6, dtype=torch.float64)
    gated = y * z / (1 + torch.exp(-z))
    width = 6 // groups
    for group in range(groups):
        part = slice(group * width, (group + 1) * width)
        mean = (gated[..., part] ** 2).sum(-1, keepdim=True) / width
        expected = norm.weight[part] * gated[..., part] / (mean + 1e-5).sqrt()
        torch.testing.assert_close(norm(y, z)[..., part], expected)


@pytest.mark.parametrize("length", [16, 41])
@pytest.mark.parametrize("options", [{}, {"tied_embeddings": True}, {"ssm_groups": 4}], ids=["plain", "tied", "groups"])
def test_logits_are_those_of_transformers_with_the_same_weights(length: int, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = ModelSpec.model_validate({"preset": "mamba2-toy", "layers": 2, **options})
    ours = LanguageModel(model)
    initialise(ours, model, seed=3)
    with torch.no_grad():  # biases and norms that are not neutral, so that a misplaced one shows
        for name, p in ours.named_parameters():
            if name.endswith(("bias", "norm.weight", "D")):
                p.add_(torch.randn_like(p) * 0.3)
    tokens = torch.randint(model.vocab, (2, length))
    with torch.no_grad():
        expected = twin_of(ours, model)(tokens, use_cache=False).logits
        torch.testing.assert_close(ours(tokens), expected, rtol=1e-4, atol=1e-5)
