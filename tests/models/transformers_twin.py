"""The same model in the transformers library: configuration and weights carried over from ours."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Mamba2Config, Mamba2ForCausalLM, PreTrainedModel

from hybridpar.models.lm import LanguageModel
from hybridpar.specs import ModelSpec

_LLAMA_NAMES = {
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "mlp.w_gate": "mlp.gate_proj",
    "mlp.w_up": "mlp.up_proj",
    "mlp.w_down": "mlp.down_proj",
}


def twin_of(ours: LanguageModel, model: ModelSpec) -> PreTrainedModel:
    """A transformers model with the dtype and the weights of `ours`: Llama for attention, Mamba2 for Mamba-2."""
    build, weights = (_llama, _llama_weights) if model.family == "transformer" else (_mamba2, _mamba2_weights)
    dtype = next(ours.parameters()).dtype
    twin = build(model).to(dtype)
    twin.load_state_dict(weights({name: p.detach().clone() for name, p in ours.state_dict().items()}, model))
    return twin


def _llama(model: ModelSpec) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=model.vocab,
            hidden_size=model.hidden,
            intermediate_size=model.ffn_hidden,
            num_hidden_layers=model.layers,
            num_attention_heads=model.heads,
            num_key_value_heads=model.kv_heads,
            head_dim=model.head_dim,
            rms_norm_eps=model.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta},
            tie_word_embeddings=model.tied_embeddings,
            attn_implementation="sdpa",
        )
    )


def _llama_weights(ours: dict[str, Tensor], model: ModelSpec) -> dict[str, Tensor]:
    theirs = {
        "model.embed_tokens.weight": ours["embed.weight"],
        "model.norm.weight": ours["norm.weight"],
        "lm_head.weight": ours["head.weight"],
    }
    for layer in range(model.layers):
        for name, their_name in _LLAMA_NAMES.items():
            theirs[f"model.layers.{layer}.{their_name}.weight"] = ours[f"blocks.{layer}.{name}.weight"]
    return theirs


def _mamba2(model: ModelSpec) -> Mamba2ForCausalLM:
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
