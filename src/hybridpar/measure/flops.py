"""Model FLOPs of a training step, in closed form. No torch here.

Convention (named in every result): the multiplications and additions of all matrix products of the forward pass,
attention scores counted in full although half is masked, and twice that for the backward pass; no recomputation,
no convolutions (short depthwise filters), no elementwise work. It is the convention of "model FLOPs" in PaLM
(Chowdhery et al. 2022, arXiv 2204.02311, appendix B) with the products of the SSD chunks counted as they run.

Symbols: b sequences, S tokens each, T = b*S, d hidden, H heads, K kv_heads, h head_dim, f ffn_hidden, V vocab,
E expand, P ssm_head_dim, J = E*d/P Mamba heads, G groups, N state, C chunk, Q = ceil(S/C) chunks.
"""

from __future__ import annotations

from hybridpar.specs import ModelSpec, RunSpec

FLOP_CONVENTION = (
    "matrix products of the model, forward + 2x backward, attention not halved for causality, recompute not counted"
)


def attention_flops(model: ModelSpec, sequences: int, length: int) -> int:
    """Forward of one attention layer: projections 4*T*d*h*(H+K), scores and mixing 4*b*S^2*H*h."""
    tokens, width = sequences * length, model.heads * model.head_dim
    projections = 2 * tokens * model.hidden * 2 * (width + model.kv_heads * model.head_dim)
    return projections + 4 * sequences * length**2 * width


def mlp_flops(model: ModelSpec, sequences: int, length: int) -> int:
    """Forward of one SwiGLU: 6*T*d*f."""
    return 6 * sequences * length * model.hidden * model.ffn_hidden


def mamba2_flops(model: ModelSpec, sequences: int, length: int) -> int:
    """Forward of one Mamba-2 layer, SSD in chunks (Dao & Gu 2024, arXiv 2405.21060, section 6).

    Projections 2*T*d*(3*E*d + 2*G*N + J); per chunk C B^T: 2*C^2*N for each group, (C B^T) X: 2*C^2*P, chunk states
    and their outputs: 2*C*N*P each, for each head; between chunks 2*(Q-1)^2*N*P for each head.
    """
    inner, heads, groups = model.ssm_inner, model.ssm_heads, model.ssm_groups
    state, width, chunk = model.ssm_state, model.ssm_head_dim, model.ssm_chunk
    chunks = -(-length // chunk)
    projections = 2 * sequences * length * model.hidden * (3 * inner + 2 * groups * state + heads)
    within = chunks * (groups * 2 * chunk**2 * state + heads * 2 * chunk**2 * width)
    states = chunks * heads * 4 * chunk * state * width
    between = heads * 2 * (chunks - 1) ** 2 * state * width
    return projections + sequences * (within + states + between)


def forward_flops(model: ModelSpec, sequences: int, length: int) -> int:
    """All layers and the head (2*T*d*V); the embedding is a look-up."""
    layers = sum(_layer_flops(kind, model, sequences, length) for kind in model.layer_kinds)
    return layers + 2 * sequences * length * model.hidden * model.vocab


def _layer_flops(kind: str, model: ModelSpec, sequences: int, length: int) -> int:
    if kind == "M":
        return mamba2_flops(model, sequences, length)
    return attention_flops(model, sequences, length) + mlp_flops(model, sequences, length)


def model_flops_per_step(run: RunSpec) -> int:
    """FLOPs of one optimizer step over the global batch, all devices together."""
    return 3 * forward_flops(run.model, run.workload.global_batch, run.workload.seq_len)
