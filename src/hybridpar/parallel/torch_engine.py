"""The torch engine: one rank's part of the model, its schedule and its optimizer."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.nn.parallel import DistributedDataParallel

from hybridpar.comm.metered import meter
from hybridpar.comm.process_group import ProcessMesh
from hybridpar.parallel.clip import clip_gradients, local_tensor
from hybridpar.parallel.collectives import sum_in_place
from hybridpar.parallel.data import average_gradients, local_gradients
from hybridpar.parallel.engine import Parts, StepResult
from hybridpar.parallel.gather import gather_dense
from hybridpar.parallel.pipeline import run_schedule
from hybridpar.parallel.sharding import has_partial_gradient, tensor_dim
from hybridpar.specs import RunSpec

LossFunction = Callable[[Tensor, Tensor], Tensor]


class TorchEngine:
    """See `hybridpar.parallel.engine.Engine`; built by `hybridpar.parallel.apply.build_engine`."""

    def __init__(
        self,
        run: RunSpec,
        mesh: ProcessMesh,
        module: nn.Module,
        parameters: dict[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        loss: LossFunction,
        schedule: PipelineScheduleSingle | None,
    ) -> None:
        self._run, self._mesh, self._module = run, mesh, module
        self._parameters, self._optimizer, self._loss, self._schedule = parameters, optimizer, loss, schedule
        self._averages_late = run.strategy.dp > 1 and not isinstance(module, DistributedDataParallel | FSDPModule)
        self._partial = self._names_with_partial_gradients()
        self._counted_elsewhere = self._replicated_names() if mesh.coordinate.tp > 0 else frozenset()

    def step(self, tokens: Tensor, targets: Tensor) -> StepResult:
        """See `Engine.step`."""
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._forward_backward(tokens, targets)
        self._complete_gradients()
        norm = clip_gradients(
            self._parameters, self._counted_elsewhere, self._disjoint_groups(), self._run.workload.grad_clip
        )
        self._optimizer.step()
        return StepResult(self._mean_over_batch(loss), norm)

    def parts(self) -> Parts:
        """See `Engine.parts`."""
        held = self._parameters.values()
        return Parts(
            parameters=tuple(local_tensor(p.detach()) for p in held),
            gradients=tuple(local_tensor(p.grad) for p in held if p.grad is not None),
            optimizer=tuple(_state_tensors(self._optimizer)),
            buffers=tuple(self._module.buffers()),
        )

    def dense_parameters(self) -> dict[str, Tensor]:
        """See `Engine.dense_parameters`."""
        return gather_dense(self._run, self._mesh, self._parameters)

    def keep_gradients(self) -> None:
        """See `Engine.keep_gradients`: torch keeps them until the next step anyway."""

    def dense_gradients(self) -> dict[str, Tensor]:
        """See `Engine.dense_gradients`."""
        return gather_dense(
            self._run, self._mesh, {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        )

    def _forward_backward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Gradients of the mean loss over this replica's sequences; that loss (zero where it is not computed)."""
        if self._schedule is not None:
            stage, stages = self._mesh.coordinate.pp, self._run.strategy.pp
            losses = run_schedule(self._schedule, stage, stages, tokens, targets)
            return torch.stack(losses).mean().detach() if losses else torch.zeros((), device=tokens.device)
        micro_batches = self._run.micro_batches
        total = torch.zeros((), device=tokens.device)
        pairs = zip(tokens.chunk(micro_batches), targets.chunk(micro_batches), strict=True)
        for index, (inputs, outputs) in enumerate(pairs):
            last = index == micro_batches - 1
            if isinstance(self._module, FSDPModule):
                self._module.set_requires_gradient_sync(last)
                if self._run.strategy.zero == 2:  # gathered once a step, as whole parameters are kept over it
                    self._module.set_reshard_after_backward(last)
            with local_gradients(self._module, local=not last):
                loss = self._loss(self._module(inputs), outputs) / micro_batches
                loss.backward()
            total = total + loss.detach()
        return total

    def _complete_gradients(self) -> None:
        """Sum what tp ranks hold parts of, and average over replicas where nothing has done so during the backward."""
        grads = (self._parameters[name].grad for name in self._partial)
        partial = [local_tensor(grad) for grad in grads if grad is not None]
        if partial:
            sum_in_place(partial, self._mesh.group("tp"))
        if self._averages_late:
            average_gradients(self._parameters.values(), self._mesh.group("dp"))

    def _mean_over_batch(self, loss: Tensor) -> float:
        """The global batch's mean loss on every rank: known on the last stage, averaged over replicas."""
        total = loss.detach().double()
        with meter().paused():  # told to the user, not needed to train
            if self._run.strategy.pp > 1:
                dist.all_reduce(total, group=self._mesh.group("pp"))
            if self._run.strategy.dp > 1:
                dist.all_reduce(total, group=self._mesh.group("dp"))
        return total.item() / self._run.strategy.dp

    def _disjoint_groups(self) -> list[dist.ProcessGroup]:
        strategy = self._run.strategy
        axes = [axis for axis in ("tp", "pp") if getattr(strategy, axis) > 1]
        if strategy.zero >= 2:
            axes.append("dp")
        return [self._mesh.group(axis) for axis in axes]  # type: ignore[arg-type]

    def _names_with_partial_gradients(self) -> list[str]:
        strategy, model = self._run.strategy, self._run.model
        return [
            name
            for name in self._parameters
            if has_partial_gradient(name, model, strategy.tp, sequence_parallel=strategy.sp)
        ]

    def _replicated_names(self) -> frozenset[str]:
        model, tp = self._run.model, self._run.strategy.tp
        return frozenset(name for name in self._parameters if tensor_dim(name, model, tp) is None)


def _state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    inner = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    return [
        local_tensor(value) for state in inner.state.values() for value in state.values() if isinstance(value, Tensor)
    ]
