"""An optimizer in host memory: the same updates, its state where it is said to be."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from hybridpar.parallel.offload import HostOptimizer

_BUILDS = {
    "adamw": partial(torch.optim.AdamW, lr=0.1, weight_decay=0.01),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "sgd": partial(torch.optim.SGD, lr=0.1),
}


def _parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, dtype=torch.float64, generator=generator)) for shape in ((3, 4), (5,))]


def _gradients(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(10 + step)
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in ((3, 4), (5,))]


@pytest.mark.parametrize("build", _BUILDS.values(), ids=_BUILDS)
def test_updates_are_those_of_the_optimizer_on_the_device(build: partial[torch.optim.Optimizer]) -> None:
    away, here = _parameters(), _parameters()
    offloaded, plain = HostOptimizer(away, build), build(here)
    for step in range(3):
        for ours, theirs, gradient in zip(away, here, _gradients(step), strict=True):
            ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        offloaded.step()
        plain.step()
        offloaded.zero_grad()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(away, here, strict=True))
    assert all(parameter.grad is None for parameter in away)


def test_a_parameter_without_a_gradient_stays() -> None:
    parameters = _parameters()
    before = [parameter.detach().clone() for parameter in parameters]
    offloaded = HostOptimizer(parameters, _BUILDS["adamw"])
    parameters[0].grad = _gradients(0)[0]
    offloaded.step()
    assert not torch.equal(parameters[0], before[0])
    assert torch.equal(parameters[1], before[1])


def test_the_host_holds_a_copy_and_the_state_of_every_parameter() -> None:
    parameters = _parameters()
    offloaded = HostOptimizer(parameters, _BUILDS["adamw"])
    for parameter, gradient in zip(parameters, _gradients(0), strict=True):
        parameter.grad = gradient
    offloaded.step()
    elements = sum(parameter.numel() for parameter in parameters)
    moments = [t for t in offloaded.on_host() if t.dim() and t.dtype == torch.float64]
    assert sum(t.numel() for t in moments) == 3 * elements  # copy, mean, variance
    assert offloaded.holds(parameters[1])
    assert not offloaded.holds(nn.Parameter(torch.zeros(1)))
    assert set(offloaded.state_of(parameters[0])) == {"step", "exp_avg", "exp_avg_sq"}


def test_parameters_that_somebody_else_changed_are_read_again() -> None:
    parameters = _parameters()
    offloaded = HostOptimizer(parameters, _BUILDS["sgd"])
    with torch.no_grad():
        parameters[0].fill_(7.0)
    offloaded.copy_from_device()
    offloaded.step()
    assert torch.equal(parameters[0], torch.full_like(parameters[0], 7.0))
