"""The language model as a whole: causal, of the published sizes, divisible into stages, able to learn."""

from __future__ import annotations

import math

import pytest
import torch

from hybridpar.models.init import initialise
from hybridpar.models.lm import LanguageModel
from hybridpar.models.loss import next_token_loss
from hybridpar.specs import ModelSpec
from hybridpar.train import parameter_count

WITHOUT_EXPERTS = ["llama-toy", "mamba2-toy", "hybrid-toy"]
# Experts add up in an order that every token has a part in, and their balance is a loss beside the one returned.
FAMILIES = [*WITHOUT_EXPERTS, "moe-toy"]


def _spec(preset: str, **fields: object) -> ModelSpec:
    return ModelSpec.model_validate({"preset": preset, "layers": 2, **fields})


def _model(spec: ModelSpec) -> LanguageModel:
    model = LanguageModel(spec)
    initialise(model, spec, seed=0)
    return model


def _tokens(spec: ModelSpec, *shape: int) -> torch.Tensor:
    return torch.randint(spec.vocab, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("preset", WITHOUT_EXPERTS)
@pytest.mark.parametrize("changed", [0, 15, 16, 36])
def test_a_later_token_changes_no_earlier_logit(preset: str, changed: int) -> None:
    spec = _spec(preset)
    model, tokens = _model(spec).double(), _tokens(spec, 2, 37)
    other = tokens.clone()
    other[:, changed] = (other[:, changed] + 1) % spec.vocab
    with torch.no_grad():
        difference = (model(tokens) - model(other)).abs().amax((0, 2))
    assert (difference[:changed] == 0).all()
    assert (difference[changed:] > 0).all()


@pytest.mark.parametrize("preset", FAMILIES)
def test_sequences_of_a_batch_do_not_see_each_other(preset: str) -> None:
    spec = _spec(preset)
    model, tokens = _model(spec).double(), _tokens(spec, 3, 20)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens)[1:2], model(tokens[1:2]))


@pytest.mark.parametrize(
    ("preset", "published"),
    [
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
        ("llama-3-405b", 405_853_388_800),
        ("mamba2-2.7b", 2_702_599_680),
        ("mixtral-8x7b", 46_702_792_704),
    ],
)
def test_public_models_have_their_published_number_of_parameters(preset: str, published: int) -> None:
    assert parameter_count(ModelSpec.model_validate({"preset": preset})) == published


@pytest.mark.parametrize(("preset", "billions"), [("gpt3-175b-like", 175), ("jamba-8b-like", 8)])
def test_a_model_named_by_its_size_has_about_that_size(preset: str, billions: float) -> None:
    assert parameter_count(ModelSpec.model_validate({"preset": preset})) / 1e9 == pytest.approx(billions, rel=0.02)


@pytest.mark.parametrize("preset", FAMILIES)
def test_tied_embeddings_are_one_tensor_with_the_gradients_of_both_uses(preset: str) -> None:
    spec = _spec(preset, tied_embeddings=True)
    model, tokens = _model(spec), _tokens(spec, 1, 8)
    assert model.head.weight is model.embed.weight
    assert "head.weight" not in dict(model.named_parameters())
    next_token_loss(model(tokens), tokens).backward()
    unseen = [token for token in range(spec.vocab) if token not in set(tokens.flatten().tolist())]
    assert model.embed.weight.grad[unseen].abs().sum() > 0, "the head's gradient reaches rows that no token looks up"


def test_untied_embeddings_are_two_tensors() -> None:
    model = LanguageModel(_spec("llama-toy"))
    assert model.head.weight.data_ptr() != model.embed.weight.data_ptr()


@pytest.mark.parametrize("preset", FAMILIES)
def test_stages_in_turn_are_the_whole_model_and_keep_its_names(preset: str) -> None:
    spec = _spec(preset)
    whole, first, last = _model(spec), _model(spec), _model(spec)
    first.norm = first.head = last.embed = None
    del first.blocks["1"], last.blocks["0"]
    names = [name for stage in (first, last) for name, _ in stage.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in whole.named_parameters())
    tokens = _tokens(spec, 2, 18)
    with torch.no_grad():
        torch.testing.assert_close(last(first(tokens)), whole(tokens), rtol=0, atol=0)


@pytest.mark.parametrize("preset", FAMILIES)
def test_it_learns_one_batch_by_heart(preset: str) -> None:
    spec = _spec(preset)
    model = _model(spec)
    tokens = _tokens(spec, 2, 17)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(spec.vocab), abs=0.3), "an untrained model guesses among all bytes"
    assert losses[-1] < 0.1


@pytest.mark.parametrize("preset", WITHOUT_EXPERTS)
def test_gradients_are_the_slopes_of_the_loss(preset: str) -> None:
    spec = _spec(preset)
    model, tokens = _model(spec).double(), _tokens(spec, 1, 19)
    next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
    for name, parameter in model.named_parameters():
        direction = torch.linspace(-1, 1, parameter.numel(), dtype=torch.float64).view_as(parameter)
        losses = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.add_(direction, alpha=sign * 1e-5)
                losses.append(next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]).item())
                parameter.add_(direction, alpha=-sign * 1e-5)
        slope = (losses[0] - losses[1]) / 2e-5
        # RoPE's angles and nothing else are float32, and they do not depend on parameters
        assert slope == pytest.approx((parameter.grad * direction).sum().item(), rel=1e-4, abs=1e-8), name


def test_the_loss_is_the_mean_negative_log_likelihood() -> None:
    logits = torch.tensor([[[0.0, math.log(3.0)], [0.0, 0.0]]])
    expected = (-math.log(3 / 4) - math.log(1 / 2)) / 2
    assert next_token_loss(logits, torch.tensor([[1, 0]])).item() == pytest.approx(expected)


def test_the_loss_of_short_formats_is_float32() -> None:
    assert next_token_loss(torch.zeros(1, 2, 4, dtype=torch.bfloat16), torch.zeros(1, 2).long()).dtype == torch.float32
    assert next_token_loss(torch.zeros(1, 2, 4, dtype=torch.float64), torch.zeros(1, 2).long()).dtype == torch.float64


@pytest.mark.parametrize("preset", FAMILIES)
def test_bfloat16_stays_near_float32(preset: str) -> None:
    spec = _spec(preset)
    model, tokens = _model(spec), _tokens(spec, 1, 33)
    with torch.no_grad():
        exact = next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]).item()
        logits = model.bfloat16()(tokens[:, :-1])
    assert logits.dtype == torch.bfloat16
    assert next_token_loss(logits, tokens[:, 1:]).item() == pytest.approx(exact, abs=0.02)
