"""Recomputation: the same gradients, less kept, everything made again once, also where a backward pass is in parts."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from hybridpar.parallel.recompute import recomputing, saves_less


class _Block(torch.nn.Module):
    """x (T, 4) -> x + relu(x W1) W2, counting how often it runs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(4, 8, bias=False, dtype=torch.float64)
        self.second = torch.nn.Linear(8, 4, bias=False, dtype=torch.float64)
        self.runs: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.runs.append(recomputing())
        return x + self.second(torch.relu(self.first(x)))


def _input() -> Tensor:
    return torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4).requires_grad_()


def _gradients(block: _Block, function: Callable[[Tensor], Tensor]) -> list[Tensor]:
    x = _input()
    block.zero_grad()
    function(x).square().sum().backward()
    return [t.grad.clone() for t in (x, block.first.weight, block.second.weight) if t.grad is not None]


def test_gradients_are_those_without() -> None:
    block = _Block()
    expected = _gradients(block, block)
    found = _gradients(block, lambda x: saves_less(block, x))
    assert len(found) == 3
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert block.runs == [False, False, True]


def test_a_backward_pass_in_parts_runs_a_block_again_once() -> None:
    block = _Block()
    whole = _gradients(block, block)
    x = _input()
    block.zero_grad()
    block.runs.clear()
    loss = saves_less(block, x).square().sum()
    inputs, groups = stage_backward_input([loss], None, [x], block.parameters())
    stage_backward_weight(block.parameters(), groups)
    assert block.runs == [False, True]
    found = [inputs[0], block.first.weight.grad, block.second.weight.grad]
    assert all(torch.equal(a, b) for a, b in zip(whole, found, strict=True))


def test_two_backward_passes_over_one_graph_run_it_again_once() -> None:
    block, x = _Block(), _input()
    out = saves_less(block, x).sum()
    first = torch.autograd.grad(out, x, retain_graph=True)[0]
    second = torch.autograd.grad(out, x)[0]
    assert torch.equal(first, second)
    assert block.runs == [False, True]


def test_what_was_made_again_goes_with_the_graph() -> None:
    made: list[weakref.ref[torch.UntypedStorage]] = []

    def function(x: Tensor) -> Tensor:
        wide = torch.exp(x)
        made.append(weakref.ref(wide.untyped_storage()))
        return wide * wide

    x = _input()
    saves_less(function, x).sum().backward()
    gc.collect()
    assert len(made) == 2
    assert [reference() for reference in made] == [None, None]


def test_without_gradients_nothing_is_kept_and_nothing_runs_again() -> None:
    block = _Block()
    with torch.no_grad():
        out = saves_less(block, _input())
    assert out.grad_fn is None
    assert block.runs == [False]


def test_arguments_that_are_no_tensors_arrive() -> None:
    x = _input()
    out = saves_less(lambda t, power: t.pow(power), x, 3)
    out.sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, 3 * x.detach() ** 2)


def test_a_function_that_does_otherwise_the_second_time_is_refused() -> None:
    widths = iter((2, 3))

    def function(x: Tensor) -> Tensor:
        return torch.exp(x[:, : next(widths)]).sum() * x.sum()

    with pytest.raises(RuntimeError, match=r"a recomputation saved \(3, 3\) .* where its forward pass saved \(3, 2\)"):
        saves_less(function, _input()).backward()


def test_a_function_that_saves_less_the_second_time_is_refused() -> None:
    rounds = iter((2, 1))

    def function(x: Tensor) -> Tensor:
        for _ in range(next(rounds)):
            x = torch.exp(x)
        return x

    with pytest.raises(RuntimeError, match="saved 1 tensors where its forward pass saved more"):
        saves_less(function, _input()).sum().backward()
