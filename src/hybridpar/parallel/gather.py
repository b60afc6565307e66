"""Whole parameters and gradients from any layout, by their names in the one-device model.

For parity checks and small models: everything ends on every rank, in main memory, by one collective of the world.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from hybridpar.comm.metered import meter
from hybridpar.comm.process_group import ProcessMesh
from hybridpar.parallel.clip import local_tensor
from hybridpar.parallel.layout import Layout, dense_name, dense_shapes
from hybridpar.specs import RunSpec


@dataclass(frozen=True)
class Piece:
    """A box of the dense tensor `name`: where it begins, and what is in it."""

    name: str
    offset: tuple[int, ...]
    tensor: Tensor


def pieces(run: RunSpec, mesh: ProcessMesh, held: Mapping[str, Tensor]) -> list[Piece]:
    """Where this rank's tensors (parameters, or what has their shape) lie in the dense ones."""
    layout, shapes = Layout(run, mesh.coordinate), dense_shapes(run)
    named = [(dense_name(local_name, run), tensor) for local_name, tensor in held.items()]
    return [
        Piece(name, _offset(layout.box(name, shapes[name]), tensor), local_tensor(tensor.detach()))
        for name, tensor in named
    ]


def _offset(box: tuple[slice, ...], tensor: Tensor) -> tuple[int, ...]:
    offset = [span.start for span in box]
    if isinstance(tensor, DTensor):  # FSDP2 shards what the model computes with once more
        _, inner = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        offset = [outer + more for outer, more in zip(offset, inner, strict=True)]
    return tuple(offset)


def gather_dense(run: RunSpec, mesh: ProcessMesh, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Put together what each rank holds. Collective.

    Raises:
        RuntimeError: ranks that should hold the same tensor do not, or nobody holds a part of one.
    """
    mine = [Piece(p.name, p.offset, p.tensor.cpu().clone()) for p in pieces(run, mesh, held)]
    received = [mine] * mesh.grid.size
    with meter().paused():
        dist.all_gather_object(received, mine)
    by_name: dict[str, dict[tuple[int, ...], Tensor]] = defaultdict(dict)
    for piece in (piece for part in received for piece in part if piece.tensor.numel()):
        _check_replica(piece, by_name[piece.name].setdefault(piece.offset, piece.tensor))
    shapes = dense_shapes(run)
    return {name: _joined(name, shapes[name], found.items()) for name, found in by_name.items()}


def _check_replica(replica: Piece, first: Tensor) -> None:
    """Replicas do the same sums in the same order, so only kernels that are not deterministic set them apart."""
    if replica.tensor is first:
        return
    drift = (replica.tensor - first).abs().max().item()
    if not drift <= torch.finfo(first.dtype).eps ** 0.5 * first.abs().max().item():
        raise RuntimeError(f"{replica.name} differs between ranks that should hold the same, by {drift:.3g}")


def _joined(name: str, shape: torch.Size, found: Iterable[tuple[tuple[int, ...], Tensor]]) -> Tensor:
    boxes = list(found)
    dense = torch.empty(shape, dtype=boxes[0][1].dtype)
    for offset, tensor in boxes:
        dense[tuple(slice(o, o + n) for o, n in zip(offset, tensor.shape, strict=True))] = tensor
    if sum(tensor.numel() for _, tensor in boxes) != dense.numel():
        raise RuntimeError(f"{name} is not held in full: its parts do not add up to its {dense.numel()} elements")
    return dense
