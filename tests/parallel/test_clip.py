"""Clipping on one rank is torch's own; that the norm is the true one over ranks is seen by comparing layouts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hybridpar.parallel.clip import clip_gradients


def _parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    parameters = {name: nn.Parameter(torch.zeros(3, 2, dtype=torch.float64)) for name in "abc"}
    for parameter in list(parameters.values())[:2]:
        parameter.grad = torch.randn(3, 2, dtype=torch.float64, generator=generator)
    return parameters


@pytest.mark.parametrize("largest", [0.5, 100.0])
def test_one_rank_clips_as_torch_does(largest: float) -> None:
    ours, theirs = _parameters(), _parameters()
    expected = nn.utils.clip_grad_norm_(theirs.values(), largest).item()
    assert clip_gradients(ours, frozenset(), [], largest) == pytest.approx(expected, rel=1e-12)
    for name in "ab":
        torch.testing.assert_close(ours[name].grad, theirs[name].grad, rtol=1e-12, atol=0)


def test_zero_switches_clipping_off_and_still_reports_the_norm() -> None:
    ours, untouched = _parameters(), _parameters()
    assert clip_gradients(ours, frozenset(), [], 0.0) > 0.5
    assert torch.equal(ours["a"].grad, untouched["a"].grad)


def test_a_gradient_counted_elsewhere_is_scaled_but_not_counted() -> None:
    ours, alone = _parameters(), _parameters()
    norm = clip_gradients(ours, frozenset("b"), [], 0.5)
    assert norm == pytest.approx(alone["a"].grad.norm().item(), rel=1e-12)
    torch.testing.assert_close(ours["b"].grad, alone["b"].grad * (0.5 / (norm + 1e-6)), rtol=1e-12, atol=0)
