"""The torch engine: one rank's part of the model, its schedule and its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from hybridpar.checkpoints import PastStep
from hybridpar.comm.metered import meter
from hybridpar.comm.process_group import ProcessMesh
from hybridpar.mesh import Axis
from hybridpar.parallel import checkpoint
from hybridpar.parallel.clip import Disjoint, global_norm, local_tensor, scale_to_norm
from hybridpar.parallel.collectives import sum_in_place
from hybridpar.parallel.context import Context
from hybridpar.parallel.data import average_gradients, local_gradients
from hybridpar.parallel.engine import Parts, StepResult
from hybridpar.parallel.gather import gather_dense, pieces
from hybridpar.parallel.layout import HEAD_COPY, dense_shapes
from hybridpar.parallel.optimizers import Optimizers
from hybridpar.parallel.pipeline import Pipeline
from hybridpar.parallel.replicas import Replicas
from hybridpar.parallel.sharding import has_partial_gradient, holder_of_stage, holders
from hybridpar.specs import RunSpec

LossFunction = Callable[[Tensor, Tensor], Tensor]


class TorchEngine:
    """See `hybridpar.parallel.engine.Engine`; built by `hybridpar.parallel.apply.build_engine`."""

    def __init__(
        self,
        run: RunSpec,
        mesh: ProcessMesh,
        replicas: Replicas,
        modules: Mapping[int, nn.Module],
        parameters: Mapping[str, nn.Parameter],
        loss: LossFunction,
        pipeline: Pipeline | None,
        context: Context | None,
    ) -> None:
        self._run, self._mesh, self._replicas = run, mesh, replicas
        self._modules, self._parameters = dict(modules), dict(parameters)
        self._loss, self._pipeline, self._context = loss, pipeline, context
        self._optimizers = Optimizers(run, replicas, parameters)
        self._sums = _partial_sums(run, mesh, parameters)
        self._embedding_ends = _embedding_ends(run, mesh)
        self._counted_elsewhere = _counted_elsewhere(run, mesh, parameters)
        self._has_buckets = any(isinstance(m, DistributedDataParallel) for m in modules.values())
        is_averaged = self._has_buckets or any(isinstance(m, FSDPModule) for m in modules.values())
        self._averages_late = replicas.group.size() > 1 and not is_averaged and not replicas.averages_stage_by_stage

    def step(self, tokens: Tensor, targets: Tensor) -> StepResult:
        """See `Engine.step`."""
        self.forget_gradients()
        loss = self._forward_backward(tokens, targets)
        self._complete_gradients()
        grads = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        norm = self._norm(grads)
        scale_to_norm(list(grads.values()), norm, self._run.workload.grad_clip)
        self._optimizers.step()
        return StepResult(self._mean_over_batch(loss), norm)

    def parts(self) -> Parts:
        """See `Engine.parts`."""
        held = self._parameters.values()
        parameters = tuple(local_tensor(p.detach()) for p in held)
        on_host = self._run.strategy.offload == "parameters"
        optimizer = self._optimizers.on_device()
        return Parts(
            parameters=() if on_host else parameters,
            gradients=tuple(local_tensor(p.grad) for p in held if p.grad is not None),
            optimizer=() if on_host else optimizer,
            buffers=tuple(buffer for module in self._modules.values() for buffer in module.buffers()),
            host=(*self._optimizers.on_host(), *((*parameters, *optimizer) if on_host else ())),
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

    def save(self, folder: Path, step: int, past: Sequence[PastStep]) -> Path:
        """See `Resumable.save`."""
        return checkpoint.save(folder, self._run, self._mesh, self._shards(), step, past)

    def prepare(self) -> None:
        """Make the optimizer's state now instead of in the first step."""
        self._optimizers.prepare_state()

    def forget_gradients(self) -> None:
        """As a step does first. Those that lie in the buckets of DDP stay there: forgotten, they would be made anew
        beside their buckets, and be held twice until the last micro-batch."""
        self._optimizers.zero_grad(set_to_none=not self._has_buckets)

    def load(self, path: Path) -> int:
        """See `Resumable.load`."""
        self.prepare()
        step = checkpoint.load(path, self._run, self._shards())
        if {_EMBEDDING, HEAD_COPY} <= set(self._parameters) and self._run.model.tied_embeddings:
            self._follow_embedding()
        self._optimizers.adopt_parameters()
        return step

    def _shards(self) -> dict[str, checkpoint.Shard]:
        """What this rank holds of parameters and optimizer state, by dense name. Of a tied weight that lies here
        twice the embedding speaks for both."""
        places = dict(zip(self._parameters, pieces(self._run, self._mesh, self._parameters), strict=True))
        shapes, states = dense_shapes(self._run), self._optimizers.state()
        found: dict[str, checkpoint.Shard] = {}
        for local_name, place in places.items():
            values = {"parameter": place.tensor, **states.get(local_name, {})}
            for kind, value in values.items():
                tensor = local_tensor(value.detach())
                whole = tensor.shape == place.tensor.shape and kind != "step"
                offset, shape = (place.offset, shapes[place.name]) if whole else ((), tensor.shape)
                if tensor.numel():
                    found.setdefault(f"{kind}.{place.name}", checkpoint.Shard(tensor, offset, shape))
        return found

    @torch.no_grad()
    def _follow_embedding(self) -> None:
        """The head's copy takes over what was loaded for the embedding, state included."""
        source, copy = self._parameters[_EMBEDDING], self._parameters[HEAD_COPY]
        local_tensor(copy).copy_(local_tensor(source))
        states = self._optimizers.state()
        for kind, value in states.get(_EMBEDDING, {}).items():
            if HEAD_COPY in states:
                local_tensor(states[HEAD_COPY][kind]).copy_(local_tensor(value))

    def _forward_backward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Gradients of the mean loss over this rank's tokens; that loss (zero where it is not computed)."""
        if self._context is not None:
            tokens, targets = self._context.tokens_of_rank(tokens), self._context.tokens_of_rank(targets)
        if self._pipeline is not None:
            losses = self._pipeline.step(tokens, targets)
            return torch.stack(losses).mean().detach() if losses else torch.zeros((), device=tokens.device)
        (module,) = self._modules.values()
        micro_batches = self._run.micro_batches
        total = torch.zeros((), device=tokens.device)
        pairs = zip(tokens.chunk(micro_batches), targets.chunk(micro_batches), strict=True)
        for index, (inputs, outputs) in enumerate(pairs):
            last = index == micro_batches - 1
            if isinstance(module, FSDPModule):
                module.set_requires_gradient_sync(last)
                if self._run.strategy.zero == 2:  # gathered once a step, as whole parameters are kept over it
                    module.set_reshard_after_backward(last)
            with local_gradients(module, local=not last):
                loss = self._loss(module(inputs), outputs) / micro_batches
                loss.backward()
            total = total + loss.detach()
        return total

    def _complete_gradients(self) -> None:
        """What nothing has done during the backward: average over replicas, then sum what ranks hold parts of."""
        replicas = self._replicas
        dense = [p for name, p in self._parameters.items() if not replicas.is_apart(name)]
        if self._averages_late:
            average_gradients(dense, replicas.group)
        self._complete_experts()
        for group, names in self._sums:
            grads = (self._parameters[name].grad for name in names)
            sum_in_place([local_tensor(grad) for grad in grads if grad is not None], group)
        if self._embedding_ends is not None:
            self._sum_tied_embeddings(self._embedding_ends)

    def _complete_experts(self) -> None:
        """Experts on ep ranks have met the tokens of all of them: what is still missing of the mean over replicas."""
        replicas = self._replicas
        experts = [p for name, p in self._parameters.items() if replicas.is_apart(name)]
        if not experts:
            return
        across, by_fsdp = replicas.across_ep, self._run.strategy.zero >= 2
        if across is not None and across.size() > 1 and not by_fsdp:
            average_gradients(experts, across)
        torch._foreach_div_([local_tensor(p.grad) for p in experts if p.grad is not None], self._run.strategy.ep)

    def _sum_tied_embeddings(self, ends: dist.ProcessGroup | None) -> None:
        """The embedding and the head's copy of it each have a part of the gradient of what is one weight."""
        own = [self._parameters[name].grad for name in (_EMBEDDING, HEAD_COPY) if name in self._parameters]
        grads = [local_tensor(grad) for grad in own if grad is not None]
        if len(grads) == 2:
            total = grads[0] + grads[1]
            for grad in grads:
                grad.copy_(total)
        elif grads and ends is not None:
            sum_in_place(grads, ends)

    def _norm(self, grads: Mapping[str, Tensor]) -> float:
        strategy, replicas = self._run.strategy, self._replicas
        counted = {name: grad for name, grad in grads.items() if name not in self._counted_elsewhere}
        dense = [grad for name, grad in counted.items() if not replicas.is_apart(name)]
        experts = [grad for name, grad in counted.items() if replicas.is_apart(name)]
        kinds = [Disjoint(dense, [replicas.shards] if strategy.zero >= 2 else [])]
        if replicas.ep is not None:
            over = [replicas.ep]
            if replicas.shards_experts and replicas.across_ep is not None:
                over.append(replicas.across_ep)
            kinds.append(Disjoint(experts, over))
        axes: tuple[Axis, ...] = ("tp", "pp")
        everywhere = [self._mesh.group(axis) for axis in axes if getattr(strategy, axis) > 1]
        return global_norm(kinds, everywhere, self._mesh.device)

    def _mean_over_batch(self, loss: Tensor) -> float:
        """The global batch's mean loss on every rank: known where the last stage is, averaged over replicas."""
        total = loss.detach().double()
        with meter().paused():  # told to the user, not needed to train
            if self._run.strategy.pp > 1:
                dist.all_reduce(total, group=self._mesh.group("pp"))
            if self._replicas.group.size() > 1:
                dist.all_reduce(total, group=self._replicas.group)
        return total.item() / self._replicas.group.size()


_EMBEDDING = "embed.weight"


def _partial_sums(
    run: RunSpec, mesh: ProcessMesh, parameters: Mapping[str, nn.Parameter]
) -> list[tuple[dist.ProcessGroup, list[str]]]:
    """Groups of tp ranks that hold the same and have each seen some of the work, and what they hold. Collective."""
    strategy, model = run.strategy, run.model
    if strategy.tp == 1:
        return []
    found: dict[int, list[str]] = {}
    for name in parameters:
        if has_partial_gradient(name, model, strategy.tp, sequence_parallel=strategy.sp):
            found.setdefault(holders(name, model, strategy.tp), []).append(name)
    # Every rank makes the group of neighbours that share key/value heads, whatever its stage holds.
    shared = max(1, strategy.tp // model.kv_heads) if model.kv_heads else 1
    groups = {strategy.tp: mesh.group("tp")}
    if 1 < shared < strategy.tp:
        groups[shared] = mesh.new_group(mesh.grid.blocks("tp", shared))
    return [(groups[size], names) for size, names in sorted(found.items())]


def _embedding_ends(run: RunSpec, mesh: ProcessMesh) -> dist.ProcessGroup | None:
    """The pp ranks with the embedding and with the head, where they share one weight but not one stage. Collective."""
    strategy = run.strategy
    if not run.model.tied_embeddings or strategy.pp == 1:
        return None
    first, last = (holder_of_stage(strategy, stage) for stage in (0, strategy.stages - 1))
    partition = []
    for ranks in mesh.grid.groups("pp"):
        ends = tuple(sorted({ranks[first], ranks[last]}))
        partition += [ends, *((rank,) for rank in ranks if rank not in ends)]
    return mesh.new_group(partition)


def _counted_elsewhere(run: RunSpec, mesh: ProcessMesh, parameters: Mapping[str, nn.Parameter]) -> frozenset[str]:
    """Parameters of this rank that another rank of its tp or pp group also holds, and counts in the norm."""
    tp = run.strategy.tp
    replicas = {name for name in parameters if mesh.coordinate.tp % holders(name, run.model, tp)}
    copy = {HEAD_COPY} & set(parameters) if run.model.tied_embeddings else set()
    return frozenset(replicas | copy)
