"""Hugging Face configurations: what is ours is carried over, what is not is refused by the name of the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from hybridpar.hf_config import model_from_hf_config
from hybridpar.specs import ModelSpec, SpecError, parse_run_spec

# As published with the weights.
LLAMA_3_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
MIXTRAL_8X7B: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.36.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}


def test_llama_3_8b_is_the_preset_of_that_name() -> None:
    ours = ModelSpec.model_validate({**model_from_hf_config(LLAMA_3_8B), "name": "llama-3-8b"})
    assert ours == ModelSpec.model_validate({"preset": "llama-3-8b"})


def test_mixtral_is_a_mixture_of_experts() -> None:
    ours = ModelSpec.model_validate(model_from_hf_config(MIXTRAL_8X7B))
    assert (ours.family, ours.pattern, ours.experts, ours.top_k, ours.aux_loss) == ("moe", "E", 8, 2, 0.02)
    assert (ours.ffn_hidden, ours.heads, ours.kv_heads, ours.head_dim, ours.rope_theta) == (14336, 32, 8, 128, 1e6)


@pytest.mark.parametrize(
    ("config", "family"),
    [
        (transformers.LlamaConfig, "transformer"),
        (transformers.MixtralConfig, "moe"),
        (transformers.Mamba2Config, "mamba2"),
    ],
)
def test_what_the_installed_transformers_writes_is_read(config: type, family: str) -> None:
    architecture = {"transformer": "Llama", "moe": "Mixtral", "mamba2": "Mamba2"}[family] + "ForCausalLM"
    written = json.loads(json.dumps(config(architectures=[architecture]).to_dict()))
    assert ModelSpec.model_validate(model_from_hf_config(written)).family == family


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' changes the mathematics"),
        ({"attention_bias": True}, "attention_bias=True changes the mathematics"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "scales rotary positions; legal: absent, or type default",
        ),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "rope_parameters="),
        ({"logit_soft_cap": 30.0}, "logit_soft_cap=30.0 is not known, and may change the mathematics; legal: absent"),
        ({"architectures": ["Qwen2ForCausalLM"]}, "is not ours: its query, key and value projections have biases"),
        ({"architectures": ["NewForCausalLM"]}, "is not known; legal: one of LlamaForCausalLM"),
        ({"architectures": None}, "architectures=None is not known"),
    ],
)
def test_what_is_not_ours_is_refused_by_name(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SpecError) as refusal:
        model_from_hf_config({**LLAMA_3_8B, **change})
    assert len(refusal.value.faults) == 1
    assert sentence in refusal.value.faults[0]


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(SpecError) as refusal:
        model_from_hf_config({**LLAMA_3_8B, "hidden_act": "gelu", "mlp_bias": True, "sandwich_norm": True})
    assert len(refusal.value.faults) == 3


def test_a_window_shorter_than_the_positions_is_refused_and_a_longer_one_is_none() -> None:
    mistral = {**LLAMA_3_8B, "architectures": ["MistralForCausalLM"], "sliding_window": 4096}
    with pytest.raises(SpecError, match="sliding_window=4096 hides tokens"):
        model_from_hf_config(mistral)
    assert model_from_hf_config({**mistral, "sliding_window": 8192})["heads"] == 32


def test_a_spec_file_may_name_a_config_and_change_it(tmp_path: Path) -> None:
    folder = tmp_path / "meta-llama-3"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_3_8B))
    run = parse_run_spec({"model": {"hf_config": str(folder), "layers": 2}})
    assert (run.model.name, run.model.layers, run.model.hidden) == ("meta-llama-3", 2, 4096)


@pytest.mark.parametrize(
    ("content", "sentence"), [(None, "cannot be read: No such file"), ("{", "is not JSON"), ("[1]", "holds \\[1\\]")]
)
def test_what_cannot_be_read_is_a_sentence(content: str | None, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SpecError, match=sentence):
        parse_run_spec({"model": {"hf_config": str(path)}})


@pytest.mark.parametrize("path", [3, "", None, ["a"]])
def test_a_path_is_text(path: Any) -> None:
    with pytest.raises(SpecError, match="model"):
        parse_run_spec({"model": {"hf_config": path}})
