"""Attention: the textbook softmax, rotary positions that see only distances, and transformers' Llama."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hybridpar.models.attention import Attention, rotary_angles, rotate, successive_positions
from hybridpar.models.init import initialise
from hybridpar.models.lm import LanguageModel
from hybridpar.specs import ModelSpec
from tests.models.transformers_twin import twin_of

_CPU = torch.device("cpu")


def _rotate_as_complex(vector: Tensor, position: int, theta: float) -> Tensor:
    """Multiply the complex numbers v_i + i v_{i + h/2} by exp(i m theta^(-2i/h))."""
    half = vector.shape[-1] // 2
    angle = position * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    turned = torch.complex(vector[..., :half], vector[..., half:]) * torch.polar(torch.ones(half).double(), angle)
    return torch.cat((turned.real, turned.imag), dim=-1)


def _textbook(attention: Attention, x: Tensor) -> Tensor:
    """Query by query and head by head, exp(score) over its sum."""
    batch, length, _ = x.shape
    h, share = attention.head_dim, attention.heads // attention.kv_heads
    q, k, v = (x @ w.weight.T for w in (attention.wq, attention.wk, attention.wv))
    mixed = torch.zeros(batch, length, attention.heads * h, dtype=x.dtype)
    for head in range(attention.heads):
        columns, shared = slice(head * h, (head + 1) * h), slice(head // share * h, (head // share + 1) * h)
        keys = [_rotate_as_complex(k[:, s, shared], s, attention.rope_theta) for s in range(length)]
        for t in range(length):
            query = _rotate_as_complex(q[:, t, columns], t, attention.rope_theta)
            scores = torch.stack([(query * keys[s]).sum(-1) / math.sqrt(h) for s in range(t + 1)], dim=-1).exp()
            weights = scores / scores.sum(-1, keepdim=True)
            mixed[:, t, columns] = (weights.unsqueeze(-1) * v[:, : t + 1, shared]).sum(1)
    return mixed @ attention.wo.weight.T


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
def test_it_equals_the_textbook_softmax(heads: int, kv_heads: int) -> None:
    torch.manual_seed(0)
    attention = Attention(hidden=12, heads=heads, kv_heads=kv_heads, head_dim=6, rope_theta=100.0).double()
    x = torch.randn(2, 9, 12, dtype=torch.float64)
    # the angles are float32, as in Llama
    torch.testing.assert_close(attention(x), _textbook(attention, x), rtol=1e-5, atol=1e-6)


def test_scores_depend_on_the_distance_alone() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 8, dtype=torch.float64)
    near, far = (rotary_angles(successive_positions(first, 5, _CPU), 8, 1e4) for first in (0, 100))
    scores = [
        rotate(q.expand(1, 1, 5, 8), angles)[0, 0] @ rotate(k.expand(1, 1, 5, 8), angles)[0, 0].T
        for angles in (near, far)
    ]
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-4, atol=1e-4)


def test_rotation_keeps_lengths_and_position_zero() -> None:
    x = torch.linspace(-1, 2, 112, dtype=torch.float64).view(1, 2, 7, 8)
    turned = rotate(x, rotary_angles(successive_positions(0, 7, _CPU), 8, 1e4))
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(turned[:, :, 0], x[:, :, 0])


def test_a_block_of_later_positions_continues_the_table() -> None:
    whole = rotary_angles(successive_positions(0, 10, _CPU), 8, 1e4)
    torch.testing.assert_close(rotary_angles(successive_positions(6, 4, _CPU), 8, 1e4), whole[6:], rtol=0, atol=0)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("theta", [1e4, 5e5])
def test_logits_are_those_of_transformers_with_the_same_weights(kv_heads: int, theta: float) -> None:
    torch.manual_seed(0)
    model = ModelSpec.model_validate({"preset": "llama-toy", "layers": 2, "kv_heads": kv_heads, "rope_theta": theta})
    ours = LanguageModel(model)
    initialise(ours, model, seed=5)
    with torch.no_grad():  # weights large enough that attention is not uniform, norms that are not neutral
        for name, p in ours.named_parameters():
            p.add_(torch.randn_like(p) * 0.3) if "norm" in name else p.mul_(4)
    tokens = torch.randint(model.vocab, (2, 33))
    with torch.no_grad():
        expected = twin_of(ours, model)(tokens, use_cache=False).logits
        torch.testing.assert_close(ours(tokens), expected, rtol=1e-4, atol=1e-4)
