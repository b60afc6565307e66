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


def moe_flops(model: ModelSpec, sequences: int, length: int) -> int:
    """Forward of one expert layer, dropless: router 2*T*d*E, and 6*T*d*f for each of the k routed and the shared
    experts that a token passes."""
    tokens = sequences * length
    passed = model.top_k + model.shared_experts
    return 2 * tokens * model.hidden * model.experts + 6 * tokens * model.hidden * model.ffn_hidden * passed


def mamba2_flops(model: ModelSpec, sequences: int, length: int, chunk: int | None = None) -> int:
    """Forward of one Mamba-2 layer, SSD in chunks (Dao & Gu 2024, arXiv 2405.21060, section 6).

    Projections 2*T*d*(3*E*d + 2*G*N + J); per chunk C B^T: 2*C^2*N for each group, (C B^T) X: 2*C^2*P, chunk states
    and their outputs: 2*C*N*P each, for each head; between chunks 2*(Q-1)^2*N*P for each head. `chunk` is C, if it is
    not the model's.
    """
    inner, heads, groups = model.ssm_inner, model.ssm_heads, model.ssm_groups
    state, width, chunk = model.ssm_state, model.ssm_head_dim, model.ssm_chunk if chunk is None else chunk
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
    feed_forward = moe_flops if kind == "E" else mlp_flops
    return attention_flops(model, sequences, length) + feed_forward(model, sequences, length)


def prefill_flops(model: ModelSpec, sequences: int, length: int) -> int:
    """Forward over prompts, with logits of the last token only; chunks are no longer than the prompt."""
    chunk = min(model.ssm_chunk, length)
    layers = sum(
        mamba2_flops(model, sequences, length, chunk) if kind == "M" else _layer_flops(kind, model, sequences, length)
        for kind in model.layer_kinds
    )
    return layers + 2 * sequences * model.hidden * model.vocab


def decode_flops(model: ModelSpec, sequences: int, context: int) -> int:
    """Forward of one token a sequence that sees `context` tokens, itself among them: as a prompt of one token, but
    with 4*b*context*H*h for scores and mixing."""
    seen_more = 4 * sequences * (context - 1) * model.heads * model.head_dim
    attention_layers = sum(kind != "M" for kind in model.layer_kinds)
    return prefill_flops(model, sequences, 1) + attention_layers * seen_more


def model_flops_per_step(run: RunSpec) -> int:
    """FLOPs of one step over the global batch, all devices together: an optimizer step, a prefill, or one decoded
    token a sequence at the middle of the decoded length."""
    model, workload = run.model, run.workload
    if workload.phase == "prefill":
        return prefill_flops(model, workload.global_batch, workload.seq_len)
    if workload.phase == "decode":
        return decode_flops(model, workload.global_batch, workload.seq_len + (workload.steps + 1) // 2)
    return 3 * forward_flops(model, workload.global_batch, workload.seq_len)
