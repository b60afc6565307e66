"""Optimizer state in host memory (ZeRO-Offload, Ren et al. 2021, arXiv 2101.06840).

Gradients go to the host, where the optimizer keeps its state and its own copy of the parameters; updated parameters
come back. On a CPU the host's memory is the device's, so there it costs the copies and saves nothing: what is measured
is the strategy's accounting, not its benefit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hybridpar.parallel.clip import local_tensor


class HostOptimizer:
    """An optimizer over host copies of `parameters` (plain, or local shards of DTensors)."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], build: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
    ) -> None:
        self._device = list(parameters)
        self.copies = [nn.Parameter(local_tensor(p.detach()).cpu().clone()) for p in self._device]
        self.inner = build(self.copies)

    @torch.no_grad()
    def step(self) -> None:
        """Gradients to the host, update, parameters to the device."""
        for parameter, copy in zip(self._device, self.copies, strict=True):
            copy.grad = None if parameter.grad is None else local_tensor(parameter.grad).cpu()
        self.inner.step()
        for parameter, copy in zip(self._device, self.copies, strict=True):
            local_tensor(parameter).copy_(copy)
            copy.grad = None

    @torch.no_grad()
    def copy_from_device(self) -> None:
        """Parameters on the device were changed by somebody else."""
        for parameter, copy in zip(self._device, self.copies, strict=True):
            copy.copy_(local_tensor(parameter))

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        """Forget the gradients on the device, or fill them with zeros."""
        for parameter in self._device:
            if set_to_none or parameter.grad is None:
                parameter.grad = None
            else:
                local_tensor(parameter.grad).zero_()

    def holds(self, parameter: nn.Parameter) -> bool:
        """Whether this optimizer updates a parameter."""
        return any(mine is parameter for mine in self._device)

    def state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """The state of one of the parameters on the device."""
        index = next(i for i, mine in enumerate(self._device) if mine is parameter)
        return self.inner.state[self.copies[index]]

    def on_host(self) -> tuple[Tensor, ...]:
        """What lives in host memory."""
        state = [value for values in self.inner.state.values() for value in values.values()]
        return (*(copy.detach() for copy in self.copies), *(t for t in state if isinstance(t, Tensor)))
