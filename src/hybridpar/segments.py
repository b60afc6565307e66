"""Which tokens of a sequence a cp rank holds. No torch here.

A causal mask gives late tokens more to see than early ones. Ring attention therefore cuts a sequence into 2*cp pieces
and gives rank r the pieces r and 2*cp-1-r, whose shares of the mask add up to the same for every rank (zig-zag; first
in Megatron-LM's context parallelism and in Brandon et al. 2023, "Striped Attention", arXiv 2311.09431, for the
problem). Ulysses exchanges heads for tokens, and Mamba-2 does the same work for every token, so for them rank r simply
holds piece r of cp.
"""

from __future__ import annotations

from collections.abc import Sequence

from hybridpar.specs import ModelSpec, Strategy


def segments_per_rank(model: ModelSpec, strategy: Strategy) -> int:
    """How many pieces of a sequence each cp rank holds: 2 for ring attention, else 1."""
    balances = strategy.cp > 1 and strategy.cp_kind == "ring" and bool(set(model.layer_kinds) & set("AE"))
    return 2 if balances else 1


def pieces_of(rank: int, ranks: int, per_rank: int) -> tuple[int, ...]:
    """The pieces of the sequence that one cp rank holds, in the order of the sequence."""
    return (rank,) if per_rank == 1 else (rank, 2 * ranks - 1 - rank)


def order_of_pieces(ranks: int, per_rank: int) -> Sequence[tuple[int, int]]:
    """For each piece of the sequence, first to last, (rank, place among that rank's pieces)."""
    holders = {
        piece: (rank, place) for rank in range(ranks) for place, piece in enumerate(pieces_of(rank, ranks, per_rank))
    }
    return [holders[piece] for piece in range(ranks * per_rank)]


def token_spans(length: int, rank: int, ranks: int, per_rank: int) -> tuple[slice, ...]:
    """The tokens that one cp rank holds of a sequence of `length`, in order."""
    size = length // (ranks * per_rank)
    return tuple(slice(piece * size, (piece + 1) * size) for piece in pieces_of(rank, ranks, per_rank))
