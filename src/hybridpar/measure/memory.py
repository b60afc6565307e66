"""Bytes a rank holds, by category, counted from its tensors (not from the process's pages).

Activations are what autograd saves for the backward pass: each storage once however many views of it are saved,
parameters left out, alive from its saving to the moment the graph lets go of it, so that the micro-batches in flight
of a pipeline add up. A recomputed block counts its input until its backward, then what it saves anew. Parameters that
a sharded layout gathers for a while (FSDP) count as parameters while they are whole. Not seen: what an operator
allocates and frees inside one call, the buffers of communication, and whole gradients on their way to being sharded.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

if TYPE_CHECKING:
    from hybridpar.parallel.engine import Parts


@dataclass(frozen=True)
class HeldBytes:
    """Peak bytes of one rank by category; the peaks need not coincide, so their sum is an upper bound. `host` is what
    an offloading strategy keeps in main memory, beside the device; `cache` what generation keeps of tokens seen."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    host: int
    cache: int


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages under these tensors, each storage once."""
    storages = {storage_key(t): t.untyped_storage().nbytes() for t in tensors if t.numel()}
    return sum(storages.values())


def storage_key(tensor: Tensor) -> int:
    """Names the storage under a tensor as long as it is alive, also a fake one, which has no address."""
    return tensor.untyped_storage()._cdata


class _Saved:
    """One tensor held for the backward pass; when autograd drops it, its storage is let go."""

    def __init__(self, tensor: Tensor, ledger: _Ledger) -> None:
        self.tensor = tensor.detach()  # the graph must not hold itself through its own output
        self._key = ledger.hold(self.tensor)
        self._ledger = ledger

    def __del__(self) -> None:
        self._ledger.release(self._key)


Note = Callable[[int, bool], None]


class _Ledger:
    """Storages alive, with how often each is held, and the largest sum seen. Autograd may let go in its threads."""

    def __init__(self, note: Note | None) -> None:
        self._lock = threading.RLock()  # letting go may interrupt holding, in one thread
        self._note = note
        self.peak = 0
        self._live = 0
        self._holders: Counter[int] = Counter()
        self._sizes: dict[int, int] = {}

    def hold(self, tensor: Tensor) -> int:
        key, size = storage_key(tensor), tensor.untyped_storage().nbytes()
        with self._lock:
            self._holders[key] += 1
            if self._holders[key] == 1:
                self._sizes[key] = size
                self._live += size
                self.peak = max(self.peak, self._live)
                if self._note is not None:
                    self._note(key, True)
        return key

    def release(self, key: int) -> None:
        with self._lock:
            self._holders[key] -= 1
            if not self._holders[key]:
                del self._holders[key]
                self._live -= self._sizes.pop(key)
                if self._note is not None:
                    self._note(key, False)


class MemoryAccountant:
    """Context manager around one training step; `peak()` afterwards.

    Args:
        parts: tells what the rank holds between steps (`Engine.parts`).
        note: told the key of each storage that begins (True) or ceases (False) to be held for the backward pass.
    """

    def __init__(self, parts: Callable[[], Parts], note: Note | None = None) -> None:
        self._parts = parts
        self._activations = _Ledger(note)
        self._fsdp: list[tuple[FSDPModule, bool]] = []  # those whose forward runs, and whether they were looked at
        self._gathered: dict[int, StorageWeakRef] = {}
        self._gathered_peak = 0
        self._held: tuple[Tensor, ...] = ()  # kept, so that no other storage takes one of their names
        self._resident: frozenset[int] = frozenset()
        self._watching = contextlib.ExitStack()
        self._after: Parts | None = None

    def __enter__(self) -> MemoryAccountant:
        self._held = self._parts().parameters
        self._resident = frozenset(storage_key(t) for t in self._held)
        self._watching.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack))
        self._watching.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", self._resizing()))
        self._watching.callback(register_module_forward_pre_hook(self._note_fsdp).remove)
        self._watching.callback(register_module_forward_hook(self._note_parameters).remove)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watching.close()
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
            host=storage_bytes(self._after.host),
            cache=0,
        )

    def _pack(self, tensor: Tensor) -> _Saved | Tensor:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if self._is_parameter(local):
            return tensor
        return _Saved(local, self._activations) if local is tensor else tensor

    def _is_parameter(self, tensor: Tensor) -> bool:
        base = tensor._base if tensor._is_view() and tensor._base is not None else tensor
        return isinstance(base, nn.Parameter) or self._is_resident(tensor) or storage_key(tensor) in self._gathered

    def _is_resident(self, tensor: Tensor) -> bool:
        return storage_key(tensor) in self._resident

    def _note_fsdp(self, module: nn.Module, _inputs: Any) -> None:
        """FSDP2 is about to gather what this module holds, all of it at once."""
        if isinstance(module, FSDPModule):
            self._fsdp.append((module, False))

    def _note_parameters(self, module: nn.Module, _inputs: Any, _output: Any) -> None:
        """After a module's forward its parameters are whole, before a layout that gathered them lets go of them."""
        held = list(module.parameters(recurse=False))
        for place, (around, looked_at) in enumerate(self._fsdp):
            if not looked_at:
                held += around.parameters()  # type: ignore[attr-defined]
                self._fsdp[place] = (around, True)
        if self._fsdp and self._fsdp[-1][0] is module:  # type: ignore[comparison-overlap]
            self._fsdp.pop()
        for parameter in held:
            if isinstance(parameter, DTensor) or self._is_resident(parameter):
                continue
            storage = parameter.untyped_storage()
            self._gathered.setdefault(storage._cdata, StorageWeakRef(storage))
        self._gathered = {key: ref for key, ref in self._gathered.items() if not ref.expired()}
        self._note_gathered()

    def _note_gathered(self) -> None:
        self._gathered_peak = max(self._gathered_peak, sum(map(_bytes_now, self._gathered.values())))

    def _resizing(self) -> Callable[[torch.UntypedStorage, int], Any]:
        """FSDP2 empties the storages of gathered parameters, and fills them again, also in a backward pass."""
        real = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            done = real(storage, size)
            if size and storage._cdata in self._gathered:
                self._note_gathered()
            return done

        return resize


def _bytes_now(reference: StorageWeakRef) -> int:
    """Zero once the storage is freed (DeepSpeed) or emptied (FSDP2)."""
    storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return 0 if storage is None else storage.nbytes()


def _unpack(saved: _Saved | Tensor) -> Tensor:
    return saved.tensor if isinstance(saved, _Saved) else saved
