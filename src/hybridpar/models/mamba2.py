"""Mamba-2: the state-space dual (SSD) layer, computed in chunks.

Source: Dao & Gu 2024, arXiv 2405.21060: recurrence eq. (2), block decomposition section 6, block figure 6
("parallel projection" with grouped norm). Symbols:
    b batch, S tokens, d hidden, E expand, H = E*d/P heads, P head width, N state size, G groups sharing B and C,
    C chunk length, Q = ceil(S/C) chunks, a_t = exp(dt_t * A) decay of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from hybridpar.models.norm import statistics_dtype


def segment_decay(log_decay: Tensor) -> Tensor:
    """L[i, j] = prod_{t=j+1..i} a_t for i >= j, else 0.

    Args:
        log_decay: log a_t, (..., C).

    Returns:
        (..., C, C).
    """
    total = log_decay.cumsum(-1)
    difference = total.unsqueeze(-1) - total.unsqueeze(-2)
    length = log_decay.shape[-1]
    future = torch.ones(length, length, dtype=torch.bool, device=log_decay.device).triu(1)
    return difference.masked_fill_(future, float("-inf")).exp()


Carry = Callable[[Tensor, Tensor], Tensor]


def ssd(
    x: Tensor, dt: Tensor, log_a: Tensor, b_in: Tensor, c_out: Tensor, chunk: int, carry: Carry | None = None
) -> Tensor:
    """h_t = a_t h_{t-1} + dt_t B_t x_t^T, y_t = C_t^T h_t, for all t, in chunks.

    Args:
        x: inputs, (b, S, H, P).
        dt: step sizes, (b, S, H).
        log_a: A of each head, negative, (H,).
        b_in: B, (b, S, G, N).
        c_out: C, (b, S, G, N).
        chunk: C, tokens per chunk; a ragged last chunk is padded with dt = 0, which changes no state.
        carry: given what all S tokens add to the state (b, G, N, H/G * P) and by how much they multiply an older
            one (b, G, 1, H/G * P), answers with the state before them; without it that is zero.

    Returns:
        y, (b, S, H, P).
    """
    batch, length, heads, width = x.shape
    groups, state = b_in.shape[-2:]
    padding = -length % chunk
    if padding:
        x, b_in, c_out = (functional.pad(t, (0, 0, 0, 0, 0, padding)) for t in (x, b_in, c_out))
        dt = functional.pad(dt, (0, 0, 0, padding))
    chunks = (length + padding) // chunk
    heads_per_group = heads // groups
    inputs = (x * dt.unsqueeze(-1)).view(batch, chunks, chunk, groups, heads_per_group, width)
    log_decay = (dt * log_a).view(batch, chunks, chunk, groups, heads_per_group).permute(0, 1, 3, 4, 2)
    total = log_decay.cumsum(-1)
    b_in = b_in.view(batch, chunks, chunk, groups, state).transpose(2, 3)
    c_out = c_out.view(batch, chunks, chunk, groups, state).transpose(2, 3)

    # 1. within a chunk: (C B^T * L) X, (b, Q, G, H/G, C, P)
    scores = (c_out @ b_in.mT).unsqueeze(3) * segment_decay(log_decay)
    within = scores @ inputs.permute(0, 1, 3, 4, 2, 5)
    # 2. what each chunk adds to the state: sum_t (decay to the chunk's end) B_t x_t^T, (b, Q, G, N, H/G * P): the
    #    heads of a group share B and C, so they lie side by side in one wide product, here and in 4.
    to_end = (total[..., -1:] - total).exp().permute(0, 1, 4, 2, 3).unsqueeze(-1)
    added = b_in.mT @ (inputs * to_end).transpose(2, 3).flatten(-2)
    # 3. states at the chunk borders: a recurrence over Q chunks, as one small matrix product
    before = torch.zeros_like(added[:, :1])
    if chunks > 1:
        decay = segment_decay(total[:, :-1, ..., -1].permute(0, 2, 3, 1))
        flat = added[:, :-1].unflatten(-1, (heads_per_group, width)).permute(0, 2, 4, 1, 3, 5).flatten(-2)
        carried = (decay @ flat).unflatten(-1, (state, width)).permute(0, 3, 1, 4, 2, 5).flatten(-2)
        before = torch.cat((before, carried), dim=1)
    if carry is not None:
        before = _from_state_before(before, added, total[..., -1], width, carry)
    # 4. what the states before a chunk give to its outputs, (b, Q, G, C, H/G, P)
    across = (c_out @ before).unflatten(-1, (heads_per_group, width))
    out = torch.addcmul(within.transpose(3, 4), across, total.exp().transpose(3, 4).unsqueeze(-1))
    return out.transpose(2, 3).reshape(batch, chunks * chunk, heads, width)[:, :length]


def _from_state_before(before: Tensor, added: Tensor, log_decay: Tensor, width: int, carry: Carry) -> Tensor:
    """States before each chunk, (b, Q, G, N, H/G * P), when the sequence itself starts from a state.

    Args:
        before: the same, started from zero.
        added: what each chunk adds, (b, Q, G, N, H/G * P).
        log_decay: log of each chunk's decay, (b, Q, G, H/G).
        width: P.
        carry: see `ssd`.
    """
    decay = log_decay.exp().repeat_interleave(width, dim=-1).unsqueeze(-2)
    initial = carry(torch.addcmul(added[:, -1], before[:, -1], decay[:, -1]), decay.prod(1))
    until = torch.cat((torch.ones_like(decay[:, :1]), decay[:, :-1].cumprod(1)), dim=1)
    return torch.addcmul(before, until, initial.unsqueeze(1))


def causal_convolution(x: Tensor, weight: Tensor, bias: Tensor, tail: Tensor | None = None) -> Tensor:
    """Depthwise causal convolution along the sequence.

    Args:
        x: (b, S, channels).
        weight: (channels, 1, width); the last tap is the current token.
        bias: (channels,).
        tail: the inputs before x, (b, width - 1, channels); zeros where there are none.

    Returns:
        (b, S, channels).
    """
    channels, _, width = weight.shape
    if tail is None:
        padded = functional.pad(x.transpose(1, 2), (width - 1, 0))
    else:
        padded = torch.cat((tail, x), dim=1).transpose(1, 2)
    return functional.conv1d(padded, weight, bias, groups=channels).transpose(1, 2)


class Before(Protocol):
    """What a Mamba-2 layer must know of the tokens before its input; see `hybridpar.models.cache.StateCache`."""

    def tail(self, recent: Tensor) -> Tensor:
        """The w-1 inputs of the convolution before the input, (b, w-1, channels), for its own last ones."""
        ...

    def state(self, added: Tensor, decay: Tensor) -> Tensor:
        """The state before the input, for what the input adds to it and multiplies it by; see `ssd`."""
        ...


class CausalConvolution(nn.Module):
    """Depthwise causal convolution with SiLU."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))
        self.bias = nn.Parameter(torch.empty(channels))

    def forward(self, x: Tensor, tail: Tensor | None = None) -> Tensor:
        """x (b, S, channels), after tail (b, width - 1, channels) -> (b, S, channels)."""
        return functional.silu(causal_convolution(x, self.weight, self.bias, tail))


class GatedRMSNorm(nn.Module):
    """w * u / sqrt(mean over the group of u^2 + eps), u = y * silu(z), in G groups of E*d/G channels.

    `group_width` is the number of channels the mean divides by. It is an attribute, and the sum of squares a
    method, because a group may be computed in parts.
    """

    def __init__(self, width: int, groups: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.groups, self.group_width, self.eps = groups, width // groups, eps

    def forward(self, y: Tensor, z: Tensor) -> Tensor:
        """y, z (b, S, E*d) -> (b, S, E*d)."""
        gated = self.gate(y, z)
        scale = self.scale(self.sum_of_squares(gated))
        return (gated.unflatten(-1, (self.groups, -1)) * scale).flatten(-2).to(y.dtype) * self.weight

    def gate(self, y: Tensor, z: Tensor) -> Tensor:
        """u = y * silu(z) in the dtype of the statistics."""
        dtype = statistics_dtype(y)
        return y.to(dtype) * functional.silu(z.to(dtype))

    def sum_of_squares(self, gated: Tensor) -> Tensor:
        """Sum of u^2 over each group, (b, S, G, 1)."""
        return gated.unflatten(-1, (self.groups, -1)).square().sum(-1, keepdim=True)

    def scale(self, squares: Tensor) -> Tensor:
        """1 / sqrt(mean + eps), the shape of `squares`."""
        return torch.rsqrt(squares / self.group_width + self.eps)


class Mamba2(nn.Module):
    """One Mamba-2 mixer: projections of x in parallel, convolution, SSD, gated norm, output projection."""

    def __init__(
        self, hidden: int, heads: int, head_dim: int, groups: int, state: int, conv: int, chunk: int, eps: float
    ) -> None:
        super().__init__()
        self.heads, self.head_dim, self.groups, self.state, self.chunk = heads, head_dim, groups, state, chunk
        inner = heads * head_dim
        self.w_z = nn.Linear(hidden, inner, bias=False)
        self.w_x = nn.Linear(hidden, inner, bias=False)
        self.w_B = nn.Linear(hidden, groups * state, bias=False)
        self.w_C = nn.Linear(hidden, groups * state, bias=False)
        self.w_dt = nn.Linear(hidden, heads, bias=False)
        self.conv_x = CausalConvolution(inner, conv)
        self.conv_B = CausalConvolution(groups * state, conv)
        self.conv_C = CausalConvolution(groups * state, conv)
        self.A_log = nn.Parameter(torch.empty(heads))
        self.D = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.norm = GatedRMSNorm(inner, groups, eps)
        self.w_out = nn.Linear(inner, hidden, bias=False)
        self.scan: Callable[..., Tensor] = ssd

    def forward(self, x: Tensor, before: Before | None = None) -> Tensor:
        """x (b, S, d) -> (b, S, d); `before` knows the tokens before x, if there are any."""
        return self.w_out(self.norm(self.mix(x, before), self.w_z(x)))

    def mix(self, x: Tensor, before: Before | None = None) -> Tensor:
        """Everything before the gate, (b, S, d) -> (b, S, E*d)."""
        batch, length, _ = x.shape
        raw = (self.w_x(x), self.w_B(x), self.w_C(x))
        tails = (None, None, None) if before is None else self._tails(raw, before)
        inputs = self.conv_x(raw[0], tails[0]).view(batch, length, self.heads, self.head_dim)
        b_in = self.conv_B(raw[1], tails[1]).view(batch, length, self.groups, self.state)
        c_out = self.conv_C(raw[2], tails[2]).view(batch, length, self.groups, self.state)
        dtype = statistics_dtype(x)
        dt = functional.softplus((self.w_dt(x) + self.dt_bias).to(dtype))
        log_a = -self.A_log.to(dtype).exp()
        chunk, carry = (self.chunk, None) if before is None else (min(self.chunk, length), before.state)
        y = self.scan(inputs.to(dtype), dt, log_a, b_in.to(dtype), c_out.to(dtype), chunk, carry).to(x.dtype)
        return torch.addcmul(y, inputs, self.D.unsqueeze(-1)).flatten(-2)

    def _tails(self, raw: Sequence[Tensor], before: Before) -> tuple[Tensor, ...]:
        """What came before x at the inputs of the three convolutions, asked for together."""
        kept = self.conv_x.weight.shape[-1] - 1
        recent = torch.cat([t[:, max(0, t.shape[1] - kept) :] for t in raw], dim=-1)
        return before.tail(recent).split([t.shape[-1] for t in raw], dim=-1)
