"""The closed form of model FLOPs against a count of every matrix product that torch really runs."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hybridpar.models.init import initialise
from hybridpar.models.lm import LanguageModel
from hybridpar.models.loss import next_token_loss
from hybridpar.specs import RunSpec, parse_run_spec
from hybridpar.theory.model_flops import decode_flops, model_flops_per_step, prefill_flops


def _run(preset: str, seq_len: int, model: dict[str, Any]) -> RunSpec:
    return parse_run_spec(
        {
            "model": {"preset": preset, "layers": 2, **model},
            "workload": {"seq_len": seq_len, "global_batch": 3, "micro_batch": 1},
        }
    )


def _counted(run: RunSpec) -> int:
    """Forward and backward of one global batch; attention as two plain products, convolutions left out."""
    model = LanguageModel(run.model)
    initialise(model, run.model, run.seed)
    tokens = torch.zeros(run.workload.global_batch, run.workload.seq_len, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        next_token_loss(model(tokens), tokens).backward()
    products = {op: count for op, count in counter.get_flop_counts()["Global"].items() if "convolution" not in str(op)}
    assert {str(op) for op in products} <= {"aten.mm", "aten.bmm", "aten.addmm", "aten.baddbmm"}
    return sum(products.values())


@pytest.mark.parametrize(
    ("preset", "seq_len", "model"),
    [
        pytest.param("llama-toy", 24, {}, id="grouped-query attention"),
        pytest.param("llama-toy", 24, {"kv_heads": 4}, id="as many key heads as query heads"),
        pytest.param("llama-toy", 24, {"kv_heads": 1, "ffn_hidden": 100, "vocab": 130}, id="one key head, odd widths"),
        pytest.param("mamba2-toy", 48, {}, id="whole chunks"),
        pytest.param("mamba2-toy", 50, {}, id="ragged last chunk"),
        pytest.param("mamba2-toy", 37, {"ssm_groups": 2, "ssm_state": 24, "ssm_chunk": 8}, id="two groups"),
        pytest.param("hybrid-toy", 50, {}, id="hybrid"),
        pytest.param("mamba2-toy", 48, {"tied_embeddings": True}, id="tied embeddings"),
        pytest.param("moe-toy", 24, {}, id="experts"),
        pytest.param("moe-toy", 24, {"experts": 5, "top_k": 1, "shared_experts": 2}, id="shared experts"),
    ],
)
def test_the_closed_form_is_the_count(preset: str, seq_len: int, model: dict[str, Any]) -> None:
    run = _run(preset, seq_len, model)
    assert model_flops_per_step(run) == _counted(run)


SERVED = (
    pytest.param("llama-toy", {}, id="transformer"),
    pytest.param("mamba2-toy", {}, id="mamba2"),
    pytest.param("hybrid-toy", {}, id="hybrid"),
    pytest.param("moe-toy", {"shared_experts": 1}, id="moe"),
)


@torch.no_grad()
def _counted_passes(run: RunSpec, *lengths: int) -> list[int]:
    """Forwards of successive parts of a sequence with caches, each with the logits of its last token."""
    model = LanguageModel(run.model)
    initialise(model, run.model, run.seed)
    caches, found = model.new_caches(sum(lengths)), []
    for length in lengths:
        tokens = torch.zeros(run.workload.global_batch, length, dtype=torch.int64)
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            model.logits(model.hidden_states(tokens, caches)[:, -1:])
        counts = counter.get_flop_counts()["Global"]
        found.append(sum(count for op, count in counts.items() if "convolution" not in str(op)))
    return found


@pytest.mark.parametrize("length", [48, 37, 5])
@pytest.mark.parametrize(("preset", "model"), SERVED)
def test_the_closed_forms_of_prefill_and_decode_are_the_counts(preset: str, model: dict[str, Any], length: int) -> None:
    run = _run(preset, 64, model)
    batch = run.workload.global_batch
    prefill, *tokens = _counted_passes(run, length, 1, 1)
    assert prefill == prefill_flops(run.model, batch, length)
    assert tokens == [decode_flops(run.model, batch, length + 1), decode_flops(run.model, batch, length + 2)]


def test_a_single_chunk_counts_the_empty_state_like_any_other() -> None:
    """With one chunk the state before it is zero and the one after it unused: autograd skips three products a layer."""
    run = _run("mamba2-toy", 16, {})
    model = run.model
    skipped = 3 * 2 * 16 * model.ssm_state * model.ssm_head_dim * model.ssm_heads * model.layers
    assert model_flops_per_step(run) - _counted(run) == skipped * run.workload.global_batch


def test_large_models_follow_six_flops_a_parameter_and_token() -> None:
    run = parse_run_spec({"model": {"preset": "llama-3-8b"}, "workload": {"seq_len": 2048, "global_batch": 1}})
    matrices = 8.03e9 - 128256 * 4096  # the embedding multiplies nothing
    attention = 12 * 32 * 4096 * 2048  # PaLM, appendix B
    assert model_flops_per_step(run) / run.tokens_per_step == pytest.approx(6 * matrices + attention, rel=1e-3)


def test_the_form_needs_no_torch() -> None:
    code = "import sys, hybridpar.theory.model_flops; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
