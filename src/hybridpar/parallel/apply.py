"""The one place, and the one order, in which a strategy is applied to a one-device model.

1. pipeline stage and tensor shards, with the dense model's initial values   (layout)
2. borders of the tensor-parallel region, sequence parallelism               (tensor)
3. recomputation, which must run the collectives of 2 again                  (recompute)
4. data replicas: DDP, or FSDP2, which gathers what 1-3 then compute with     (data, zero)
5. optimizer, whole or sharded over replicas                                 (zero)
6. the pipeline's schedule over the finished stage                           (pipeline)
"""

from __future__ import annotations

from functools import partial

from torch import nn

from hybridpar.comm.process_group import ProcessMesh
from hybridpar.models.lm import LanguageModel
from hybridpar.models.loss import next_token_loss
from hybridpar.parallel.collectives import TensorRegion
from hybridpar.parallel.data import replicate
from hybridpar.parallel.engine import Engine
from hybridpar.parallel.layout import Layout, build_part
from hybridpar.parallel.pipeline import build_schedule
from hybridpar.parallel.recompute import recompute_blocks
from hybridpar.parallel.sharding import part
from hybridpar.parallel.tensor import split_tensor_parallel, vocab_parallel_loss
from hybridpar.parallel.torch_engine import LossFunction, TorchEngine
from hybridpar.parallel.zero import build_optimizer, shard_parameters
from hybridpar.specs import RunSpec


def build_engine(run: RunSpec, mesh: ProcessMesh) -> Engine:
    """Lay `run` out over the ranks of `mesh`. Collective. The run must be legal (`hybridpar.legality`)."""
    if run.strategy.engine == "deepspeed":
        from hybridpar.parallel.deepspeed_engine import build

        return build(run, mesh)
    return _build_torch(run, mesh)


def _build_torch(run: RunSpec, mesh: ProcessMesh) -> Engine:
    strategy, coordinate = run.strategy, mesh.coordinate
    lm = build_part(Layout(run, coordinate), mesh.device)
    vocabulary = part(run.model.vocab, strategy.tp, coordinate.tp)
    loss: LossFunction = next_token_loss
    if strategy.tp > 1:
        region = TensorRegion(mesh.group("tp"), sequence_parallel=strategy.sp)
        split_tensor_parallel(lm, region, vocabulary.start)
        loss = partial(vocab_parallel_loss, first=vocabulary.start, group=mesh.group("tp"))
    if strategy.recompute == "full":
        recompute_blocks(lm)
    module = _over_replicas(run, mesh, lm)
    parameters = dict(lm.named_parameters())
    optimizer = build_optimizer(parameters.values(), run.workload, mesh.group("dp") if strategy.zero == 1 else None)
    schedule = None
    if strategy.pp > 1:
        vocab_per_tp = vocabulary.stop - vocabulary.start
        group = mesh.group("pp")
        schedule = build_schedule(run, module, coordinate.pp, mesh.device, group, vocab_per_tp, loss)
    return TorchEngine(run, mesh, module, parameters, optimizer, loss, schedule)


def _over_replicas(run: RunSpec, mesh: ProcessMesh, lm: LanguageModel) -> nn.Module:
    strategy = run.strategy
    if strategy.dp == 1:
        return lm
    if strategy.zero >= 2:
        shard_parameters(lm, mesh.device_mesh["dp"], reshard_after_forward=strategy.zero == 3)
        return lm
    return replicate(lm, mesh.group("dp")) if strategy.overlap else lm
