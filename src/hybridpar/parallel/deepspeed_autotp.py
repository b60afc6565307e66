"""Tensor parallelism by DeepSpeed's AutoTP, which cuts the linear layers that its configuration names.

AutoTP cuts attention by key/value heads, of which it learns from `model.config` as transformers writes it; the module
that computes with what is left of them is told here, as AutoTP knows only the attributes of models in transformers.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType, SimpleNamespace

import torch.distributed as dist
from torch import Tensor, nn

from hybridpar.comm.process_group import ProcessMesh
from hybridpar.models.attention import Attention
from hybridpar.models.lm import LanguageModel
from hybridpar.parallel.deepspeed_pieces import Pieces
from hybridpar.specs import RunSpec


def split_heads(lm: LanguageModel, run: RunSpec, mesh: ProcessMesh) -> None:
    """Prepare `lm` for AutoTP; in place, before deepspeed.initialize cuts the weights."""
    model, tp = run.model, run.strategy.tp
    lm.config = SimpleNamespace(  # type: ignore[assignment]
        num_attention_heads=model.heads, num_key_value_heads=model.kv_heads, hidden_size=model.hidden
    )
    for module in lm.modules():
        if isinstance(module, Attention):
            module.kv_heads = model.kv_heads // tp + (mesh.coordinate.tp < model.kv_heads % tp)
            module.heads = module.kv_heads * (model.heads // model.kv_heads)


def tensor_groups(tp: int) -> ModuleType:
    """DeepSpeed's groups of tp neighbours, which tell its configuration how many replicas there are. Collective."""
    from deepspeed.utils import groups

    groups._init_tp_mesh_device(tensor_model_parallel_size=tp)
    return groups


def pieces_of_autotp(lm: nn.Module, group: dist.ProcessGroup) -> Pieces:
    """Which parameters AutoTP has cut, and how they are gathered."""
    cut = {name: p for name, p in lm.named_parameters() if getattr(p, "tensor_model_parallel", False)}
    return Pieces(group, frozenset(cut), partial(_gather, cut), partial(_cut, cut))


def _gather(cut: dict[str, nn.Parameter], held: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: _whole(cut[name], tensor) if name in cut else tensor for name, tensor in held.items()}


def _whole(parameter: nn.Parameter, piece: Tensor) -> Tensor:
    """AutoTP's own gathering, which changes the tensors of the list that it is given."""
    tensors = [nn.Parameter(piece.detach().clone())]
    parameter.gather_params(tensors)  # type: ignore[attr-defined]
    return tensors[0].detach()


def _cut(cut: dict[str, nn.Parameter], dense: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: _piece(cut[name], tensor) if name in cut else tensor for name, tensor in dense.items()}


def _piece(parameter: nn.Parameter, whole: Tensor) -> Tensor:
    """AutoTP's own cutting, which changes the tensors of the list that it is given."""
    tensors = [nn.Parameter(whole.detach().clone())]
    parameter._tp_partition(tensors)  # type: ignore[attr-defined]
    return tensors[0].detach()
