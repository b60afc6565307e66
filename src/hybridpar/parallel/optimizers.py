"""One rank's optimizers: dense parameters and dealt-out experts apart, whole, sharded over replicas, or on the host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from hybridpar.parallel.clip import local_tensor
from hybridpar.parallel.offload import HostOptimizer
from hybridpar.parallel.replicas import Replicas
from hybridpar.parallel.zero import build_optimizer
from hybridpar.specs import RunSpec


class Optimizers:
    """Updates all of a rank's parameters."""

    def __init__(self, run: RunSpec, replicas: Replicas, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = dict(parameters)
        self._run = run
        dense = [p for name, p in parameters.items() if not replicas.is_apart(name)]
        experts = [p for name, p in parameters.items() if replicas.is_apart(name)]
        sharded = run.strategy.zero == 1
        self._parts: list[torch.optim.Optimizer | HostOptimizer] = []
        if dense:
            self._parts.append(self._build(dense, replicas.group if sharded else None))
        if experts:
            across = replicas.across_ep
            self._parts.append(self._build(experts, across if sharded and across and across.size() > 1 else None))

    def step(self) -> None:
        """Update from the gradients."""
        for part in self._parts:
            part.step()

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Forget the gradients, or fill them with zeros where they are."""
        for part in self._parts:
            part.zero_grad(set_to_none=set_to_none)

    def on_device(self) -> tuple[Tensor, ...]:
        """State in the memory of the device."""
        inner = [_inner(part) for part in self._parts if not isinstance(part, HostOptimizer)]
        values = [value for part in inner for state in part.state.values() for value in state.values()]
        return tuple(local_tensor(value) for value in values if isinstance(value, Tensor))

    def on_host(self) -> tuple[Tensor, ...]:
        """State, and copies of parameters, in the memory of the host."""
        return tuple(t for part in self._parts if isinstance(part, HostOptimizer) for t in part.on_host())

    def state(self) -> dict[str, dict[str, Any]]:
        """What is kept of each parameter, by name; tensors live. Parameters that another rank updates are left out."""
        found = {name: self._state_of(parameter) for name, parameter in self._parameters.items()}
        return {name: state for name, state in found.items() if state}

    @torch.no_grad()
    def prepare_state(self) -> None:
        """Make the state that a first step would make, so that there is something to load into."""
        for part in self._parts:
            for parameter, state in _updated(part):
                if self._run.workload.optimizer == "adamw" and not state:
                    state["step"] = torch.zeros((), dtype=torch.float32)
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)

    def adopt_parameters(self) -> None:
        """Parameters were changed from outside: copies that are kept of them follow."""
        for part in self._parts:
            if isinstance(part, HostOptimizer):
                part.copy_from_device()

    def _build(
        self, parameters: Sequence[nn.Parameter], shard_over: torch.distributed.ProcessGroup | None
    ) -> torch.optim.Optimizer | HostOptimizer:
        build = partial(build_optimizer, workload=self._run.workload, shard_over=shard_over)
        return HostOptimizer(parameters, build) if self._run.strategy.offload == "optimizer" else build(parameters)

    def _state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        for part in self._parts:
            if isinstance(part, HostOptimizer):
                if part.holds(parameter):
                    return part.state_of(parameter)
            elif parameter in (inner := _inner(part)).state:
                return inner.state[parameter]
        return {}


def _updated(optimizer: torch.optim.Optimizer | HostOptimizer) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """What this rank updates, and the state it keeps of each."""
    inner = optimizer.inner if isinstance(optimizer, HostOptimizer) else _inner(optimizer)
    for group in inner.param_groups:
        for parameter in group["params"]:
            yield parameter, inner.state[parameter]


def _inner(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
