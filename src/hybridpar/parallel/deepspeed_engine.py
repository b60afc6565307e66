"""The second engine: DeepSpeed's ZeRO-0 to 3 over replicas, its offload, AutoTP, Ulysses, MoE and PipelineModule.

Same model, same initial parameters, same data, same optimizer as the torch engine; what differs is who moves the
tensors. DeepSpeed frees gradients within its step, so what a check wants to see of them is taken just before the
update.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridpar.checkpoints import PastStep
from hybridpar.comm.metered import meter
from hybridpar.comm.process_group import ProcessMesh
from hybridpar.mesh import Coordinate
from hybridpar.models.lm import LanguageModel
from hybridpar.models.loss import next_token_loss
from hybridpar.parallel import checkpoint
from hybridpar.parallel.deepspeed_autotp import pieces_of_autotp, split_heads, tensor_groups
from hybridpar.parallel.deepspeed_config import deepspeed_config
from hybridpar.parallel.deepspeed_moe import deal_experts, parameter_groups, pieces_of_experts
from hybridpar.parallel.deepspeed_pieces import Pieces
from hybridpar.parallel.deepspeed_start import adopt_process_group, initialize
from hybridpar.parallel.deepspeed_state import STEP, ZeroState
from hybridpar.parallel.deepspeed_ulysses import loss_scale, sequence_groups, split_sequences
from hybridpar.parallel.engine import Engine, Parts, StepResult
from hybridpar.parallel.experts import moe_layers
from hybridpar.parallel.layout import Layout, build_part
from hybridpar.parallel.recompute import recompute_blocks
from hybridpar.parallel.zero import build_optimizer
from hybridpar.specs import RunSpec, Strategy

_EPSILON = 1e-6  # DeepSpeed scales by clip / (norm + 1e-6), as torch does


def build(run: RunSpec, mesh: ProcessMesh) -> Engine:
    """Lay `run` out with DeepSpeed. Collective."""
    adopt_process_group(mesh)
    lm = _dense_model(run, mesh)
    for moe in moe_layers(lm):  # their load-balancing loss does not pass through the loss, which DeepSpeed divides
        moe.balance_weight /= run.micro_batches
    if run.strategy.pp > 1:
        from hybridpar.parallel.deepspeed_pipeline import build_pipeline

        return build_pipeline(run, mesh, lm)
    options: dict[str, Any] = {}
    if run.strategy.tp > 1:
        split_heads(lm, run, mesh)
        options["mpu"] = tensor_groups(run.strategy.tp)
    if run.strategy.cp > 1:
        split_sequences(lm, mesh.group("cp"))
        options["mpu"] = sequence_groups(run.strategy.cp)
    if run.strategy.ep > 1:
        deal_experts(lm, run, mesh.coordinate.dp % run.strategy.ep)
    if run.strategy.recompute == "full":
        recompute_blocks(lm)
    optimizer = build_optimizer(parameter_groups(lm), run.workload, None)
    engine = initialize(model=lm, optimizer=optimizer, config=deepspeed_config(run), **options)
    return ReplicatedEngine(run, mesh, engine, dict(lm.named_parameters()), _pieces(lm, run, mesh))


def _pieces(lm: LanguageModel, run: RunSpec, mesh: ProcessMesh) -> Pieces | None:
    if run.strategy.tp > 1:
        return pieces_of_autotp(lm, mesh.group("tp"))
    return pieces_of_experts(lm, run.strategy.ep) if run.strategy.ep > 1 else None


def _dense_model(run: RunSpec, mesh: ProcessMesh) -> LanguageModel:
    """The whole model with its initial parameters; DeepSpeed splits it itself."""
    whole = run.model_copy(update={"strategy": Strategy()})
    return build_part(Layout(whole, Coordinate(0, 0, 0, 0)), mesh.device)


class DeepSpeedEngine:
    """What both kinds share; `parameters` are this rank's, by dense name."""

    def __init__(
        self,
        run: RunSpec,
        mesh: ProcessMesh,
        engine: Any,
        parameters: Mapping[str, nn.Parameter],
        pieces: Pieces | None = None,
    ) -> None:
        self._run, self._mesh, self._engine, self._parameters = run, mesh, engine, dict(parameters)
        self._pieces = pieces
        self._gradients: dict[str, Tensor] = {}
        self._gradient_bytes = 0
        self._optimizer_gradient_bytes = 0  # of its own copies, where it is offloaded
        self._whole_norm = 0.0
        self._keeps_gradients = False
        self._state = ZeroState(engine, self._parameters, run.strategy.zero, moments=run.workload.optimizer == "adamw")
        self._update = engine._take_model_step
        engine._take_model_step = self._look_and_update

    def keep_gradients(self) -> None:
        """See `Engine.keep_gradients`."""
        self._keeps_gradients = True

    def parts(self) -> Parts:
        """See `Engine.parts`. Gradients as they were before the last update, which freed them."""
        offload = self._run.strategy.offload
        held = tuple(_held(p) for p in self._parameters.values())
        own = {tensor.untyped_storage().data_ptr() for tensor in held}
        optimizer = tuple(t for t in self._state.kept() if t.untyped_storage().data_ptr() not in own)
        with_optimizer = (*optimizer, *_placeholder(self._optimizer_gradient_bytes))
        away = {"none": (), "optimizer": with_optimizer, "parameters": (*held, *with_optimizer)}[offload]
        return Parts(
            parameters=() if offload == "parameters" else held,
            gradients=_placeholder(self._gradient_bytes),
            optimizer=optimizer if offload == "none" else (),
            buffers=tuple(self._engine.module.buffers()),
            host=away,
        )

    def dense_parameters(self) -> dict[str, Tensor]:
        """See `Engine.dense_parameters`."""
        with meter().paused():
            return self._whole(self._state.parameters())

    def dense_gradients(self) -> dict[str, Tensor]:
        """See `Engine.dense_gradients`.

        Raises:
            RuntimeError: no step was taken since `keep_gradients`.
        """
        if not self._gradients:
            raise RuntimeError("gradients are kept from the call of keep_gradients on, and no step was taken since")
        norm, largest = self._norm(), self._run.workload.grad_clip
        scale = largest / (norm + _EPSILON) if largest and norm > largest else 1.0
        with meter().paused():
            return self._whole({name: grad * scale for name, grad in self._gradients.items()})

    def save(self, folder: Path, step: int, past: Sequence[PastStep]) -> Path:
        """See `Resumable.save`."""
        return checkpoint.save(folder, self._run, self._mesh, self._shards(), step, past)

    def load(self, path: Path) -> int:
        """See `Resumable.load`."""
        shards = self._shards()
        step = checkpoint.load(path, self._run, shards)
        by_kind: dict[str, dict[str, Tensor]] = {}
        for key, shard in shards.items():
            kind, _, name = key.partition(".")
            by_kind.setdefault(kind, {})[name] = shard.tensor
        steps = next(iter(by_kind.pop(STEP, {}).values()), torch.zeros(()))
        cut = self._pieces.cut if self._pieces else dict[str, Tensor]
        parameters = cut(by_kind.pop("parameter"))
        with meter().paused():
            self._state.set(parameters, {kind: cut(values) for kind, values in by_kind.items()}, steps)
        return step

    def _shards(self) -> dict[str, checkpoint.Shard]:
        """Whole tensors of parameters and optimizer state, by dense name. Collective."""
        state, found = self._state, {}
        with meter().paused():
            kinds = {"parameter": self._whole(state.parameters())}
            kinds |= {kind: self._whole(state.moments(kind)) for kind in state.kinds}
            if state.kinds:
                kinds[STEP] = {name: state.steps().clone() for name in kinds["parameter"]}
        for kind, tensors in kinds.items():
            for name, tensor in tensors.items():
                found[f"{kind}.{name}"] = checkpoint.Shard(tensor.contiguous(), (0,) * tensor.dim(), tensor.shape)
        return found

    def _look_and_update(self, *arguments: Any, **options: Any) -> Any:
        self._gradient_bytes = sum(_bytes(t) for t in self._gradient_tensors())
        if self._run.strategy.offload != "none":
            self._optimizer_gradient_bytes = sum(_bytes(p.grad) for p in self._state.updated() if p.grad is not None)
        if self._run.strategy.zero == 0:
            self._whole_norm = self._norm_of_gradients()
        if self._keeps_gradients:
            with meter().paused():
                self._gradients = {name: self._whole_gradient(p) for name, p in self._parameters.items()}
        return self._update(*arguments, **options)

    def _whole_gradient(self, parameter: nn.Parameter) -> Tensor:
        from deepspeed.utils import safe_get_full_grad

        gradient = safe_get_full_grad(parameter) if self._run.strategy.zero else parameter.grad
        if gradient is None:
            raise RuntimeError("DeepSpeed shows no gradient before its update")
        return gradient.detach().clone().view(_shape(parameter))

    def _gradient_tensors(self) -> Iterator[Tensor]:
        yield from (p.grad for p in self._parameters.values() if p.grad is not None)
        partitions = getattr(self._engine.optimizer, "averaged_gradients", {})
        for group in partitions.values():
            yield from (tensor for tensor in group or () if tensor is not None)

    def _norm(self) -> float:
        """The global norm before clipping; DeepSpeed does not keep it at ZeRO-0, where every rank has all gradients."""
        return self._whole_norm if self._run.strategy.zero == 0 else float(self._engine.get_global_grad_norm())

    def _norm_of_gradients(self) -> float:
        grads = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        apart = frozenset(grads) & (self._pieces.names if self._pieces else frozenset())
        squares = _squares(grad for name, grad in grads.items() if name not in apart)
        if self._pieces:
            with meter().paused():
                in_pieces = _squares(grads[name] for name in apart)
                dist.all_reduce(in_pieces, group=self._pieces.group)
            squares = squares + in_pieces
        return squares.sqrt().item()

    def _whole(self, held: dict[str, Tensor]) -> dict[str, Tensor]:
        """What ranks hold of every parameter, put together, by dense name."""
        whole = self._pieces.assemble(held) if self._pieces else held
        return {name: tensor.cpu() for name, tensor in whole.items()}


class ReplicatedEngine(DeepSpeedEngine):
    """ZeRO-0 to 3 over data replicas; see `hybridpar.parallel.engine.Engine`."""

    def _own_tokens(self, sequences: Tensor) -> Tensor:
        """(m*b, S) -> (m*b, S/cp)."""
        return sequences.chunk(self._run.strategy.cp, dim=1)[self._mesh.coordinate.cp].contiguous()

    def step(self, tokens: Tensor, targets: Tensor) -> StepResult:
        """See `Engine.step`."""
        micro_batches = self._run.micro_batches
        scale = loss_scale(self._run.strategy.zero, self._run.strategy.cp)
        total = torch.zeros((), dtype=torch.float64, device=tokens.device)
        tokens, targets = (self._own_tokens(t) for t in (tokens, targets))
        for inputs, outputs in zip(tokens.chunk(micro_batches), targets.chunk(micro_batches), strict=True):
            loss = next_token_loss(self._engine(inputs), outputs)
            self._engine.backward(loss * scale)  # divides by the number of micro-batches
            self._engine.step()  # updates at the last of them
            total += loss.detach()
        with meter().paused():  # for the log, no part of the strategy
            dist.all_reduce(total)
        return StepResult(total.item() / (micro_batches * self._run.strategy.devices), self._norm())


def _squares(tensors: Iterable[Tensor]) -> Tensor:
    """Sum of the squares of all elements, a float64 scalar."""
    return sum((t.double().square().sum() for t in tensors), torch.zeros((), dtype=torch.float64))


def _held(parameter: nn.Parameter) -> Tensor:
    """What a rank holds of a parameter: its partition under ZeRO-3, else all of it."""
    return getattr(parameter, "ds_tensor", parameter).detach()


def _shape(parameter: nn.Parameter) -> torch.Size:
    return getattr(parameter, "ds_shape", parameter.shape)


def _placeholder(size: int) -> tuple[Tensor, ...]:
    """Stands for bytes that were held and are no more."""
    return (torch.empty(size, dtype=torch.uint8, device="meta"),) if size else ()


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
