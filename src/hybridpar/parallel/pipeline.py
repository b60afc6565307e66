"""Pipeline parallelism with torch.distributed.pipelining: GPipe and 1F1B over one stage a rank.

Sources: Huang et al. 2019, arXiv 1811.06965 (GPipe); Narayanan et al. 2021, arXiv 2104.04473 (1F1B).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from hybridpar.models.precision import DTYPES
from hybridpar.specs import RunSpec

_SCHEDULES: dict[str, type[PipelineScheduleSingle]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


def build_schedule(
    run: RunSpec,
    stage_module: nn.Module,
    stage: int,
    device: torch.device,
    group: ProcessGroup,
    vocab_per_tp: int,
    loss: Callable[[Tensor, Tensor], Tensor],
) -> PipelineScheduleSingle:
    """The schedule of one rank. Shapes are given, so that no trial forward is run to find them."""
    strategy, workload, model = run.strategy, run.workload, run.model
    length = workload.seq_len // strategy.tp if strategy.sp else workload.seq_len
    hidden = torch.empty(
        workload.micro_batch, length, model.hidden, dtype=DTYPES[workload.precision], device="meta", requires_grad=True
    )
    tokens = torch.empty(workload.micro_batch, workload.seq_len, dtype=torch.int64, device="meta")
    last = stage == strategy.pp - 1
    logits = hidden.new_empty(workload.micro_batch, workload.seq_len, vocab_per_tp)
    part = PipelineStage(
        stage_module,
        stage,
        strategy.pp,
        device,
        input_args=tokens if stage == 0 else hidden,
        output_args=logits if last else hidden,
        group=group,
    )
    # A schedule runs backward passes only where it is given a loss, so every stage gets it; the last one calls it.
    return _SCHEDULES[strategy.schedule](part, run.micro_batches, loss_fn=loss)


def run_schedule(
    schedule: PipelineScheduleSingle, stage: int, stages: int, tokens: Tensor, targets: Tensor
) -> list[Tensor]:
    """Forward and backward of all micro-batches; the losses, one a micro-batch, on the last stage."""
    losses: list[Tensor] = []
    inputs = (tokens,) if stage == 0 else ()
    if stage == stages - 1:
        schedule.step(*inputs, target=targets, losses=losses)
    else:
        schedule.step(*inputs)
    return losses
