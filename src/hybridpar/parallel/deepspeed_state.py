"""Parameters and optimizer state that DeepSpeed keeps, seen and set as whole tensors, whatever its stage.

DeepSpeed's own checkpoints are pickles, its universal ones are made of them by a script, and neither is read by another
engine. So the state goes into the same checkpoints as that of torch: `hybridpar.parallel.checkpoint`. Every rank sees
all of it on the way, in main memory: DeepSpeed's partitions are of flattened groups, not boxes of tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

_MOMENTS = ("exp_avg", "exp_avg_sq")
STEP = "step"


class ZeroState:
    """The fp32 parameters of one rank and what its optimizer keeps of them. All methods are collective.

    Args:
        engine: as deepspeed.initialize returns it.
        parameters: this rank's, by name.
        zero: the stage.
        moments: whether the optimizer keeps AdamW's.
    """

    def __init__(self, engine: Any, parameters: Mapping[str, nn.Parameter], zero: int, *, moments: bool) -> None:
        self._engine, self._parameters, self._zero = engine, dict(parameters), zero
        self._kinds = _MOMENTS if moments else ()

    @property
    def kinds(self) -> tuple[str, ...]:
        """What is kept of each parameter beside itself and the number of steps."""
        return self._kinds

    def parameters(self) -> dict[str, Tensor]:
        """By name, as this rank computes with them."""
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters(list(self._parameters.values()), enabled=self._zero == 3):
            return {name: p.detach().cpu().clone() for name, p in self._parameters.items()}

    def moments(self, kind: str) -> dict[str, Tensor]:
        """One of `kinds`, by name of the parameter."""
        from deepspeed.utils import safe_get_full_optimizer_state

        self.prepare()
        if not self._zero:
            return {name: self._plain[p][kind].detach().cpu().clone() for name, p in self._parameters.items()}
        whole = {name: safe_get_full_optimizer_state(p, kind) for name, p in self._parameters.items()}
        return {name: tensor.cpu().view(_shape(self._parameters[name])) for name, tensor in whole.items()}

    def steps(self) -> Tensor:
        """Number of updates, a float32 scalar."""
        self.prepare()
        return next((state[STEP].detach().cpu() for state in self._plain.values()), torch.zeros(()))

    @torch.no_grad()
    def set(self, parameters: Mapping[str, Tensor], moments: Mapping[str, Mapping[str, Tensor]], steps: Tensor) -> None:
        """Go on from these; `moments` by kind and name."""
        from deepspeed.runtime.zero import GatheredParameters
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        self.prepare()
        with GatheredParameters(list(self._parameters.values()), modifier_rank=0, enabled=self._zero == 3):
            for name, p in self._parameters.items():
                p.data.copy_(parameters[name])
        for name, p in self._parameters.items():
            if self._zero:
                safe_set_full_fp32_param(p, parameters[name].to(p.device))
            for kind in self._kinds:
                value = moments[kind][name].to(p.device)
                if self._zero:
                    safe_set_full_optimizer_state(p, value, kind)
                else:
                    self._plain[p][kind].copy_(value)
        for state in self._plain.values():
            state[STEP].copy_(steps)

    @torch.no_grad()
    def prepare(self) -> None:
        """Make the state that a first step would make, so that there is something to see or set."""
        if not self._kinds:
            return
        for p in self.updated():
            if not self._plain[p]:
                self._plain[p][STEP] = torch.zeros((), dtype=torch.float32)
                self._plain[p].update({kind: torch.zeros_like(p) for kind in self._kinds})
        if self._zero in (1, 2):
            # Which parameter lies where in the flat state. DeepSpeed looks that up after it has updated the first of
            # its groups, when the state of dealt-out experts, another group, is not there yet.
            self._wrapper._hp_optimizer_states_linked = False
            self._wrapper._lazy_init_hp_params_optimizer_state()

    def updated(self) -> list[Tensor]:
        """What the optimizer updates: the parameters, or this rank's flat partitions of copies of them."""
        if self._zero == 3:
            return list(self._wrapper.fp32_partitioned_groups_flat)
        if self._zero:
            return list(self._wrapper.single_partition_of_fp32_groups)
        return list(self._parameters.values())

    def kept(self) -> Iterator[Tensor]:
        """All tensors of the optimizer's, and what it updates."""
        for state in self._plain.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
        yield from (p.detach() for p in self.updated())

    @property
    def _wrapper(self) -> Any:
        return self._engine.optimizer

    @property
    def _plain(self) -> Any:
        """What torch's optimizer, which DeepSpeed wraps, keeps of each tensor that it updates."""
        return getattr(self._wrapper, "optimizer", self._wrapper).state


def _shape(parameter: nn.Parameter) -> torch.Size:
    return getattr(parameter, "ds_shape", parameter.shape)
