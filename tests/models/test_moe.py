"""Mixture of experts: the sum over the chosen, token by token; who is dropped; the balance; transformers' Mixtral."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hybridpar.models.init import initialise
from hybridpar.models.lm import LanguageModel
from hybridpar.models.loss import next_token_loss
from hybridpar.models.moe import MoE, Routing, attach_loss, first_places
from hybridpar.specs import ModelSpec
from tests.models.transformers_twin import twin_of


def _spec(**fields: Any) -> ModelSpec:
    small = {"layers": 1, "hidden": 12, "heads": 2, "ffn_hidden": 10, "experts": 5, "aux_loss": 0.0}
    return ModelSpec.model_validate({"family": "moe", **small, **fields})


def _layer(**fields: Any) -> MoE:
    """A layer in float64 whose experts and router are far from uniform."""
    moe = MoE(_spec(**fields)).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5)
    return moe


def _input(batch: int = 2, length: int = 9) -> Tensor:
    generator = torch.Generator().manual_seed(batch * length)
    return torch.randn(batch, length, 12, generator=generator, dtype=torch.float64)


def _swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return down @ (functional.silu(gate @ x) * (up @ x))


def _capacity(moe: MoE, length: int) -> int:
    experts = moe.router.out_features
    return math.ceil(moe.capacity_factor * length * moe.top_k / experts) if moe.capacity_factor else length * moe.top_k


def _chosen(moe: MoE, sequence: Tensor) -> tuple[list[Tensor], list[list[tuple[int, bool]]]]:
    """Probabilities of each token, and its choices: (expert, whether there was a place), first choices of all first."""
    probabilities = [(moe.router.weight @ token).exp() for token in sequence]
    probabilities = [p / p.sum() for p in probabilities]
    ranked = [p.detach().argsort(descending=True, stable=True).tolist() for p in probabilities]
    taken = dict.fromkeys(range(moe.router.out_features), 0)
    choices: list[list[tuple[int, bool]]] = [[] for _ in sequence]
    for choice in range(moe.top_k):
        for token, experts in enumerate(ranked):
            expert = experts[choice]
            choices[token].append((expert, taken[expert] < _capacity(moe, len(sequence))))
            taken[expert] += 1
    return probabilities, choices


def _token_by_token(moe: MoE, x: Tensor) -> Tensor:
    """The definition, with nothing sorted, stacked or gathered."""
    sequences = []
    for sequence in x:
        outputs = []
        for token, p, choices in zip(sequence, *_chosen(moe, sequence), strict=True):
            total = sum((p[expert] for expert, _ in choices), torch.zeros(()).double()) if moe.top_k > 1 else 1.0
            out = torch.zeros_like(token)
            for expert, has_place in choices:
                weights = (moe.experts.w_gate[expert], moe.experts.w_up[expert], moe.experts.w_down[expert])
                out = out + has_place * p[expert] / total * _swiglu(token, *weights)
            if moe.shared is not None:
                out = out + _swiglu(token, *(w.weight for w in (moe.shared.w_gate, moe.shared.w_up, moe.shared.w_down)))
            outputs.append(out)
        sequences.append(torch.stack(outputs))
    return torch.stack(sequences)


CASES: list[dict[str, Any]] = [
    {"top_k": 1},
    {"top_k": 2},
    {"top_k": 3},
    {"top_k": 5},
    {"top_k": 2, "shared_experts": 1},
    {"top_k": 1, "shared_experts": 2},
    {"top_k": 1, "capacity_factor": 1.0},
    {"top_k": 2, "capacity_factor": 0.5},
    {"top_k": 3, "capacity_factor": 1.25, "shared_experts": 1},
]


@pytest.mark.parametrize("fields", CASES, ids=str)
def test_outputs_and_gradients_are_those_of_a_loop_over_tokens(fields: dict[str, Any]) -> None:
    ours, plain = _layer(**fields), _layer(**fields)
    x, theirs = _input().requires_grad_(), _input().requires_grad_()
    found, expected = ours(x), _token_by_token(plain, theirs)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    direction = torch.cos(torch.arange(x.numel(), dtype=torch.float64)).view_as(x)
    (found * direction).sum().backward()
    (expected * direction).sum().backward()
    torch.testing.assert_close(x.grad, theirs.grad, rtol=1e-11, atol=1e-11)
    for (name, parameter), (_, other) in zip(ours.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-11, atol=1e-11, msg=name)


def test_a_lone_choice_gives_its_router_a_gradient() -> None:
    moe = _layer(top_k=1)
    moe(_input()).sum().backward()
    assert moe.router.weight.grad is not None
    assert moe.router.weight.grad.abs().max() > 1e-3


def test_an_expert_that_no_token_chose_has_a_gradient_of_zero() -> None:
    moe = _layer(top_k=1)
    moe(_input(1, 2)).sum().backward()
    gradient = moe.experts.w_up.grad
    assert gradient is not None
    assert (gradient.flatten(1).abs().amax(1) > 0).sum() <= 2


def _routing(experts_of_tokens: list[list[list[int]]], experts: int, capacity_factor: float) -> Routing:
    """Routing of sequences whose tokens want these experts, most wanted first."""
    top_k = len(experts_of_tokens[0][0])
    probability = torch.full((len(experts_of_tokens), len(experts_of_tokens[0]), experts), 1e-3, dtype=torch.float64)
    for sequence, tokens in enumerate(experts_of_tokens):
        for token, wanted in enumerate(tokens):
            for choice, expert in enumerate(wanted):
                probability[sequence, token, expert] = 1.0 / (2 + choice)
    return _layer(experts=experts, top_k=top_k, capacity_factor=capacity_factor).route(probability)


def test_the_last_tokens_of_a_full_expert_are_dropped() -> None:
    routing = _routing([[[0], [0], [1], [0]]], experts=2, capacity_factor=1.0)  # 2 places each
    assert routing.kept.flatten().tolist() == [True, True, True, False]
    assert (routing.weight.flatten() > 0).tolist() == [True, True, True, False]


def test_first_choices_take_their_places_before_second_ones() -> None:
    routing = _routing([[[1, 0], [0, 1], [0, 1]]], experts=3, capacity_factor=1.0)  # 2 places each
    assert routing.kept.tolist() == [[True, False], [True, True], [True, False]]


def test_a_dropped_choice_leaves_the_weights_of_the_others_as_they_were() -> None:
    wanted = [[[1, 0], [0, 1], [0, 1]]]
    dropping, dropless = (_routing(wanted, experts=3, capacity_factor=factor) for factor in (1.0, 0.0))
    assert dropless.kept.all()
    assert torch.equal(dropping.weight, dropless.weight * dropping.kept)


def test_sequences_have_places_of_their_own() -> None:
    crowd, other = [[0], [0], [0], [0]], [[1], [0], [0], [1]]
    together = _routing([crowd, other], experts=2, capacity_factor=1.0)
    assert together.kept.flatten().tolist() == [True, True, False, False, True, True, True, True]


@pytest.mark.parametrize(("factor", "kept"), [(0.25, 1), (0.3, 2), (1.0, 4), (2.0, 8), (4.0, 8)])
def test_places_are_the_even_share_times_the_factor_rounded_up(factor: float, kept: int) -> None:
    routing = _routing([[[0]] * 8], experts=2, capacity_factor=factor)
    assert int(routing.kept.sum()) == kept


def test_places_before_count_choice_by_choice_and_token_by_token() -> None:
    wanted = functional.one_hot(torch.tensor([[[0, 1, 0], [1, 0, 1]]]), 2)  # (b, k, S, E)
    before = (first_places(wanted) * wanted).sum(-1)
    assert before.tolist() == [[[0, 0, 1], [1, 2, 2]]]


def _balance(probability: Tensor, top_k: int) -> float:
    moe = _layer(experts=probability.shape[-1], top_k=top_k)
    return moe.balance(probability, moe.route(probability)).item()


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_the_balance_loss_is_experts_times_the_sum_of_shares_times_mean_probabilities(top_k: int) -> None:
    probability = torch.randn(2, 7, 5, generator=torch.Generator().manual_seed(0)).double().softmax(-1)
    tokens = probability.flatten(0, 1)
    chosen = [set(sorted(range(5), key=lambda e, p=p: -float(p[e]))[:top_k]) for p in tokens]  # type: ignore[misc]
    expected = 0.0
    for expert in range(5):
        share = sum(expert in wanted for wanted in chosen) / (len(chosen) * top_k)
        expected += 5 * share * float(tokens[:, expert].sum()) / len(tokens)
    assert _balance(probability, top_k) == pytest.approx(expected, rel=1e-12)


def test_the_balance_loss_is_one_when_even_and_the_number_of_experts_when_all_go_to_one() -> None:
    even = torch.eye(4, dtype=torch.float64).expand(3, 4, 4)
    assert _balance(even, 1) == pytest.approx(1.0)
    assert _balance(even[:, :1].expand(3, 4, 4), 1) == pytest.approx(4.0)


def test_an_attached_loss_changes_no_value_and_adds_its_gradient() -> None:
    x, y = (torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in ([1.0, 2.0], [3.0, -1.0]))
    out = attach_loss(x * 2, (y * y).sum(), 0.25)
    assert torch.equal(out, x * 2)
    (out * out).sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    torch.testing.assert_close(x.grad, 8 * x.detach())
    torch.testing.assert_close(y.grad, 0.25 * 2 * y.detach())


def test_a_layer_trains_its_balance_with_the_weight_of_the_model() -> None:
    with_balance, without = _layer(aux_loss=0.3), _layer()
    assert torch.equal(with_balance(_input()), without(_input()))
    with_balance(_input()).sum().backward()
    probability = without.router(_input()).softmax(-1)
    total = without(_input()).sum() + 0.3 * without.balance(probability, without.route(probability))
    total.backward()
    for (name, parameter), (_, other) in zip(with_balance.named_parameters(), without.named_parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-11, atol=1e-11, msg=name)


def _mixtral(layers: int, **fields: Any) -> tuple[LanguageModel, ModelSpec]:
    """A model whose router is far from uniform, and whose norms are not neutral."""
    torch.manual_seed(0)
    model = _spec(layers=layers, hidden=32, heads=4, kv_heads=2, ffn_hidden=24, vocab=97, **fields)
    ours = LanguageModel(model)
    initialise(ours, model, seed=5)
    with torch.no_grad():
        for name, p in ours.named_parameters():
            p.add_(torch.randn_like(p) * 0.3) if "norm" in name else p.mul_(8)
    return ours, model


@pytest.mark.parametrize("top_k", [2, 3])
def test_logits_and_loss_are_those_of_transformers_with_the_same_weights(top_k: int) -> None:
    ours, model = _mixtral(2, top_k=top_k)
    tokens = torch.randint(model.vocab, (2, 34))
    with torch.no_grad():
        expected = twin_of(ours, model)(tokens, labels=tokens, use_cache=False)
        logits = ours(tokens)
    torch.testing.assert_close(logits, expected.logits, rtol=1e-4, atol=1e-4)
    loss = next_token_loss(logits[:, :-1], tokens[:, 1:])
    torch.testing.assert_close(loss, expected.loss, rtol=1e-5, atol=1e-5)


def test_gradients_with_the_balance_loss_are_those_of_transformers() -> None:
    """One layer, because theirs averages shares and probabilities over layers before it multiplies them."""
    ours, model = _mixtral(1, top_k=2, aux_loss=0.5)
    twin, tokens = twin_of(ours, model), torch.randint(model.vocab, (2, 33))
    next_token_loss(ours(tokens)[:, :-1], tokens[:, 1:]).backward()
    twin(tokens, labels=tokens, use_cache=False, output_router_logits=True).loss.backward()
    theirs = dict(twin.named_parameters())
    moe = ours.blocks["0"].mlp
    assert isinstance(moe, MoE)
    gate_up = theirs["model.layers.0.mlp.experts.gate_up_proj"].grad
    for mine, other in (
        (moe.router.weight.grad, theirs["model.layers.0.mlp.gate.weight"].grad),
        (moe.experts.w_gate.grad, gate_up[:, :24]),
        (moe.experts.w_up.grad, gate_up[:, 24:]),
        (moe.experts.w_down.grad, theirs["model.layers.0.mlp.experts.down_proj"].grad),
    ):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)
