"""Pipeline parallelism with torch.distributed.pipelining.

gpipe, 1f1b     one stage a device (Huang et al. 2019, arXiv 1811.06965; Narayanan et al. 2019, PipeDream)
interleaved     several stages a device (Narayanan et al. 2021, arXiv 2104.04473)
zero-bubble     one or several, the weights' part of the backward pass put off (Qi et al. 2023, arXiv 2401.10241)
zb-v            two stages a device, in a V (Qi et al. 2024, arXiv 2405.15362)
dualpipe-v      two stages a device, in a V, forward and backward of different micro-batches paired (DeepSeek-AI 2025)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from hybridpar.models.precision import DTYPES
from hybridpar.parallel.collectives import PendingSum
from hybridpar.parallel.sharding import holder_of_stage
from hybridpar.specs import RunSpec

_SINGLE: Mapping[str, type[PipelineScheduleSingle]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_SEVERAL: Mapping[str, type[PipelineScheduleMulti]] = {
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
    "zb-v": ScheduleZBVZeroBubble,
    "dualpipe-v": ScheduleDualPipeV,
}


def holds_several_stages(schedule: str) -> bool:
    """Whether torch runs a schedule as a list of actions over any number of stages a device."""
    return schedule in _SEVERAL


class AveragingStage(PipelineStage):
    """A stage that starts to average its gradients over replicas as soon as its last backward pass is done, while the
    device goes on with its other stages; DDP cannot, as it knows no backward pass in two parts."""

    average_over: dist.ProcessGroup | None = None
    averaged: Sequence[nn.Parameter] = ()
    pending: PendingSum | None = None

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """See the base class."""
        super().perform_reduce_grad(grad_scale_factor)
        grads = [p.grad for p in self.averaged if p.grad is not None]
        if self.average_over is not None and grads:
            self.pending = PendingSum.start(grads, self.average_over)

    def finish(self) -> None:
        """Wait for the averages."""
        if self.pending is not None and self.average_over is not None:
            self.pending.finish(divide_by=self.average_over.size())
            self.pending = None


@dataclass(frozen=True)
class Pipeline:
    """One rank's stages and the schedule that runs them."""

    schedule: PipelineScheduleSingle | PipelineScheduleMulti
    stages: tuple[AveragingStage, ...]

    def step(self, tokens: Tensor, targets: Tensor) -> list[Tensor]:
        """Forward and backward of all micro-batches; the losses, one a micro-batch, where the last stage is."""
        losses: list[Tensor] = []
        inputs = (tokens,) if any(stage.is_first for stage in self.stages) else ()
        # Logits are wanted by nobody but the loss; torch would keep those of all micro-batches.
        if any(stage.is_last for stage in self.stages):
            self.schedule.step(*inputs, target=targets, losses=losses, return_outputs=False)
        else:
            self.schedule.step(*inputs, return_outputs=False)
        for stage in self.stages:
            stage.finish()
        return losses


def build_pipeline(
    run: RunSpec,
    modules: Mapping[int, nn.Module],
    device: torch.device,
    group: dist.ProcessGroup,
    vocab_per_tp: int,
    loss: Callable[[Tensor, Tensor], Tensor],
) -> Pipeline:
    """The schedule of one rank over its stages. Shapes are given, so that no trial forward is run to find them.

    Args:
        run: the whole run.
        modules: this rank's stages by their number.
        device: where they are.
        group: the pp group.
        vocab_per_tp: width of the logits.
        loss: of logits and targets.
    """
    stages = tuple(_stage(run, index, module, device, group, vocab_per_tp) for index, module in modules.items())
    name = run.strategy.schedule
    # A schedule runs backward passes only where it is given a loss, so every stage gets it; the last one calls it.
    if name in _SINGLE:
        return Pipeline(_SINGLE[name](stages[0], run.micro_batches, loss_fn=loss), stages)
    several: list[Any] = list(stages)
    schedule = _SEVERAL[name](several, run.micro_batches, loss_fn=loss)
    holders = {stage: holder_of_stage(run.strategy, stage) for stage in range(run.strategy.stages)}
    assert stages[0].stage_index_to_group_rank == holders, "torch places stages differently"
    return Pipeline(schedule, stages)


def _stage(
    run: RunSpec, index: int, module: nn.Module, device: torch.device, group: dist.ProcessGroup, vocab_per_tp: int
) -> AveragingStage:
    strategy, workload = run.strategy, run.workload
    tokens = torch.empty(workload.micro_batch, workload.seq_len // strategy.cp, dtype=torch.int64, device="meta")
    length = tokens.shape[1] // strategy.tp if strategy.sp else tokens.shape[1]
    hidden = torch.empty(
        workload.micro_batch,
        length,
        run.model.hidden,
        dtype=DTYPES[workload.precision],
        device="meta",
        requires_grad=True,
    )
    logits = hidden.new_empty(*tokens.shape, vocab_per_tp)
    return AveragingStage(
        module,
        index,
        strategy.stages,
        device,
        input_args=tokens if index == 0 else hidden,
        output_args=logits if index == strategy.stages - 1 else hidden,
        group=group,
    )
