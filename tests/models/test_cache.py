"""Generation with caches is the whole forward, however the tokens come; what the caches hold, and their limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridpar.models.attention import causal_attention
from hybridpar.models.cache import KeyValueCache, StateCache
from hybridpar.models.init import initialise
from hybridpar.models.lm import LanguageModel
from hybridpar.specs import ModelSpec

_ATTENTION: dict[str, Any] = {"heads": 4, "kv_heads": 2, "ffn_hidden": 24}
_MAMBA: dict[str, Any] = {"ssm_state": 5, "ssm_head_dim": 4, "ssm_groups": 2, "ssm_chunk": 4}
MODELS: dict[str, dict[str, Any]] = {
    "attention": {"family": "transformer", **_ATTENTION},
    "one key head": {"family": "transformer", **_ATTENTION, "kv_heads": 1},
    "Mamba-2": {"family": "mamba2", **_MAMBA},
    "Mamba-2 with a short convolution": {"family": "mamba2", **_MAMBA, "ssm_conv": 2},
    "Mamba-2 without a look back": {"family": "mamba2", **_MAMBA, "ssm_conv": 1},
    "hybrid": {"family": "hybrid", "pattern": "MA", **_ATTENTION, **_MAMBA},
    "experts": {"family": "moe", **_ATTENTION, "experts": 3},
}
LENGTH = 11


def _lm(fields: dict[str, Any]) -> tuple[LanguageModel, Tensor]:
    """A model with weights large enough that tokens see each other, and tokens."""
    model = ModelSpec.model_validate({"layers": 2, "hidden": 16, "vocab": 29, **fields})
    lm = LanguageModel(model).double()
    initialise(lm, model, seed=1)
    with torch.no_grad():
        for name, parameter in lm.named_parameters():
            if parameter.ndim > 1 and "conv" not in name:
                parameter.mul_(8)
    return lm, torch.randint(model.vocab, (2, LENGTH), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def _in_parts(lm: LanguageModel, tokens: Tensor, sizes: Sequence[int]) -> Tensor:
    caches = lm.new_caches(tokens.shape[1])
    return torch.cat([lm(part, caches) for part in tokens.split(list(sizes), dim=1)], dim=1)


@pytest.mark.parametrize("fields", MODELS.values(), ids=list(MODELS))
@pytest.mark.parametrize(
    "sizes",
    [[7, *[1] * 4], [1] * LENGTH, [2, *[1] * 9], [LENGTH], [5, 4, 2], [1, 9, 1]],
    ids=["prompt then tokens", "tokens alone", "prompt shorter than the look back", "prompt alone", "blocks", "mixed"],
)
def test_logits_in_parts_are_those_of_the_whole(fields: dict[str, Any], sizes: list[int]) -> None:
    lm, tokens = _lm(fields)
    with torch.no_grad():
        whole = lm(tokens)
    torch.testing.assert_close(_in_parts(lm, tokens, sizes), whole, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("fields", MODELS.values(), ids=list(MODELS))
def test_early_tokens_matter_to_the_last(fields: dict[str, Any]) -> None:
    """Else equal logits would not show that anything was remembered."""
    lm, tokens = _lm(fields)
    other = tokens.clone()
    other[:, 0] = (other[:, 0] + 1) % 29
    last = [_in_parts(lm, t, [7, *[1] * 4])[:, -1] for t in (tokens, other)]
    assert (last[0] - last[1]).abs().max() > 1e-6


def _keys(length: int) -> Tensor:
    return torch.randn(2, 3, length, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(length))


def test_keys_and_values_are_held_in_the_order_they_came() -> None:
    cache = KeyValueCache(9)
    parts = [(_keys(n), -_keys(n)) for n in (4, 1, 2)]
    for keys, values in parts:
        cache.attend(keys, keys, values, causal_attention)
    held = cache.held()
    assert cache.length == 7
    assert torch.equal(held[0], torch.cat([keys for keys, _ in parts], dim=2))
    assert torch.equal(held[1], torch.cat([values for _, values in parts], dim=2))


def test_a_key_value_cache_is_allocated_once_at_its_capacity() -> None:
    cache = KeyValueCache(9)
    assert cache.tensors() == ()
    cache.attend(_keys(4), _keys(4), _keys(4), causal_attention)
    before = cache.tensors()
    cache.attend(_keys(1), _keys(1), _keys(1), causal_attention)
    assert [t.shape for t in before] == [(2, 3, 9, 4)] * 2
    assert [t.data_ptr() for t in cache.tensors()] == [t.data_ptr() for t in before]


def test_a_full_key_value_cache_takes_no_more_and_stays_as_it_was() -> None:
    cache = KeyValueCache(5)
    cache.attend(_keys(4), _keys(4), _keys(4), causal_attention)
    with pytest.raises(ValueError, match="the cache holds 4 of 5 tokens; 2 more do not fit"):
        cache.attend(_keys(2), _keys(2), _keys(2), causal_attention)
    assert cache.length == 4
    cache.attend(_keys(1), _keys(1), _keys(1), causal_attention)
    assert cache.length == 5


def test_a_prompt_longer_than_the_cache_is_refused() -> None:
    with pytest.raises(ValueError, match="the cache holds 0 of 3 tokens; 4 more do not fit"):
        KeyValueCache(3).attend(_keys(4), _keys(4), _keys(4), causal_attention)


def test_the_tail_is_the_last_inputs_and_zeros_before_the_first() -> None:
    cache, inputs = StateCache(conv_width=4), torch.arange(1.0, 8.0).view(1, 7, 1)
    tails = [cache.tail(inputs[:, span]) for span in (slice(0, 2), slice(2, 3), slice(3, 6), slice(6, 7))]
    assert [tail.flatten().tolist() for tail in tails] == [[0, 0, 0], [0, 1, 2], [1, 2, 3], [4, 5, 6]]


def test_the_state_is_decayed_and_added_to() -> None:
    cache = StateCache(conv_width=4)
    added, decay = torch.full((1, 1, 2, 3), 8.0), torch.full((1, 1, 1, 3), 0.5)
    states = [cache.state(added, decay) for _ in range(3)]
    assert [state.unique().tolist() for state in states] == [[0.0], [8.0], [12.0]]


@pytest.mark.parametrize("length", [1, 3, LENGTH])
def test_a_state_cache_is_as_large_whatever_it_has_seen(length: int) -> None:
    lm, tokens = _lm(MODELS["Mamba-2"])
    caches = lm.new_caches(LENGTH)
    with torch.no_grad():
        lm(tokens[:, :length], caches)
    tail, state = caches["1"].tensors()
    assert tail.shape == (2, 3, 32 + 2 * 2 * 5)
    assert state.shape == (2, 2, 5, 16)
