"""Tokens of a sequence on several ranks: who has which, and attention and Mamba-2 that see all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hybridpar.comm.process_group import ProcessMesh
from hybridpar.models.attention import causal_attention
from hybridpar.models.block import MambaBlock
from hybridpar.models.init import initialise
from hybridpar.models.lm import LanguageModel
from hybridpar.models.mamba2 import Mamba2
from hybridpar.models.moe import first_places
from hybridpar.parallel.context import Context, _mix_pieces, _places_before, ulysses_attention
from hybridpar.specs import Strategy
from tests.parallel.ranks import on_ranks, parity_run


def _context(mesh: ProcessMesh, kind: str = "ring", pieces: int = 2) -> Context:
    return Context(mesh.group("cp"), kind, pieces, overlap=True)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_rank_has_an_early_and_a_late_piece_and_all_have_every_token_once(tmp_path: Path, ranks: int) -> None:
    def body(mesh: ProcessMesh) -> list[int]:
        context = _context(mesh)
        whole = torch.arange(8 * ranks).unsqueeze(0)
        assert torch.equal(context.tokens_of_rank(whole)[0], context.positions(0, 8, mesh.device))
        return context.positions(0, 8, mesh.device).tolist()

    found = on_ranks(Strategy(cp=ranks), tmp_path, body)
    assert sorted(token for mine in found for token in mine) == list(range(8 * ranks))
    work = {sum(mine) for mine in found}  # a token looks at all tokens before it
    assert len(work) == 1, "causal attention is balanced"


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (8, 1), (12, 3)])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ulysses_is_dense_attention_with_any_number_of_key_heads(
    tmp_path: Path, ranks: int, heads: int, kv_heads: int
) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v, grad = (
        torch.randn(2, n, 3 * ranks, 6, dtype=torch.float64, generator=generator)
        for n in (heads, kv_heads, kv_heads, heads)
    )

    def with_gradients(parts: list[torch.Tensor], out: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
        return [out.detach(), *torch.autograd.grad(out, parts, grad)]

    def body(mesh: ProcessMesh) -> list[torch.Tensor]:
        group = mesh.group("cp")
        mine = [t.chunk(ranks, dim=2)[group.rank()] for t in (q, k, v, grad)]
        parts = [t.clone().requires_grad_() for t in mine[:3]]
        return with_gradients(parts, ulysses_attention(*parts, group=group, core=causal_attention), mine[3])

    found = on_ranks(Strategy(cp=ranks), tmp_path, body)
    dense = [t.clone().requires_grad_() for t in (q, k, v)]
    expected = with_gradients(dense, causal_attention(*dense), grad)
    for index, whole in enumerate(expected):
        torch.testing.assert_close(torch.cat([mine[index] for mine in found], dim=2), whole, rtol=1e-12, atol=1e-12)


def _mamba() -> tuple[Mamba2, torch.Tensor]:
    run = parity_run("mamba2")
    lm = LanguageModel(run.model).double()
    initialise(lm, run.model, run.seed)
    block = lm.blocks["0"]
    assert isinstance(block, MambaBlock)
    generator = torch.Generator().manual_seed(3)
    return block.mamba, torch.randn(2, 48, run.model.hidden, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize(("ranks", "pieces"), [(1, 1), (2, 1), (2, 2), (3, 1), (4, 2)])
def test_mamba_passes_its_state_from_piece_to_piece(tmp_path: Path, ranks: int, pieces: int) -> None:
    """Pieces of 48, 24, 12, 16 and 6 tokens, in chunks of 7: a piece may be shorter than a chunk."""

    def run(mix: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.clone().requires_grad_()
        out = mix(x)
        out.square().sum().backward()
        assert x.grad is not None
        return out.detach(), x.grad

    def body(mesh: ProcessMesh) -> list[tuple[torch.Tensor, torch.Tensor]]:
        context = _context(mesh, pieces=pieces)
        mamba, whole = _mamba()
        dense = run(mamba.mix, whole)
        split = run(lambda x: _mix_pieces(mamba.mix, context, x), context.tokens_of_rank(whole))
        return [(ours, context.tokens_of_rank(theirs)) for ours, theirs in zip(split, dense, strict=True)]

    for pairs in on_ranks(Strategy(cp=ranks), tmp_path, body):
        for ours, theirs in pairs:
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_a_token_waits_for_its_place_at_an_expert_behind_all_earlier_tokens(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    wanted = torch.randint(0, 2, (2, 2, 24, 3), generator=generator)  # (b, k, S, E)
    dense = first_places(wanted)  # that of each token is what the tokens before it wanted

    def body(mesh: ProcessMesh) -> bool:
        context = _context(mesh)

        def mine(t: torch.Tensor) -> torch.Tensor:
            tokens = context.positions(0, 24 // context.group.size(), mesh.device)
            return t[:, :, tokens]

        return torch.equal(_places_before(context, mine(wanted)), mine(dense))

    assert on_ranks(Strategy(cp=3), tmp_path, body) == [True] * 3
