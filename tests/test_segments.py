"""Which tokens a cp rank holds: each once, in order, and in ring attention with the same share of the causal mask."""

from __future__ import annotations

import pytest

from hybridpar.parity_layouts import parity_run
from hybridpar.segments import order_of_pieces, pieces_of, segments_per_rank, token_spans

RANKS = (1, 2, 3, 4, 8)


def _tokens(length: int, rank: int, ranks: int, per_rank: int) -> list[int]:
    return [token for span in token_spans(length, rank, ranks, per_rank) for token in range(span.start, span.stop)]


@pytest.mark.parametrize("per_rank", [1, 2])
@pytest.mark.parametrize("ranks", RANKS)
def test_each_token_is_on_one_rank_and_a_rank_keeps_their_order(ranks: int, per_rank: int) -> None:
    held = [_tokens(48, rank, ranks, per_rank) for rank in range(ranks)]
    assert sorted(token for tokens in held for token in tokens) == list(range(48))
    assert all(tokens == sorted(tokens) for tokens in held)
    assert {len(tokens) for tokens in held} == {48 // ranks}


@pytest.mark.parametrize("ranks", RANKS)
def test_two_pieces_give_every_rank_the_same_share_of_a_causal_mask(ranks: int) -> None:
    """The token at position p sees p + 1 tokens."""
    work = [sum(token + 1 for token in _tokens(48, rank, ranks, 2)) for rank in range(ranks)]
    assert set(work) == {48 * 49 // 2 // ranks}


def test_one_piece_does_not() -> None:
    early, late = (sum(token + 1 for token in _tokens(48, rank, 2, 1)) for rank in range(2))
    assert late > 2 * early


@pytest.mark.parametrize("per_rank", [1, 2])
@pytest.mark.parametrize("ranks", RANKS)
def test_the_order_of_pieces_tells_where_each_lies(ranks: int, per_rank: int) -> None:
    order = order_of_pieces(ranks, per_rank)
    assert len(order) == ranks * per_rank
    for piece, (rank, place) in enumerate(order):
        assert pieces_of(rank, ranks, per_rank)[place] == piece


@pytest.mark.parametrize(
    ("family", "strategy", "pieces"),
    [
        ("transformer", {"cp": 2}, 2),
        ("hybrid", {"cp": 2}, 2),
        ("moe", {"cp": 4}, 2),
        ("mamba2", {"cp": 2}, 1),
        ("transformer", {"cp": 2, "cp_kind": "ulysses"}, 1),
        ("transformer", {"dp": 2}, 1),
    ],
)
def test_only_ring_attention_asks_for_two_pieces(family: str, strategy: dict[str, object], pieces: int) -> None:
    run = parity_run(family, strategy)
    assert segments_per_rank(run.model, run.strategy) == pieces
