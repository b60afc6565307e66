"""Clipping on one rank is torch's own; that the norm is the true one over ranks is seen by comparing layouts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hybridpar.parallel.clip import Disjoint, global_norm, scale_to_norm

_CPU = torch.device("cpu")


def _gradients() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, 2, dtype=torch.float64, generator=generator) for _ in range(3)]


@pytest.mark.parametrize("largest", [0.5, 100.0])
def test_one_rank_clips_as_torch_does(largest: float) -> None:
    ours, theirs = _gradients(), [nn.Parameter(torch.zeros(3, 2, dtype=torch.float64)) for _ in range(3)]
    for parameter, grad in zip(theirs, _gradients(), strict=True):
        parameter.grad = grad
    expected = nn.utils.clip_grad_norm_(theirs, largest).item()
    norm = global_norm([Disjoint(ours, [])], [], _CPU)
    scale_to_norm(ours, norm, largest)
    assert norm == pytest.approx(expected, rel=1e-12)
    for mine, parameter in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, parameter.grad, rtol=1e-12, atol=0)


def test_kinds_of_gradients_add_up() -> None:
    whole = global_norm([Disjoint(_gradients(), [])], [], _CPU)
    in_kinds = global_norm([Disjoint(_gradients()[:1], []), Disjoint(_gradients()[1:], [])], [], _CPU)
    assert in_kinds == pytest.approx(whole, rel=1e-12)


def test_zero_switches_clipping_off() -> None:
    ours = _gradients()
    scale_to_norm(ours, 5.0, 0.0)
    assert torch.equal(ours[0], _gradients()[0])


def test_a_rank_without_gradients_has_a_norm_of_zero() -> None:
    assert global_norm([Disjoint([], [])], [], _CPU) == 0.0
    scale_to_norm([], 0.0, 0.5)
