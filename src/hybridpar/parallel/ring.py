"""Ring attention over a balanced split of a causal sequence: keys and values travel, queries stay.

Every rank holds two pieces of the sequence (`hybridpar.segments`), in order. In step s it works on the keys and values
of rank r-s, while they already travel on to rank r+1. Keys and values of an earlier rank: only their first half lies
before this rank's tokens, and wholly so. Of a later rank: they lie between this rank's two halves, so the second half
sees all of them. Either is half a block without a mask; only a rank's own block needs one.

Source: Liu et al. 2023, arXiv 2310.01889 (ring); partial softmaxes are joined by their log-sum-exp as in FlashAttention
(Dao et al. 2022, arXiv 2205.14135). Symbols: b batch, H query heads, K key/value heads, S tokens of this rank, h
head_dim, n ranks of the ring, r this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from hybridpar.models.norm import statistics_dtype

_KEYS, _GRADIENTS = 0, 1  # tags of the two kinds of messages that are on their way at once


@dataclass(frozen=True)
class Ring:
    """The cp group in ring order; with `overlap` blocks travel while the block before is worked on."""

    group: dist.ProcessGroup
    overlap: bool

    def pass_on(self, block: Tensor, tag: int) -> _InFlight:
        """Send a block to the next rank and receive the previous one's."""
        rank, size = self.group.rank(), self.group.size()
        if size == 1:
            return _InFlight(block, block, [])  # a rank is its own neighbour, to whom gloo cannot send
        received = torch.empty_like(block)

        def send() -> dist.Work | None:
            return dist.isend(block, group=self.group, group_dst=(rank + 1) % size, tag=tag)

        def receive() -> dist.Work | None:
            return dist.irecv(received, group=self.group, group_src=(rank - 1) % size, tag=tag)

        # Where a transfer begins only when both ends are there (NCCL), all may not begin by sending.
        works = [send(), receive()] if rank % 2 == 0 else [receive(), send()]
        flight = _InFlight(block, received, works)
        if not self.overlap:
            flight.land()
        return flight


@dataclass
class _InFlight:
    sent: Tensor  # kept alive until it has left
    received: Tensor
    works: list[dist.Work | None]

    def land(self) -> Tensor:
        for work in self.works:
            if work is not None:
                work.wait()
        self.works = []
        return self.received


def block_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """softmax(q k^T / sqrt(h)) v of a block and the log-sum-exp of its scores.

    Args:
        q: (b, H, S, h).
        k: (b, K, T, h).
        v: (b, K, T, h).
        causal: whether token i sees tokens up to i only (S = T).

    Returns:
        (b, H, S, h), and (b, H, S) in the dtype of statistics.
    """
    keys, values = _shared_by_queries(q, k, v)
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, keys, values, 0.0, causal)
    scores = _scores(q, keys, causal=causal)
    total = scores.logsumexp(-1)
    return ((scores - total.unsqueeze(-1)).exp().to(v.dtype) @ values), total


def block_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, total: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a block of q, k and v, given the whole row's output and log-sum-exp; shapes as in
    `block_attention`, those of k and v in the dtype of statistics."""
    keys, values = _shared_by_queries(q, k, v)
    dtype = statistics_dtype(q)
    if q.device.type == "cpu":
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = backward(grad, q, keys, values, out, total, 0.0, causal)
    else:
        weights = (_scores(q, keys, causal=causal) - total.unsqueeze(-1)).exp()
        wide = grad.to(dtype)
        dv = weights.mT @ wide
        row = (wide * out.to(dtype)).sum(-1, keepdim=True)
        d_scores = weights * (wide @ values.to(dtype).mT - row) * q.shape[-1] ** -0.5
        dq, dk = d_scores @ keys.to(dtype), d_scores.mT @ q.to(dtype)
    queries = q.shape[1] // k.shape[1]
    return dq, *(t.to(dtype).unflatten(1, (-1, queries)).sum(2) for t in (dk, dv))


def _scores(q: Tensor, keys: Tensor, *, causal: bool) -> Tensor:
    scores = (q @ keys.mT).to(statistics_dtype(q)) * q.shape[-1] ** -0.5
    if not causal:
        return scores
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(future, float("-inf"))


def _shared_by_queries(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values once for each query head."""
    queries = q.shape[1] // k.shape[1]
    if queries == 1:
        return k, v
    return k.repeat_interleave(queries, dim=1), v.repeat_interleave(queries, dim=1)


def joined(out: Tensor, total: Tensor, more: Tensor, more_total: Tensor) -> tuple[Tensor, Tensor]:
    """Two partial softmaxes over different keys as one; outputs (b, H, S, h), log-sum-exps (b, H, S)."""
    both = torch.logaddexp(total, more_total)
    return (
        out * (total - both).exp().unsqueeze(-1) + more.to(out.dtype) * (more_total - both).exp().unsqueeze(-1),
        both,
    )


class _RingAttention(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Tensor:
        rank, size, half = ring.group.rank(), ring.group.size(), q.shape[2] // 2
        block = torch.stack((k, v))
        for step in range(size):
            flight = ring.pass_on(block, _KEYS) if step < size - 1 else None
            if step == 0:
                first, total = block_attention(q, k, v, causal=True)
                out = first.to(statistics_dtype(q))
            elif step <= rank:
                part = block_attention(q, *block[:, :, :, :half], causal=False)
                out, total = joined(out, total, *part)
            else:
                part = block_attention(q[:, :, half:], *block, causal=False)
                late = joined(out[:, :, half:], total[:, :, half:], *part)
                out[:, :, half:], total[:, :, half:] = late  # in place: the output keeps the layout that W_o reads
            block = block if flight is None else flight.land()
        out = out.to(q.dtype)
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, out, total)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, total = ctx.saved_tensors
        ring: Ring = ctx.ring
        rank, size, half = ring.group.rank(), ring.group.size(), q.shape[2] // 2
        grad, block = grads[0].contiguous(), torch.stack((k, v))
        dq = torch.zeros(q.shape, dtype=statistics_dtype(q), device=q.device)
        collected: _InFlight | None = None
        for step in range(size):
            flight = ring.pass_on(block, _KEYS) if step < size - 1 else None
            mine = torch.zeros(block.shape, dtype=dq.dtype, device=q.device)
            if step == 0:
                part = block_attention_backward(grad, q, k, v, out, total, causal=True)
                dq += part[0]
                mine += torch.stack(part[1:])
            elif step <= rank:
                early = block[0][:, :, :half], block[1][:, :, :half]
                part = block_attention_backward(grad, q, *early, out, total, causal=False)
                dq += part[0]
                mine[:, :, :, :half] += torch.stack(part[1:])
            else:
                late = [t[:, :, half:] for t in (grad, q)]
                seen = [t[:, :, half:] for t in (out, total)]
                part = block_attention_backward(late[0], late[1], block[0], block[1], *seen, causal=False)
                dq[:, :, half:] += part[0]
                mine += torch.stack(part[1:])
            if collected is not None:
                mine += collected.land()
            collected = ring.pass_on(mine, _GRADIENTS)  # the gradient follows its block, and comes home at last
            block = block if flight is None else flight.land()
        assert collected is not None
        dk, dv = collected.land().to(k.dtype)
        return dq.to(q.dtype), dk, dv, None


def ring_attention(q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Tensor:
    """Causal attention of this rank's two pieces over the whole sequence: q (b, H, S, h), k and v (b, K, S, h)."""
    return _RingAttention.apply(q, k, v, ring)
