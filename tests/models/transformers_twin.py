"""The same model in the transformers library: configuration and weights carried over from ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)

from hybridpar.models.lm import LanguageModel
from hybridpar.specs import ModelSpec

_ATTENTION_NAMES = {
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
}
_MLP_NAMES = {
    "mlp.w_gate": "mlp.gate_proj",
    "mlp.w_up": "mlp.up_proj",
    "mlp.w_down": "mlp.down_proj",
}


def twin_of(ours: LanguageModel, model: ModelSpec) -> PreTrainedModel:
    """A transformers model with the dtype and the weights of `ours`: Llama for attention, Mamba2 for Mamba-2, Mixtral
    for experts (without shared ones or a capacity, and with two or more chosen: it has no others)."""
    build, weights = _TWINS[model.family]
    dtype = next(ours.parameters()).dtype
    twin = build(model).to(dtype)
    twin.load_state_dict(weights({name: p.detach().clone() for name, p in ours.state_dict().items()}, model))
    return twin


def _of_attention(model: ModelSpec) -> dict[str, Any]:
    """What configurations of Llama and of Mixtral have in common."""
    return {
        "vocab_size": model.vocab,
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn_hidden,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "rms_norm_eps": model.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "tie_word_embeddings": model.tied_embeddings,
        "attn_implementation": "sdpa",
    }


def _attention_weights(ours: dict[str, Tensor], model: ModelSpec, names: Mapping[str, str]) -> dict[str, Tensor]:
    theirs = {
        "model.embed_tokens.weight": ours["embed.weight"],
        "model.norm.weight": ours["norm.weight"],
        "lm_head.weight": ours["head.weight"],
    }
    for layer in range(model.layers):
        for name, their_name in names.items():
            theirs[f"model.layers.{layer}.{their_name}.weight"] = ours[f"blocks.{layer}.{name}.weight"]
    return theirs


def _llama(model: ModelSpec) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**_of_attention(model)))


def _llama_weights(ours: dict[str, Tensor], model: ModelSpec) -> dict[str, Tensor]:
    return _attention_weights(ours, model, _ATTENTION_NAMES | _MLP_NAMES)


def _mixtral(model: ModelSpec) -> PreTrainedModel:
    """Its balance loss counts choices a token, ours shares of all choices: top_k times as much."""
    experts = {"num_local_experts": model.experts, "num_experts_per_tok": model.top_k}
    aux_loss = model.aux_loss / model.top_k
    return MixtralForCausalLM(MixtralConfig(**_of_attention(model), **experts, router_aux_loss_coef=aux_loss))


def _mixtral_weights(ours: dict[str, Tensor], model: ModelSpec) -> dict[str, Tensor]:
    """One matrix there holds, one below the other, the gate's and the other one's."""
    theirs = _attention_weights(ours, model, _ATTENTION_NAMES)
    for layer in range(model.layers):
        prefix, their_prefix = f"blocks.{layer}.mlp.", f"model.layers.{layer}.mlp."
        gate_up = torch.cat((ours[f"{prefix}experts.w_gate"], ours[f"{prefix}experts.w_up"]), dim=1)
        theirs[f"{their_prefix}gate.weight"] = ours[f"{prefix}router.weight"]
        theirs[f"{their_prefix}experts.gate_up_proj"] = gate_up
        theirs[f"{their_prefix}experts.down_proj"] = ours[f"{prefix}experts.w_down"]
    return theirs


def _mamba2(model: ModelSpec) -> PreTrainedModel:
    return Mamba2ForCausalLM(
        Mamba2Config(
            vocab_size=model.vocab,
            hidden_size=model.hidden,
            num_hidden_layers=model.layers,
            num_heads=model.ssm_heads,
            head_dim=model.ssm_head_dim,
            state_size=model.ssm_state,
            n_groups=model.ssm_groups,
            expand=model.ssm_expand,
            conv_kernel=model.ssm_conv,
            chunk_size=model.ssm_chunk,
            layer_norm_epsilon=model.norm_eps,
            residual_in_fp32=False,
            tie_word_embeddings=model.tied_embeddings,
        )
    )


def _mamba2_weights(ours: dict[str, Tensor], model: ModelSpec) -> dict[str, Tensor]:
    theirs = {
        "backbone.embeddings.weight": ours["embed.weight"],
        "backbone.norm_f.weight": ours["norm.weight"],
        "lm_head.weight": ours["head.weight"],
    }
    for layer in range(model.layers):
        theirs |= _mamba2_layer(ours, f"blocks.{layer}.", f"backbone.layers.{layer}.")
    return theirs


def _mamba2_layer(ours: dict[str, Tensor], prefix: str, their_prefix: str) -> dict[str, Tensor]:
    """One projection and one convolution there hold, one after the other, what are several here."""
    mixer = {name.removeprefix(f"{prefix}mamba."): p for name, p in ours.items() if name.startswith(f"{prefix}mamba.")}
    projections = torch.cat([mixer[f"w_{part}.weight"] for part in ("z", "x", "B", "C", "dt")])
    return {
        f"{their_prefix}norm.weight": ours[f"{prefix}norm.weight"],
        f"{their_prefix}mixer.in_proj.weight": projections,
        f"{their_prefix}mixer.conv1d.weight": torch.cat([mixer[f"conv_{part}.weight"] for part in "xBC"]),
        f"{their_prefix}mixer.conv1d.bias": torch.cat([mixer[f"conv_{part}.bias"] for part in "xBC"]),
        f"{their_prefix}mixer.A_log": mixer["A_log"],
        f"{their_prefix}mixer.D": mixer["D"],
        f"{their_prefix}mixer.dt_bias": mixer["dt_bias"],
        f"{their_prefix}mixer.norm.weight": mixer["norm.weight"],
        f"{their_prefix}mixer.out_proj.weight": mixer["w_out.weight"],
    }


_Weights = Callable[[dict[str, Tensor], ModelSpec], dict[str, Tensor]]
_TWINS: Mapping[str, tuple[Callable[[ModelSpec], PreTrainedModel], _Weights]] = {
    "transformer": (_llama, _llama_weights),
    "mamba2": (_mamba2, _mamba2_weights),
    "moe": (_mixtral, _mixtral_weights),
}
