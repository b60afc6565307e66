"""Experts dealt out over ranks: tokens travel to them and back, however many go where, and nothing is lost."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hybridpar.comm.process_group import ProcessMesh
from hybridpar.models.init import initialise
from hybridpar.models.lm import LanguageModel
from hybridpar.models.moe import Experts
from hybridpar.parallel.experts import _answers_from_owners, moe_layers
from hybridpar.parallel.sharding import part
from hybridpar.specs import Strategy
from tests.parallel.ranks import on_ranks, parity_run

HIDDEN, FFN = 6, 4

# Tokens that each rank sends to each of five experts, for as many ranks as rows.
CROWDS = {
    "all experts, unevenly": [[3, 0, 1, 2, 4], [1, 5, 0, 2, 2]],
    "everybody to one expert": [[0, 0, 0, 0, 7], [0, 0, 0, 0, 2]],
    "a rank that sends nothing": [[0, 0, 0, 0, 0], [2, 1, 3, 1, 1]],
    "nobody sends anything": [[0, 0, 0, 0, 0], [0, 0, 0, 0, 0]],
    "five experts on three ranks": [[2, 1, 0, 3, 1], [1, 1, 1, 1, 1], [0, 4, 2, 0, 1]],
}


def _experts() -> Experts:
    experts = Experts(5, HIDDEN, FFN).double()
    generator = torch.Generator().manual_seed(2)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    return experts


def _tokens(counts: list[int], rank: int) -> Tensor:
    return torch.randn(sum(counts), HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(10 + rank))


def _of_rank(experts: Experts, span: slice) -> Experts:
    mine = Experts(span.stop - span.start, HIDDEN, FFN).double()
    for name, parameter in experts.named_parameters():
        mine.get_parameter(name).data = parameter.data[span].clone()
    return mine


def _answers(experts: Experts, call: partial[Tensor] | None, x: Tensor, counts: list[int]) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    out = (call or experts)(x, torch.tensor(counts))
    out.square().sum().backward()
    assert x.grad is not None
    grads = {name: p.grad for name, p in experts.named_parameters() if p.grad is not None}
    return {"out": out.detach(), "x": x.grad, **grads}


@pytest.mark.parametrize("crowd", CROWDS.values(), ids=CROWDS)
def test_answers_and_gradients_are_those_of_all_experts_on_one_device(tmp_path: Path, crowd: list[list[int]]) -> None:
    spans = [part(5, len(crowd), rank) for rank in range(len(crowd))]

    def body(mesh: ProcessMesh) -> dict[str, Tensor]:
        group = mesh.group("dp")
        rank = group.rank()
        mine = _of_rank(_experts(), spans[rank])
        owned = [span.stop - span.start for span in spans]
        call = partial(_answers_from_owners, mine.forward, owned, group)
        return _answers(mine, call, _tokens(crowd[rank], rank), crowd[rank])

    found = on_ranks(Strategy(dp=len(crowd)), tmp_path, body)
    dense = [_answers(_experts(), None, _tokens(counts, rank), counts) for rank, counts in enumerate(crowd)]
    for ours, theirs in zip(found, dense, strict=True):
        for name in ("out", "x"):
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-12, atol=1e-12)
    for name in ("w_gate", "w_up", "w_down"):
        whole = torch.cat([ours[name] for ours in found])  # each expert saw the tokens of all ranks
        torch.testing.assert_close(whole, sum(theirs[name] for theirs in dense), rtol=1e-12, atol=1e-12)


def test_the_expert_layers_of_a_model_are_found_among_others() -> None:
    run = parity_run("moe")
    lm = LanguageModel(run.model)
    initialise(lm, run.model, run.seed)
    assert len(moe_layers(lm)) == run.model.layers
    assert moe_layers(LanguageModel(parity_run("transformer").model)) == []
