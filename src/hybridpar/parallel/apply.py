"""The one place, and the one order, in which a strategy is applied to a one-device model.

1. pipeline stages, tensor and expert shards, with the dense model's initial values   (layout)
2. selective recomputation, innermost, so that it repeats no communication            (recompute)
3. tokens of one sequence on several ranks                                            (context)
4. experts on several ranks                                                           (experts)
5. borders of the tensor-parallel region, sequence parallelism                        (tensor)
6. full recomputation, which must run the collectives of 3-5 again                    (recompute)
7. data replicas: DDP, or FSDP2, which gathers what 1-6 then compute with             (data, zero)
8. optimizers, whole, sharded over replicas, or on the host                           (zero, offload)
9. the pipeline's schedule over the finished stages                                   (pipeline)
"""

from __future__ import annotations

from functools import partial

import torch.distributed as dist
from torch import nn

from hybridpar.comm.process_group import ProcessMesh
from hybridpar.models.lm import LanguageModel
from hybridpar.models.loss import next_token_loss
from hybridpar.parallel.collectives import TensorRegion
from hybridpar.parallel.context import Context, split_context
from hybridpar.parallel.data import replicate
from hybridpar.parallel.engine import Engine
from hybridpar.parallel.experts import moe_layers, split_experts
from hybridpar.parallel.generation import Generator
from hybridpar.parallel.layout import Layout, build_part
from hybridpar.parallel.pipeline import build_pipeline, holds_several_stages
from hybridpar.parallel.recompute import recompute_blocks, recompute_selectively
from hybridpar.parallel.replicas import Replicas
from hybridpar.parallel.sharding import part, stages_of
from hybridpar.parallel.tensor import split_tensor_parallel, vocab_parallel_loss
from hybridpar.parallel.torch_engine import LossFunction, TorchEngine
from hybridpar.parallel.zero import shard_parameters
from hybridpar.segments import segments_per_rank
from hybridpar.specs import RunSpec


def build_engine(run: RunSpec, mesh: ProcessMesh) -> Engine:
    """Lay `run` out over the ranks of `mesh`. Collective. The run must be legal (`hybridpar.legality`)."""
    if run.strategy.engine == "deepspeed":
        from hybridpar.parallel.deepspeed_engine import build

        return build(run, mesh)
    return _build_torch(run, mesh)


def _build_torch(run: RunSpec, mesh: ProcessMesh) -> Engine:
    strategy = run.strategy
    context = build_context(run, mesh)
    replicas = Replicas.build(run, mesh)
    stages = {
        index: build_stage(run, mesh, context, replicas.ep, index) for index in stages_of(strategy, mesh.coordinate.pp)
    }
    for lm in stages.values():
        _weigh_balance(run, lm)
        if strategy.recompute == "full":
            recompute_blocks(lm)
    modules = {index: _over_replicas(run, replicas, lm) for index, lm in stages.items()}
    parameters = {name: p for lm in stages.values() for name, p in lm.named_parameters()}
    loss = build_loss(run, mesh)
    pipeline = None
    if strategy.pp > 1:
        vocab_per_tp = vocabulary_of_rank(run, mesh)
        width = vocab_per_tp.stop - vocab_per_tp.start
        pipeline = build_pipeline(run, modules, mesh.device, mesh.group("pp"), width, loss)
        if holds_several_stages(strategy.schedule) and replicas.averages_stage_by_stage:
            for stage, lm in zip(pipeline.stages, stages.values(), strict=True):
                stage.average_over = mesh.group("dp", "cp")
                stage.averaged = [p for name, p in lm.named_parameters() if not replicas.is_apart(name)]
    return TorchEngine(run, mesh, replicas, modules, parameters, loss, pipeline, context)


def build_generator(run: RunSpec, mesh: ProcessMesh) -> Generator:
    """Lay the model of an inference run out over the ranks of `mesh`. Collective. The run must be legal."""
    context = build_context(run, mesh)
    lm = build_stage(run, mesh, context, Replicas.build(run, mesh).ep, mesh.coordinate.pp)
    return Generator(run, mesh, lm, context)


def build_context(run: RunSpec, mesh: ProcessMesh) -> Context | None:
    """How sequences lie on the cp ranks; None where one rank holds them whole."""
    strategy = run.strategy
    if strategy.cp == 1:
        return None
    pieces = segments_per_rank(run.model, strategy)
    return Context(mesh.group("cp"), strategy.cp_kind, pieces, strategy.overlap)


def vocabulary_of_rank(run: RunSpec, mesh: ProcessMesh) -> slice:
    """The tokens whose embeddings and logits this rank holds."""
    return part(run.model.vocab, run.strategy.tp, mesh.coordinate.tp)


def build_stage(
    run: RunSpec, mesh: ProcessMesh, context: Context | None, ep: dist.ProcessGroup | None, stage: int
) -> LanguageModel:
    """One stage of the model as this rank computes it: steps 1 to 5."""
    strategy = run.strategy
    lm = build_part(Layout(run, mesh.coordinate), mesh.device, stage)
    if strategy.recompute == "selective":
        recompute_selectively(lm)
    if context is not None:
        split_context(lm, context)
    if ep is not None and moe_layers(lm):
        split_experts(lm, run.model.experts, ep)
    if strategy.tp > 1:
        region = TensorRegion(mesh.group("tp"), sequence_parallel=strategy.sp)
        split_tensor_parallel(lm, region, vocabulary_of_rank(run, mesh).start)
    return lm


def build_loss(run: RunSpec, mesh: ProcessMesh) -> LossFunction:
    """Mean next-token loss of this rank's tokens, over whole or split logits."""
    if run.strategy.tp == 1:
        return next_token_loss
    return partial(vocab_parallel_loss, first=vocabulary_of_rank(run, mesh).start, group=mesh.group("tp"))


def _weigh_balance(run: RunSpec, lm: LanguageModel) -> None:
    """The load-balancing loss joins the mean over micro-batches, which schedules take afterwards; with tensor
    parallelism every rank has all of it, and their gradients are summed."""
    taken_later = run.strategy.pp > 1
    for moe in moe_layers(lm):
        moe.balance_weight /= run.strategy.tp * (1 if taken_later else run.micro_batches)


def _over_replicas(run: RunSpec, replicas: Replicas, lm: LanguageModel) -> nn.Module:
    strategy = run.strategy
    if strategy.dp * strategy.cp == 1:
        return lm
    if strategy.zero >= 2:
        shard_parameters(
            lm,
            replicas.mesh(),
            replicas.expert_mesh(),
            reshard_after_forward=strategy.zero == 3,
            on_host=strategy.offload == "parameters",
        )
        return lm
    if not strategy.overlap or replicas.averages_stage_by_stage:
        return lm
    apart = [name for name, _ in lm.named_parameters() if replicas.is_apart(name)]
    return replicate(lm, replicas.group, apart)
