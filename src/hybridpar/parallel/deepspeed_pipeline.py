"""DeepSpeed's PipelineModule: 1F1B over stages of equally many layers, times data replicas (ZeRO-0 or 1)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology
from torch import Tensor, nn

from hybridpar.comm.process_group import ProcessMesh
from hybridpar.models.lm import LanguageModel
from hybridpar.models.loss import next_token_loss
from hybridpar.parallel.deepspeed_config import deepspeed_config
from hybridpar.parallel.deepspeed_engine import DeepSpeedEngine
from hybridpar.parallel.deepspeed_pieces import Pieces
from hybridpar.parallel.deepspeed_start import initialize
from hybridpar.parallel.engine import Engine, StepResult
from hybridpar.parallel.zero import build_optimizer
from hybridpar.specs import RunSpec


class _Last(nn.Module):
    """The final norm and the head as one layer."""

    def __init__(self, lm: LanguageModel) -> None:
        super().__init__()
        self.norm, self.head = lm.norm, lm.head

    def forward(self, x: Tensor) -> Tensor:
        assert self.norm is not None
        assert self.head is not None
        return self.head(self.norm(x))


def build_pipeline(run: RunSpec, mesh: ProcessMesh, lm: LanguageModel) -> Engine:
    """Split `lm` over pp stages. Collective."""
    layers = [lm.embed, *lm.blocks.values(), _Last(lm)]
    module = PipelineModule(
        layers=layers,
        topology=PipeDataParallelTopology(num_pp=run.strategy.pp, num_dp=run.strategy.dp),
        loss_fn=next_token_loss,
        partition_method="uniform",
        activation_checkpoint_interval=0,
    )
    optimizer = build_optimizer(module.parameters(), run.workload, None)
    engine = initialize(model=module, optimizer=optimizer, config=deepspeed_config(run))
    parameters = {_dense_name(name, run.model.layers): p for name, p in module.named_parameters()}
    return PipelinedEngine(run, mesh, engine, parameters, _pieces(parameters, mesh.group("pp")))


def _dense_name(name: str, layers: int) -> str:
    """`3.attention.wq.weight` of PipelineModule, whose layer 0 is the embedding -> `blocks.2.attention.wq.weight`."""
    index, _, rest = name.partition(".")
    if index == "0":
        return f"embed.{rest}"
    return rest if int(index) > layers else f"blocks.{int(index) - 1}.{rest}"


class PipelinedEngine(DeepSpeedEngine):
    """See `hybridpar.parallel.engine.Engine`."""

    def step(self, tokens: Tensor, targets: Tensor) -> StepResult:
        """See `Engine.step`."""
        micro_batches = self._run.micro_batches
        pairs: Iterator[tuple[Tensor, Tensor]] = zip(
            tokens.chunk(micro_batches), targets.chunk(micro_batches), strict=True
        )
        loss = self._engine.train_batch(data_iter=pairs)  # the mean over micro-batches and replicas
        return StepResult(float(loss), self._norm())


def _pieces(parameters: Iterable[str], group: dist.ProcessGroup) -> Pieces:
    """All parameters of a stage are on it alone."""

    def assemble(held: dict[str, Tensor]) -> dict[str, Tensor]:
        stages: list[dict[str, Tensor]] = [{}] * group.size()
        dist.all_gather_object(stages, {name: tensor.cpu() for name, tensor in held.items()}, group=group)
        return {name: tensor for stage in stages for name, tensor in stage.items()}

    names = frozenset(parameters)

    def cut(dense: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: dense[name] for name in names}

    return Pieces(group, names, assemble, cut)
