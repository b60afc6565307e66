"""Bytes a rank holds, by category, counted from its tensors (not from the process's pages).

Activations are what autograd saves for the backward pass: each storage once however many views of it are saved,
parameters left out, alive from its saving to the moment the graph lets go of it, so that the micro-batches in flight
of a pipeline add up. Parameters that a sharded layout gathers for a while (FSDP) count as parameters while they are
whole. Not seen: what an operator allocates and frees inside one call, and what a recomputed block saves again
(its saved input is seen).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from hybridpar.parallel.engine import Parts


@dataclass(frozen=True)
class HeldBytes:
    """Peak bytes of one rank by category."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages under these tensors, each storage once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}
    return sum(storages.values())


class _Saved:
    """One tensor held for the backward pass; when autograd drops it, its storage is let go."""

    def __init__(self, tensor: Tensor, ledger: _Ledger) -> None:
        self.tensor = tensor.detach()  # the graph must not hold itself through its own output
        self._key = ledger.hold(self.tensor)
        self._ledger = ledger

    def __del__(self) -> None:
        self._ledger.release(self._key)


class _Ledger:
    """Storages alive, with how often each is held, and the largest sum seen."""

    def __init__(self) -> None:
        self.peak = 0
        self._live = 0
        self._holders: Counter[int] = Counter()
        self._sizes: dict[int, int] = {}

    def hold(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        self._holders[key] += 1
        if self._holders[key] == 1:
            self._sizes[key] = storage.nbytes()
            self._live += storage.nbytes()
            self.peak = max(self.peak, self._live)
        return key

    def release(self, key: int) -> None:
        self._holders[key] -= 1
        if not self._holders[key]:
            del self._holders[key]
            self._live -= self._sizes.pop(key)


class MemoryAccountant:
    """Context manager around one training step; `peak()` afterwards.

    Args:
        parts: tells what the rank holds between steps (`Engine.parts`).
    """

    def __init__(self, parts: Callable[[], Parts]) -> None:
        self._parts = parts
        self._activations = _Ledger()
        self._gathered: dict[int, torch.UntypedStorage] = {}
        self._gathered_peak = 0
        self._resident: frozenset[int] = frozenset()
        self._hooks: torch.autograd.graph.saved_tensors_hooks | None = None
        self._after: Parts | None = None

    def __enter__(self) -> MemoryAccountant:
        self._resident = frozenset(t.untyped_storage().data_ptr() for t in self._parts().parameters)
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._hooks is not None
        self._hooks.__exit__(kind, error, trace)
        self._after = self._parts()

    def peak(self) -> HeldBytes:
        """The largest sums seen; gradients and optimizer state as they stand after the step, where both are whole."""
        assert self._after is not None, "peak() is asked after the step"
        return HeldBytes(
            parameters=storage_bytes(self._after.parameters) + self._gathered_peak,
            gradients=storage_bytes(self._after.gradients),
            optimizer=storage_bytes(self._after.optimizer),
            activations=self._activations.peak,
            buffers=storage_bytes(self._after.buffers),
        )

    def _pack(self, tensor: Tensor) -> _Saved | Tensor:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        base = local._base if local._is_view() and local._base is not None else local
        if isinstance(base, nn.Parameter) or local.untyped_storage().data_ptr() in self._resident:
            self._note_parameter(local)
            return tensor
        return _Saved(local, self._activations) if local is tensor else tensor

    def _note_parameter(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self._resident:
            return
        self._gathered[storage._cdata] = storage
        # FSDP empties a storage when it reshards: what is whole right now is what still has bytes.
        self._gathered_peak = max(self._gathered_peak, sum(held.nbytes() for held in self._gathered.values()))


def _unpack(saved: _Saved | Tensor) -> Tensor:
    return saved.tensor if isinstance(saved, _Saved) else saved
