"""What an engine does in a step, seen operator by operator: matrix products, and storages that come and go.

FLOPs are those of matrix products, two for a multiplication with its addition, counted as they run: fused attention
runs two products forward and five backward, as it makes the scores again (Dao et al. 2022, arXiv 2205.14135,
algorithm 4); causal scores in full; convolutions and elementwise work not at all.
"""

from __future__ import annotations

import bisect
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from hybridpar.measure.memory import storage_key
from hybridpar.parallel.recompute import recomputing

aten = torch.ops.aten


def _attention(products: int) -> Callable[..., int]:
    def flops(q: Tensor, k: Tensor) -> int:
        batch, heads, length, width = q.shape
        return products * 2 * batch * heads * length * k.shape[2] * width

    return flops


_FUSED: Mapping[Any, tuple[int, Callable[..., int]]] = {  # where q is among the arguments, and what runs
    aten._scaled_dot_product_flash_attention_for_cpu: (0, _attention(2)),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (1, _attention(5)),
}
_PRODUCTS = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm)


def product_flops(operator: Any, args: tuple[Any, ...], out: Any) -> int:
    """FLOPs of one call of an operator."""
    packet = operator._overloadpacket
    if packet in _FUSED:
        first, flops = _FUSED[packet]
        return flops(args[first], args[first + 1])
    return flop_registry[packet](*args, out_val=out) if packet in _PRODUCTS else 0


def phase_now() -> str:
    """Where in a step the caller is: forward, backward, recompute (the forward again, during the backward)."""
    if torch._C._current_graph_task_id() == -1:
        return "forward"
    return "recompute" if recomputing() else "backward"


@dataclass(frozen=True)
class Change:
    """A storage at a point in time (operators so far): `size` bytes from then on, and whether it is held for the
    backward pass (None: as before)."""

    time: int
    key: int
    size: int | None = None
    saved: bool | None = None


@dataclass
class Watch(TorchDispatchMode):
    """Looks on while it is entered. With `scalars`, what is read from the device are ones."""

    scalars: bool = True
    flops: Counter[str] = field(default_factory=Counter)
    operators: Counter[str] = field(default_factory=Counter)
    changes: list[Change] = field(default_factory=list)
    time: int = 0
    phases: list[tuple[int, str]] = field(default_factory=list)
    _names: dict[int, int] = field(default_factory=dict)
    _fresh: int = 0

    def __post_init__(self) -> None:
        super().__init__()
        self._resizing = mock.patch.object(torch.UntypedStorage, "resize_", self._resized())

    def __enter__(self) -> Watch:
        self._resizing.start()
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._resizing.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.scalars and func is aten._local_scalar_dense.default:
            return 1.0 if args[0].dtype.is_floating_point else 1
        out = func(*args, **(kwargs or {}))
        self.time += 1
        phase = phase_now()
        if not self.phases or self.phases[-1][1] != phase:
            self.phases.append((self.time, phase))
        flops = product_flops(func, args, out)
        if flops:
            self.flops[phase] += flops
            self.operators[str(func._overloadpacket)] += 1
        for tensor in _tensors(out):
            self.see(tensor)
        return out

    def see(self, tensor: Tensor) -> int:
        """Follow the storage under a tensor from now on; its name, which no other storage ever has."""
        key = storage_key(tensor)
        if key not in self._names:
            self._fresh += 1
            self._names[key] = self._fresh
            storage = tensor.untyped_storage()
            self.changes.append(Change(self.time, self._fresh, size=storage.nbytes()))
            weakref.finalize(storage, self._gone, key)
        return self._names[key]

    def phase_at(self, time: int) -> str:
        """The phase in which operator number `time` ran."""
        began = bisect.bisect_right([first for first, _ in self.phases], time)
        return self.phases[max(0, began - 1)][1]

    def note_saved(self, key: int, saved: bool) -> None:
        """For `MemoryAccountant`: a storage begins or ceases to be held for the backward pass."""
        if key in self._names:
            self.changes.append(Change(self.time, self._names[key], saved=saved))

    def _gone(self, key: int) -> None:
        name = self._names.pop(key, None)
        if name is not None:
            self.changes.append(Change(self.time, name, size=0))

    def _resized(self) -> Callable[[torch.UntypedStorage, int], Any]:
        real = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            done = real(storage, size)
            if storage._cdata in self._names:
                self.changes.append(Change(self.time, self._names[storage._cdata], size=size))
            return done

        return resize


def _tensors(out: Any) -> Iterator[Tensor]:
    if isinstance(out, Tensor):
        yield out
    elif isinstance(out, tuple | list):
        yield from (t for t in tree_iter(out) if isinstance(t, Tensor))
