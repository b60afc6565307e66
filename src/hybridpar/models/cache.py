"""What generation keeps of the tokens it has seen: keys and values of attention, the state of Mamba-2.

Symbols: b batch, S tokens of an input, T tokens seen, K key/value heads, h head_dim, H heads, P head width, N state,
G groups, w width of the convolution.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional


class KeyValueCache:
    """Keys and values of up to `capacity` tokens of one attention layer: 2*b*K*capacity*h elements."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, core: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """Store k and v (b, K, S, h) and let q (b, H, S, h) see them and what came before; (b, H, S, h).

        Raises:
            ValueError: the cache is full.
        """
        if self.length + k.shape[2] > self.capacity:
            raise ValueError(f"the cache holds {self.length} of {self.capacity} tokens; {k.shape[2]} more do not fit")
        seen, self.length = self.length, self.length + k.shape[2]
        self._store(k, v, seen)
        if not seen:
            return core(q, k, v)
        keys, values = self.held()
        new = torch.arange(seen, self.length, device=q.device)
        visible = torch.arange(self.length, device=q.device) <= new.unsqueeze(-1)
        shared = keys.shape[1] != q.shape[1]
        return functional.scaled_dot_product_attention(q, keys, values, attn_mask=visible, enable_gqa=shared)

    def held(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the tokens seen, (b, K, T, h) each."""
        assert self._keys is not None and self._values is not None, "nothing was stored yet"  # noqa: PT018
        return self._keys[:, :, : self.length], self._values[:, :, : self.length]

    def tensors(self) -> tuple[Tensor, ...]:
        """What is allocated, at its full capacity."""
        return tuple(t for t in (self._keys, self._values) if t is not None)

    def _store(self, k: Tensor, v: Tensor, first: int) -> None:
        if self._keys is None or self._values is None:
            shape = (*k.shape[:2], self.capacity, k.shape[3])
            self._keys, self._values = k.new_empty(shape), v.new_empty(shape)
        self._keys[:, :, first : first + k.shape[2]] = k
        self._values[:, :, first : first + v.shape[2]] = v


class StateCache:
    """Mamba-2's memory of all tokens seen: the last w-1 inputs of the convolution and one state, whatever T is."""

    def __init__(self, conv_width: int) -> None:
        self._kept = conv_width - 1
        self._tail: Tensor | None = None
        self._state: Tensor | None = None

    def tail(self, recent: Tensor) -> Tensor:
        """Exchange the inputs of the convolution: `recent` are the last ones of the new tokens, (b, <=w-1, channels);
        the answer are those before them, (b, w-1, channels), zeros at the start of a sequence."""
        before = recent.new_zeros(recent.shape[0], self._kept, recent.shape[2]) if self._tail is None else self._tail
        together = torch.cat((before, recent), dim=1)
        self._tail = together[:, together.shape[1] - self._kept :].clone()  # a view would keep all of it
        return before

    def state(self, added: Tensor, decay: Tensor) -> Tensor:
        """Exchange the state: new tokens multiply it by `decay` (b, G, 1, H/G * P) and add `added`
        (b, G, N, H/G * P); the answer is the state before them."""
        before = torch.zeros_like(added) if self._state is None else self._state
        self._state = torch.addcmul(added, before, decay)
        return before

    def tensors(self) -> tuple[Tensor, ...]:
        """What is held."""
        return tuple(t for t in (self._tail, self._state) if t is not None)


LayerCache = KeyValueCache | StateCache
