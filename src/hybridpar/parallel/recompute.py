"""Activation recomputation: keep less in the forward pass, run parts of it again in the backward pass.

full        a block keeps its input and runs its forward again
selective   a block keeps what its matrix products with weights give, and runs again what is large and cheap next to
            them: softmax(q k^T) v, silu(gate) * up, and the SSD of Mamba-2 (after Korthikanti et al. 2022,
            arXiv 2205.05198, section 5). Ring attention keeps no scores to begin with, and is left as it is.

What runs again runs once. torch.utils.checkpoint does so too where a backward pass is one; where a pipeline takes it
in two parts (the zero-bubble schedules), torch asks for what was saved once for the inputs and once more for each
group of weights, and its checkpoint runs a block again each time: in a trace of zb-v the recomputation of a step cost
4.2 times its forward. Here what was made again stays until autograd lets go of what it was made for, as it does with
what was never given up.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hybridpar.models.block import AttentionBlock, MambaBlock
from hybridpar.models.lm import LanguageModel
from hybridpar.models.mlp import SwiGLU


def recompute_blocks(lm: LanguageModel) -> None:
    """Wrap every block's forward; in place.

    Its collectives run again too, but for one that ends a block whose backward does not need its result (the last
    all-reduce of an MLP): a recomputation stops once everything that was saved is there.
    """
    for block in lm.blocks.values():
        block.forward = _again(block.forward)


def recompute_selectively(lm: LanguageModel) -> None:
    """Wrap what is cheap in every block; in place, before anything else is put around it."""
    for block in lm.blocks.values():
        if isinstance(block, AttentionBlock):
            block.attention.core = _again(block.attention.core)
        if isinstance(block, MambaBlock):
            block.mamba.scan = _again(block.mamba.scan)
        for module in block.modules():
            if isinstance(module, SwiGLU):
                module.product = _again(module.product)


def recomputing() -> bool:
    """Whether this thread is running a forward pass again, during a backward pass."""
    return _depth.recomputing > 0


def saves_less(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, of which only the tensors among `args` are kept for the backward pass.

    The function must do the same when it runs again; it may hold no randomness.

    Raises:
        RuntimeError: in the backward pass, where the function saved other tensors the second time.
    """
    if not torch.is_grad_enabled():
        return function(*args)
    call = _Call(function, args)
    with torch.autograd.graph.saved_tensors_hooks(call.give_up, call.take):
        return function(*args)


def _again(function: Callable[..., Any]) -> Callable[..., Any]:
    return partial(saves_less, function)


class _Depth(threading.local):
    recomputing = 0


_depth = _Depth()


class _EverythingIsThereError(Exception):
    """Ends a recomputation as soon as all that was saved is there."""


class _Keep(torch.autograd.Function):
    """Saves tensors in a node of its own, where hooks around it (who counts memory) see them like any others."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_grads: Any) -> Any:
        raise AssertionError("nothing is differentiated through what is only kept")


def _kept(*tensors: Tensor) -> Any:
    with torch.enable_grad():  # which a backward pass runs without
        return _Keep.apply(torch.empty(0, requires_grad=True), *tensors).grad_fn


class _Slot:
    """Stands in the graph for a tensor that was given up, and holds it once it was made again."""

    def __init__(self, tensor: Tensor) -> None:
        self.like = (tensor.shape, tensor.dtype)
        self.kept: Any = None

    def fill(self, tensor: Tensor) -> None:
        self.kept = _kept(tensor)

    def tensor(self) -> Tensor:
        assert self.kept is not None, "a slot is filled by the recomputation of its call"
        (tensor,) = self.kept.saved_tensors
        return tensor


class _Call:
    """One call of a function: its arguments, and places for what it saved. Slots belong to the graph, not to it."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._function = function
        self._others = [None if isinstance(arg, Tensor) else arg for arg in args]
        self._places = [place for place, arg in enumerate(args) if isinstance(arg, Tensor)]
        self._needs_grad = [args[place].requires_grad for place in self._places]
        self._inputs = _kept(*(args[place].detach() for place in self._places))
        self._slots: list[weakref.ref[_Slot]] = []
        self._is_there = False

    def give_up(self, tensor: Tensor) -> _Slot:
        """In the forward pass, instead of saving."""
        slot = _Slot(tensor)
        self._slots.append(weakref.ref(slot))
        return slot

    def take(self, slot: _Slot) -> Tensor:
        """In the backward pass: the first who asks has everything made again."""
        if not self._is_there:
            self._make_again()
        return slot.tensor()

    def _make_again(self) -> None:
        made: list[Tensor] = []

        def save(tensor: Tensor) -> Tensor:
            self._check(len(made), tensor)
            made.append(tensor.detach())  # its graph is not needed
            if len(made) == len(self._slots):
                raise _EverythingIsThereError
            return made[-1]

        _depth.recomputing += 1
        try:
            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
                self._function(*self._args())
        except _EverythingIsThereError:
            pass
        finally:
            _depth.recomputing -= 1
        if len(made) < len(self._slots):
            raise RuntimeError(f"a recomputation saved {len(made)} tensors where its forward pass saved more")
        for reference, tensor in zip(self._slots, made, strict=True):
            slot = reference()
            if slot is not None:
                slot.fill(tensor)
        self._is_there = True

    def _check(self, place: int, tensor: Tensor) -> None:
        slot = self._slots[place]()
        if slot is not None and slot.like != (tensor.shape, tensor.dtype):
            raise RuntimeError(
                f"a recomputation saved {tuple(tensor.shape)} of {tensor.dtype} as its tensor {place}, where its "
                f"forward pass saved {tuple(slot.like[0])} of {slot.like[1]}"
            )

    def _args(self) -> list[Any]:
        args = list(self._others)
        for place, tensor, needs in zip(self._places, self._inputs.saved_tensors, self._needs_grad, strict=True):
            args[place] = tensor.detach().requires_grad_(needs)
        return args
