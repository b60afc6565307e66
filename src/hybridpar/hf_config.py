"""Architectures as Hugging Face `config.json` files describe them -> ModelSpec fields. No torch here.

Every field of a configuration is either translated, known not to change the mathematics, or refused by name: a model
that would silently compute something else is worse than none. Field names and defaults as in the configuration
classes of transformers (LlamaConfig, MistralConfig, MixtralConfig, Mamba2Config).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridpar.specs import SpecError

Config = Mapping[str, Any]

# How a model is stored, trained, tokenised or generated from: nothing that its forward pass computes (but for rounding
# in short formats, as residual_in_fp32 does).
_NOT_MATHS = frozenset(
    """
    _name_or_path architectures model_type torch_dtype dtype transformers_version use_cache bos_token_id
    eos_token_id pad_token_id sep_token_id decoder_start_token_id task_specific_params initializer_range
    max_position_embeddings pretraining_tp return_dict output_hidden_states output_attentions
    output_router_logits is_encoder_decoder is_decoder id2label label2id problem_type chunk_size_feed_forward
    tokenizer_class prefix finetuning_task pruned_heads attn_implementation _attn_implementation
    quantization_config auto_map torchscript use_bfloat16 num_logits_to_keep rescale_prenorm_residual
    residual_in_fp32 max_window_layers hidden_dropout add_cross_attention tie_encoder_decoder
    cross_attention_hidden_size tf_legacy_loss use_mamba_kernels time_step_min time_step_max time_step_floor
    router_jitter_noise keys_to_ignore_at_inference is_llama_config unk_token_id
    """.split()  # noqa: SIM905  fifty lines of one name each tell no more
)


@dataclass(frozen=True)
class _Only:
    """A field that must have one of some values, as only they are what our layers compute; absent is one of them."""

    legal: tuple[Any, ...]

    def fault(self, name: str, value: Any) -> str | None:
        if any(value == legal and type(value) is type(legal) for legal in self.legal):
            return None
        wanted = ", ".join("absent" if legal is None else repr(legal) for legal in self.legal)
        return f"{name}={value!r} changes the mathematics in a way that is not ours; legal: {wanted}"


_SILU, _OFF, _ZERO = _Only(("silu", "swish")), _Only((None, False)), _Only((None, 0, 0.0))

_ATTENTION_ONLY: Mapping[str, _Only] = {
    "hidden_act": _SILU,
    "attention_bias": _OFF,
    "mlp_bias": _OFF,
    "attention_dropout": _ZERO,
    "partial_rotary_factor": _Only((None, 1.0, 1)),
    "use_sliding_window": _OFF,
    "layer_types": _Only((None,)),
}
_MAMBA_ONLY: Mapping[str, _Only] = {
    "hidden_act": _SILU,
    "use_bias": _OFF,
    "use_conv_bias": _Only((True,)),
    "rms_norm": _Only((None, True)),
    "norm_before_gate": _OFF,
}


@dataclass(frozen=True)
class _Architecture:
    """How one architecture is read: fields carried over by name, values that must hold, and what needs arithmetic."""

    family: str
    carried: Mapping[str, str]
    only: Mapping[str, _Only]
    refused: str = ""
    derived: Callable[[Config], Iterator[tuple[str, Any]]] = field(default=lambda _: iter(()))
    read: tuple[str, ...] = ()


_COMMON = {"vocab_size": "vocab", "hidden_size": "hidden", "num_hidden_layers": "layers"}
_DENSE = {
    **_COMMON,
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "ffn_hidden",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tied_embeddings",
}
_EXPERTS = {
    **_DENSE,
    "num_local_experts": "experts",
    "num_experts_per_tok": "top_k",
    "router_aux_loss_coef": "aux_loss",
}
_MAMBA = {
    **_COMMON,
    "state_size": "ssm_state",
    "head_dim": "ssm_head_dim",
    "n_groups": "ssm_groups",
    "expand": "ssm_expand",
    "conv_kernel": "ssm_conv",
    "chunk_size": "ssm_chunk",
    "layer_norm_epsilon": "norm_eps",
    "tie_word_embeddings": "tied_embeddings",
}


def _rotary(config: Config) -> Iterator[tuple[str, Any]]:
    """The base of the rotary angles: a field of its own, or in the newer `rope_parameters`; nothing may scale them."""
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = parameters.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    kind = parameters.pop("rope_type", None) or parameters.pop("type", None) or "default"
    if kind != "default" or parameters:
        field_name = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
        raise SpecError(
            [f"{field_name}={config[field_name]!r} scales rotary positions; legal: absent, or type default"]
        )
    yield "rope_theta", float(theta)


def _window(config: Config) -> Iterator[tuple[str, Any]]:
    """A sliding window must be off, or as long as all positions."""
    window, positions = config.get("sliding_window"), config.get("max_position_embeddings", math.inf)
    in_use = config.get("use_sliding_window", True)
    if window is not None and in_use and window < positions:
        raise SpecError([f"sliding_window={window!r} hides tokens from attention; legal: absent"])
    yield from _rotary(config)


def _mamba_heads(config: Config) -> Iterator[tuple[str, Any]]:
    """Heads times head_dim must be expand times hidden, and no step size may be cut off."""
    heads, width = config.get("num_heads"), config.get("head_dim")
    inner = config.get("expand", 2) * config.get("hidden_size", 0)
    if heads is not None and width is not None and heads * width != inner:
        raise SpecError([f"num_heads={heads} times head_dim={width} is not expand*hidden_size={inner}; legal: equal"])
    low, high = config.get("time_step_limit") or (0.0, math.inf)
    if float(low) > 0 or float(high) != math.inf:
        raise SpecError([f"time_step_limit={[low, high]} cuts step sizes off; legal: [0.0, Infinity]"])
    yield from ()


_ROPE = ("rope_theta", "rope_scaling", "rope_parameters")
_ARCHITECTURES: Mapping[str, _Architecture] = {
    "LlamaForCausalLM": _Architecture("transformer", _DENSE, _ATTENTION_ONLY, derived=_rotary, read=_ROPE),
    "MistralForCausalLM": _Architecture(
        "transformer", _DENSE, _ATTENTION_ONLY, derived=_window, read=(*_ROPE, "sliding_window")
    ),
    "MixtralForCausalLM": _Architecture(
        "moe", _EXPERTS, _ATTENTION_ONLY, derived=_window, read=(*_ROPE, "sliding_window")
    ),
    "Mamba2ForCausalLM": _Architecture(
        "mamba2", _MAMBA, _MAMBA_ONLY, derived=_mamba_heads, read=("num_heads", "time_step_limit", "time_step_rank")
    ),
    "Qwen2ForCausalLM": _Architecture("", {}, {}, refused="its query, key and value projections have biases"),
    "Qwen3ForCausalLM": _Architecture("", {}, {}, refused="it normalises queries and keys"),
    "Qwen3MoeForCausalLM": _Architecture("", {}, {}, refused="it normalises queries and keys"),
    "NemotronHForCausalLM": _Architecture("", {}, {}, refused="its MLPs are layers of their own, with squared ReLU"),
    "Zamba2ForCausalLM": _Architecture("", {}, {}, refused="its attention layers share weights, with adapters"),
    "JambaForCausalLM": _Architecture("", {}, {}, refused="its state-space layers are Mamba-1"),
    "BambaForCausalLM": _Architecture(
        "", {}, {}, refused="its Mamba-2 layers are followed by MLPs, and RoPE is partial"
    ),
    "GPT2LMHeadModel": _Architecture("", {}, {}, refused="it has learned positions, LayerNorm and GELU"),
}


def load_hf_config(path: Path) -> dict[str, Any]:
    """Read a `config.json`, or the one in a folder, as fields of a ModelSpec.

    Raises:
        SpecError: it cannot be read, or describes another mathematics; one sentence per fault.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise SpecError([f"model.hf_config={str(path)!r} cannot be read: {reason}"]) from None
    except (ValueError, RecursionError):
        raise SpecError([f"model.hf_config={str(path)!r} is not JSON"]) from None
    if not isinstance(content, Mapping):
        raise SpecError(
            [f"model.hf_config={str(path)!r} holds {content!r}; legal: a mapping as transformers writes it"]
        )
    return model_from_hf_config(content)


def model_from_hf_config(config: Config) -> dict[str, Any]:
    """A configuration as fields of a ModelSpec.

    Raises:
        SpecError: one sentence for every field that cannot be carried over.
    """
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if name not in _ARCHITECTURES:
        known = ", ".join(key for key, architecture in _ARCHITECTURES.items() if not architecture.refused)
        raise SpecError([f"architectures={names!r} is not known; legal: one of {known}"])
    architecture = _ARCHITECTURES[str(name)]
    if architecture.refused:
        raise SpecError([f"architectures={names!r} is not ours: {architecture.refused}"])
    faults = list(_faults(config, architecture))
    model: dict[str, Any] = {"family": architecture.family}
    try:
        model |= dict(architecture.derived(config))
    except SpecError as error:
        faults += error.faults
    if faults:
        raise SpecError(faults)
    carried = {ours: config[theirs] for theirs, ours in architecture.carried.items() if config.get(theirs) is not None}
    return _complete(str(name), model | carried)


def _faults(config: Config, architecture: _Architecture) -> Iterator[str]:
    for name, only in architecture.only.items():
        fault = only.fault(name, config.get(name))
        if fault:
            yield fault
    known = {*architecture.carried, *architecture.only, *architecture.read, *_NOT_MATHS}
    yield from (
        f"{name}={value!r} is not known, and may change the mathematics; legal: absent"
        for name, value in config.items()
        if name not in known and value is not None
    )


def _complete(architecture: str, model: dict[str, Any]) -> dict[str, Any]:
    """Defaults that transformers has and a ModelSpec has not."""
    if architecture == "Mamba2ForCausalLM":
        return {"ssm_state": 128, "ssm_head_dim": 64, "ssm_groups": 8, "ssm_chunk": 256} | model
    defaults: dict[str, Any] = {"norm_eps": 1e-6 if architecture != "MixtralForCausalLM" else 1e-5}
    if architecture == "MixtralForCausalLM":
        defaults |= {"experts": 8, "top_k": 2, "aux_loss": 0.001}
    return defaults | model
