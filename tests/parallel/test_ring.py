"""Ring attention is dense causal attention: its output and the gradients of queries, keys and values, in float64."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hybridpar.comm.process_group import ProcessMesh
from hybridpar.parallel.ring import Ring, block_attention, block_attention_backward, joined, ring_attention
from hybridpar.segments import token_spans
from hybridpar.specs import Strategy
from tests.parallel.ranks import on_ranks


@dataclass(frozen=True)
class Case:
    batch: int
    heads: int
    kv_heads: int
    piece: int  # tokens in one of the two pieces of a rank
    head_dim: int


CASES = (
    Case(2, 4, 4, 4, 8),
    Case(1, 6, 2, 5, 6),  # shared keys
    Case(3, 3, 1, 7, 5),  # one key head, odd sizes
    Case(1, 1, 1, 1, 2),  # a token a piece
)


def _drawn(case: Case, ranks: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and the gradient of the output, of the whole sequence."""
    generator = torch.Generator().manual_seed(ranks)
    heads = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    q, k, v, grad = (
        torch.randn(case.batch, n, 2 * ranks * case.piece, case.head_dim, dtype=torch.float64, generator=generator)
        for n in heads
    )
    return 3 * q, k, v, grad  # some scores stand out


def _dense(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True) -> Tensor:
    """The textbook softmax."""
    share = q.shape[1] // k.shape[1]
    keys, values = (torch.cat([t[:, [i // share]] for i in range(q.shape[1])], dim=1) for t in (k, v))
    scores = q @ keys.mT / q.shape[-1] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    return scores.softmax(-1) @ values


def _with_gradients(out: Tensor, inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def _in_a_ring(case: Case, mesh: ProcessMesh, *, overlap: bool) -> list[tuple[Tensor, Tensor]]:
    """This rank's output and gradients, each beside the same tokens of the dense ones."""
    group = mesh.group("cp")
    whole = _drawn(case, group.size())

    def mine(t: Tensor) -> Tensor:
        return torch.cat([t[:, :, span] for span in token_spans(t.shape[2], group.rank(), group.size(), 2)], dim=2)

    parts = [mine(t).requires_grad_() for t in whole[:3]]
    q, k, v = parts
    ours = _with_gradients(ring_attention(q, k, v, Ring(group, overlap)), parts, mine(whole[3]))
    dense = [t.clone().requires_grad_() for t in whole[:3]]
    theirs = _with_gradients(_dense(*dense), dense, whole[3])
    return [(our, mine(their)) for our, their in zip(ours, theirs, strict=True)]


@pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "in turn"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_output_and_gradients_are_the_dense_ones(tmp_path: Path, ranks: int, overlap: bool) -> None:
    def body(mesh: ProcessMesh) -> list[list[tuple[Tensor, Tensor]]]:
        return [_in_a_ring(case, mesh, overlap=overlap) for case in CASES]

    for found in on_ranks(Strategy(cp=ranks), tmp_path, body):
        for case, pairs in zip(CASES, found, strict=True):
            for name, (ours, theirs) in zip(("output", "q", "k", "v"), pairs, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10, msg=f"{name} of {case}")


def _block(causal: bool) -> tuple[list[Tensor], Tensor]:
    q, k, v, grad = _drawn(Case(2, 4, 2, 3, 6), 1)
    return [q, k, v] if causal else [q, k[:, :, :4].contiguous(), v[:, :, :4].contiguous()], grad


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "whole"])
def test_a_block_knows_the_log_of_the_sum_of_its_exponentials(causal: bool) -> None:
    (q, k, v), _ = _block(causal)
    out, total = block_attention(q, k, v, causal=causal)
    scores = q @ k.repeat_interleave(2, dim=1).mT / 6**0.5
    if causal:
        scores = scores.masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), float("-inf"))
    torch.testing.assert_close(total, scores.exp().sum(-1).log(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(out, _dense(q, k, v, causal=causal), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "whole"])
def test_gradients_of_a_block_are_those_of_the_textbook(causal: bool) -> None:
    parts, grad = _block(causal)
    out, total = block_attention(*parts, causal=causal)
    ours = block_attention_backward(grad, *parts, out, total, causal=causal)
    leaves = [t.clone().requires_grad_() for t in parts]
    theirs = torch.autograd.grad(_dense(*leaves, causal=causal), leaves, grad)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("first", [1, 3, 5])
def test_partial_softmaxes_join_to_that_over_all_keys(first: int) -> None:
    q, k, v, _ = _drawn(Case(2, 4, 4, 3, 6), 1)
    early, late = (block_attention(q, k[:, :, s], v[:, :, s], causal=False) for s in (slice(first), slice(first, None)))
    whole = block_attention(q, k, v, causal=False)
    torch.testing.assert_close(joined(*early, *late), whole, rtol=1e-10, atol=1e-10)


def test_joining_survives_scores_far_apart() -> None:
    """exp(1000) is no number: sums are compared as logarithms."""
    q, k, v, _ = _drawn(Case(1, 2, 2, 3, 6), 1)
    near = block_attention(q, k, v, causal=False)
    far = torch.ones_like(near[0]), near[1] + 1000
    torch.testing.assert_close(joined(*near, *far), far, rtol=1e-10, atol=1e-10)
