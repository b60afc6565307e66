"""Context parallelism: the tokens of a sequence lie on several ranks. Attention and Mamba-2 each cross them their way.

Attention, ring: see `hybridpar.parallel.ring`. Attention, Ulysses (Jacobs et al. 2023, arXiv 2309.14509): one
all-to-all turns a rank's tokens of all heads into all tokens of its heads, another one turns the result back;
key/value heads that are too few are repeated before they are sent.

Mamba-2: a layer is linear in its state, so every rank works on its pieces from a state of zero, then all ranks gather
what each piece adds to the state and by how much it decays an older one, and put together the state before each of
theirs. One small all-gather for the tails of the convolution and one for the states, instead of a chain of cp messages
(Dao & Gu 2024, arXiv 2405.21060, section 8.2): the chain moves (cp-1)/cp of one state less, but waits cp times.

Symbols: b batch, S tokens of this rank, n ranks, H query heads, K key/value heads, h head_dim, E experts, k top_k.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
import torch.distributed as dist
from torch import Tensor

from hybridpar.models.attention import Core, successive_positions
from hybridpar.models.block import AttentionBlock, MambaBlock
from hybridpar.models.cache import KeyValueCache, StateCache
from hybridpar.models.lm import LanguageModel
from hybridpar.models.moe import MoE, first_places
from hybridpar.models.norm import statistics_dtype
from hybridpar.parallel.collectives import exchanged, gathered, gathered_without_gradient, mean_of_contributions
from hybridpar.parallel.ring import Ring, block_attention, joined, ring_attention
from hybridpar.segments import order_of_pieces, pieces_of, token_spans


@dataclass(frozen=True)
class Context:
    """How sequences lie on the ranks of a cp group."""

    group: dist.ProcessGroup
    kind: str
    pieces_per_rank: int
    overlap: bool

    def tokens_of_rank(self, tokens: Tensor) -> Tensor:
        """(b, n*S) of the whole sequence -> (b, S) of this rank."""
        spans = token_spans(tokens.shape[1], self.group.rank(), self.group.size(), self.pieces_per_rank)
        return torch.cat([tokens[:, span] for span in spans], dim=1)

    def positions(self, seen: int, length: int, device: torch.device) -> Tensor:
        """Where this rank's tokens stand, (S,); a token that follows a whole sequence lies on all ranks."""
        if seen:
            return successive_positions(seen, length, device)
        whole = torch.arange(length * self.group.size(), device=device)
        return self.tokens_of_rank(whole.unsqueeze(0)).squeeze(0)

    @cached_property
    def order(self) -> Sequence[tuple[int, int]]:
        """(rank, place on it) of each piece of the sequence, first to last."""
        return order_of_pieces(self.group.size(), self.pieces_per_rank)

    @cached_property
    def mine(self) -> tuple[int, ...]:
        """This rank's pieces."""
        return pieces_of(self.group.rank(), self.group.size(), self.pieces_per_rank)


def split_context(lm: LanguageModel, context: Context) -> None:
    """Let a model, or a stage, work on this rank's tokens; in place."""
    for block in lm.blocks.values():
        if isinstance(block, AttentionBlock):
            block.attention.positions = context.positions
            block.attention.core = _core(context, block.attention.core)
            block.new_cache = partial(ScatteredKeyValueCache, context)  # type: ignore[method-assign]
            if isinstance(block.mlp, MoE):
                _split_experts(block.mlp, context)
        if isinstance(block, MambaBlock):
            mix = block.mamba.mix
            block.mamba.mix = partial(_mix_pieces, mix, context)  # type: ignore[method-assign]


def _core(context: Context, core: Core) -> Core:
    if context.kind == "ring":
        return partial(ring_attention, ring=Ring(context.group, context.overlap))
    return partial(ulysses_attention, group=context.group, core=core)


def ulysses_attention(q: Tensor, k: Tensor, v: Tensor, *, group: dist.ProcessGroup, core: Core) -> Tensor:
    """Attention over the whole sequence for H/n heads: q (b, H, S, h), k and v (b, K, S, h) -> (b, H, S, h).

    Where n does not divide K, each key/value head is repeated n / gcd(n, K) times.
    """
    ranks = group.size()
    repeats = ranks // math.gcd(ranks, k.shape[1])
    if repeats > 1:
        k, v = (t.repeat_interleave(repeats, dim=1) for t in (k, v))
    heads = (q.shape[1] // ranks, k.shape[1] // ranks, k.shape[1] // ranks)
    packed = torch.cat([t.unflatten(1, (ranks, -1)) for t in (q, k, v)], dim=2)  # (b, n, heads, S, h)
    arrived = exchanged(packed.transpose(0, 1).contiguous(), group)  # (n, b, heads, S, h), by where tokens come from
    whole = arrived.permute(1, 2, 0, 3, 4).flatten(2, 3)  # (b, heads, n*S, h)
    out = core(*whole.split(heads, dim=1))
    parts = out.unflatten(2, (ranks, -1)).permute(2, 0, 1, 3, 4).contiguous()  # (n, b, H/n, S, h)
    return exchanged(parts, group).transpose(0, 1).flatten(1, 2)


def _mix_pieces(mix: Callable[..., Tensor], context: Context, x: Tensor, cache: StateCache | None = None) -> Tensor:
    """`Mamba2.mix` of this rank's pieces, as sequences of their own that start from each other's states."""
    if cache is not None and cache.tensors():
        return mix(x, cache)  # a token after the prompt: every rank has the state, and does the same
    batch, pieces = x.shape[0], context.pieces_per_rank
    y = mix(x.unflatten(1, (pieces, -1)).flatten(0, 1), _PiecesBefore(context, batch, cache))
    return y.unflatten(0, (batch, pieces)).flatten(1, 2)


class _PiecesBefore:
    """What the pieces of a sequence know of the pieces before them; see `hybridpar.models.mamba2.Before`."""

    def __init__(self, context: Context, batch: int, cache: StateCache | None) -> None:
        self._context, self._batch, self._cache = context, batch, cache

    def tail(self, recent: Tensor) -> Tensor:
        pieces = self._in_order(recent)
        if self._cache is not None:
            self._cache.tail(pieces[-1])
        before = [torch.zeros_like(pieces[0]), *pieces[:-1]]
        return self._of_mine(before)

    def state(self, added: Tensor, decay: Tensor) -> Tensor:
        both = self._in_order(torch.cat((added, decay), dim=2))
        state = torch.zeros_like(both[0][:, :, :-1])
        before = []
        for piece in both:
            before.append(state)
            state = torch.addcmul(piece[:, :, :-1], state, piece[:, :, -1:])
        if self._cache is not None:
            self._cache.state(state, torch.zeros_like(both[0][:, :, -1:]))
        return self._of_mine(before)

    def _in_order(self, mine: Tensor) -> list[Tensor]:
        """(b * pieces, ...) of each rank -> (b, ...) of every piece of the sequence, first to last."""
        everywhere = gathered(mine, self._context.group).unflatten(1, (self._batch, -1))
        return [everywhere[rank, :, place] for rank, place in self._context.order]

    def _of_mine(self, pieces: Sequence[Tensor]) -> Tensor:
        # Chosen from all of them, so that every rank's graph leads back to the gather, whose backward all must join.
        return torch.stack(list(pieces), dim=1)[:, list(self._context.mine)].flatten(0, 1)


def _split_experts(moe: MoE, context: Context) -> None:
    moe.mean_over_tokens = partial(mean_of_contributions, group=context.group)
    moe.places_before = partial(_places_before, context)
    moe.sequence_length = partial(_whole_length, context)


def _whole_length(context: Context, length: int) -> int:
    return length * context.group.size()


def _places_before(context: Context, wanted: Tensor) -> Tensor:
    """`hybridpar.models.moe.first_places` over the whole sequence: (b, k, S, E) -> (b, k, S, E)."""
    pieces = wanted.unflatten(2, (context.pieces_per_rank, -1))  # (b, k, pieces, S/pieces, E)
    everywhere = gathered_without_gradient(pieces.sum(3), context.group)
    in_order = torch.stack([everywhere[rank, :, :, place] for rank, place in context.order], dim=2)
    first = first_places(in_order)[:, :, list(context.mine)]  # (b, k, pieces, E)
    within = pieces.cumsum(3) - pieces
    return (first.unsqueeze(3) + within).flatten(2, 3)


class ScatteredKeyValueCache(KeyValueCache):
    """Keys and values of a sequence over the ranks of a cp group: of the prompt each keeps those it computed, tokens
    after it go to one rank after the other. A new token looks at each rank's share, and the partial softmaxes meet."""

    def __init__(self, context: Context, capacity: int) -> None:
        super().__init__(capacity)
        self._context = context
        self._stored = 0

    def attend(self, q: Tensor, k: Tensor, v: Tensor, core: Core) -> Tensor:
        """See `KeyValueCache.attend`; S is this rank's part of a prompt, or 1 token that is the same on all ranks."""
        group = self._context.group
        if not self.length:
            self.length = k.shape[2] * group.size()
            self._put(k, v)
            return core(q, k, v)
        turn = self.length % group.size()
        self.length += 1
        if turn == group.rank():
            self._put(k, v)
        out, total = block_attention(q, *self.held(), causal=False)
        dtype = statistics_dtype(q)
        everywhere = gathered_without_gradient(torch.cat((out.to(dtype), total.to(dtype).unsqueeze(-1)), -1), group)
        out, total = everywhere[0, ..., :-1], everywhere[0, ..., -1]
        for part in everywhere[1:]:
            out, total = joined(out, total, part[..., :-1], part[..., -1])
        return out.to(q.dtype)

    def held(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the tokens that this rank keeps."""
        assert self._keys is not None  # the prompt came first
        assert self._values is not None
        return self._keys[:, :, : self._stored], self._values[:, :, : self._stored]

    def _put(self, k: Tensor, v: Tensor) -> None:
        if self._keys is None:
            later = -(-(self.capacity - self.length) // self._context.group.size())
            self.capacity = k.shape[2] + later
        self._store(k, v, self._stored)
        self._stored += k.shape[2]
