"""Named models and clusters: plain data, so that a spec file can say `preset: llama-toy`.

The toy, small, medium and large models keep the proportions of their public relatives (head counts,
GQA ratio, ffn/hidden, expand, state) at widths that train in milliseconds on a CPU; they share a
byte-level vocabulary. Public models carry the numbers of their published configurations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def _llama(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, theta: float) -> dict[str, Any]:
    return {
        "family": "transformer",
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "ffn_hidden": ffn,
        "vocab": vocab,
        "rope_theta": theta,
    }


def _mamba2(layers: int, hidden: int, state: int, head_dim: int, chunk: int, vocab: int, tied: bool) -> dict[str, Any]:
    return {
        "family": "mamba2",
        "layers": layers,
        "hidden": hidden,
        "ssm_state": state,
        "ssm_head_dim": head_dim,
        "ssm_chunk": chunk,
        "vocab": vocab,
        "tied_embeddings": tied,
    }


def _hybrid(attention: dict[str, Any], pattern: str, state: int, head_dim: int, chunk: int) -> dict[str, Any]:
    mamba = {"ssm_state": state, "ssm_head_dim": head_dim, "ssm_chunk": chunk}
    return {**attention, **mamba, "family": "hybrid", "pattern": pattern}


def _moe(attention: dict[str, Any], experts: int, top_k: int) -> dict[str, Any]:
    return {**attention, "family": "moe", "experts": experts, "top_k": top_k}


_BYTES = 256

MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama-toy": _llama(4, 64, 4, 2, 176, _BYTES, 1e4),
    "llama-small": _llama(4, 128, 8, 4, 352, _BYTES, 1e4),
    "llama-medium": _llama(8, 256, 8, 4, 704, _BYTES, 1e4),
    "llama-large": _llama(16, 384, 12, 4, 1056, _BYTES, 1e4),
    "mamba2-toy": _mamba2(4, 64, 16, 16, 16, _BYTES, False),
    "mamba2-small": _mamba2(8, 128, 32, 32, 32, _BYTES, False),
    "mamba2-medium": _mamba2(16, 256, 32, 64, 64, _BYTES, False),
    "mamba2-large": _mamba2(32, 384, 64, 64, 64, _BYTES, False),
    "hybrid-toy": _hybrid(_llama(4, 64, 4, 2, 176, _BYTES, 1e4), "MA", 16, 16, 16),
    "hybrid-small": _hybrid(_llama(4, 128, 8, 4, 352, _BYTES, 1e4), "MA", 32, 32, 32),
    "hybrid-medium": _hybrid(_llama(8, 256, 8, 4, 704, _BYTES, 1e4), "MMMA", 32, 64, 64),
    "hybrid-large": _hybrid(_llama(16, 384, 12, 4, 1056, _BYTES, 1e4), "MMMA", 64, 64, 64),
    # 8 experts of half a dense model's width, 2 to a token: as many FLOPs a token as the dense model of that name
    "moe-toy": _moe(_llama(4, 64, 4, 2, 88, _BYTES, 1e4), 8, 2),
    "moe-small": _moe(_llama(4, 128, 8, 4, 176, _BYTES, 1e4), 8, 2),
    "moe-medium": _moe(_llama(8, 256, 8, 4, 352, _BYTES, 1e4), 8, 2),
    "moe-large": _moe(_llama(16, 384, 12, 4, 528, _BYTES, 1e4), 8, 2),
    # Llama 3 herd of models, arXiv 2407.21783, table 3
    "llama-3-8b": _llama(32, 4096, 32, 8, 14336, 128256, 5e5),
    "llama-3-70b": _llama(80, 8192, 64, 8, 28672, 128256, 5e5),
    "llama-3-405b": _llama(126, 16384, 128, 8, 53248, 128256, 5e5),
    # GPT-3's depth, width and heads (arXiv 2005.14165, table 2.1) in the blocks of Llama: 8/3 of the width in a SwiGLU
    # MLP hold as many weights as 4 in GPT-3's; vocabulary padded as in arXiv 2104.04473
    "gpt3-175b-like": {**_llama(96, 12288, 96, 96, 32768, 51200, 1e4), "tied_embeddings": True},
    # Mixtral of experts, arXiv 2401.04088, table 1
    "mixtral-8x7b": _moe(_llama(32, 4096, 32, 8, 14336, 32000, 1e6), 8, 2),
    # One attention block in eight, as in Jamba (arXiv 2403.19887); widths of Llama 3 8B, state and groups of the 8B
    # models of arXiv 2406.07887, table 1
    "jamba-8b-like": {
        **_hybrid(_llama(56, 4096, 32, 8, 14336, 128256, 5e5), "MMMMMMMA", 128, 64, 256),
        "ssm_groups": 8,
    },
    # state-spaces/mamba2-2.7b; vocabulary padded to a multiple of 16 as there
    "mamba2-2.7b": _mamba2(64, 2560, 128, 64, 256, 50288, True),
}

CLUSTERS: Mapping[str, Mapping[str, Any]] = {
    "local": {"nodes": 1, "device": "auto"},
    "local-cpu": {"nodes": 1, "device": "cpu"},
}
