"""Serving in closed form, on paper; against the program: tests/test_check_theory.py."""

from __future__ import annotations

from typing import Any

import pytest

from hybridpar.parity_layouts import parity_run
from hybridpar.specs import RunSpec, parse_run_spec
from hybridpar.theory.coverage import NotCoveredError
from hybridpar.theory.model_flops import decode_flops, prefill_flops
from hybridpar.theory.serving import served

FAMILIES = ("transformer", "mamba2", "hybrid", "moe")


def _run(family: str, phase: str, layout: dict[str, Any] | None = None, **workload: Any) -> RunSpec:
    return parity_run(family, layout or {}, precision="fp32", workload={"phase": phase, "steps": 6, **workload})


@pytest.mark.parametrize("family", FAMILIES)
def test_one_device_runs_the_model_flops(family: str) -> None:
    prefill, decode = _run(family, "prefill"), _run(family, "decode")
    model, length, batch = prefill.model, prefill.workload.seq_len, prefill.workload.global_batch
    assert served(prefill, 0).flops["forward"] == prefill_flops(model, batch, length)
    assert served(decode, 0, 4).flops["forward"] == decode_flops(model, batch, length + 5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 3}, {"dp": 2}])
def test_ranks_share_the_cache(family: str, layout: dict[str, Any]) -> None:
    whole = served(_run(family, "decode"), 0).cache
    run = _run(family, "decode", layout)
    shares = [served(run, rank).cache for rank in range(run.strategy.devices)]
    # B and C of Mamba-2, and one group's norm, are on every tp rank.
    assert sum(shares) == whole if family != "mamba2" or "tp" not in layout else sum(shares) > whole


def test_keys_are_shared_by_cp_ranks_and_states_are_not() -> None:
    attention = [served(_run("transformer", "decode", {"cp": n}), 0).cache for n in (1, 2)]
    states = [served(_run("mamba2", "decode", {"cp": n}), 0).cache for n in (1, 2)]
    assert attention[0] == 2 * attention[1]
    assert states[0] == states[1]


def test_a_state_does_not_grow_with_the_context_and_keys_do() -> None:
    states = {served(_run("mamba2", "decode", seq_len=n), 0).cache for n in (48, 96, 480)}
    assert len(states) == 1
    short, long = (served(_run("transformer", "decode", seq_len=n), 0).cache for n in (48, 96))
    assert long == short * (96 + 6) // (48 + 6)


def test_llama_3_8b_keeps_128_kib_a_token() -> None:
    # 32 layers, 8 key/value heads of 128, keys and values, 2 bytes (Llama 3 Herd of Models, table 3).
    workload = {"phase": "decode", "seq_len": 8000, "steps": 192, "global_batch": 1, "precision": "bf16"}
    run = parse_run_spec({"model": {"preset": "llama-3-8b"}, "workload": workload})
    assert served(run, 0).cache == 2 * 32 * 8 * 128 * 2 * 8192


def test_decoded_tokens_go_round_the_cp_ranks() -> None:
    run = _run("transformer", "decode", {"cp": 4})
    per_step = [[served(run, rank, step).flops["forward"] for rank in range(4)] for step in range(4)]
    assert [flops.index(max(flops)) for flops in per_step[:1]] == [0]
    assert per_step[3] == [per_step[3][0]] * 4  # every rank has one more


def test_the_first_decoded_tokens_are_with_the_first_stage_already() -> None:
    run = _run("transformer", "decode", {"pp": 2})
    received = [[row.calls for row in served(run, 0, step).traffic if row.op == "recv"] for step in (0, 1)]
    assert received == [[], [run.micro_batches]]


def test_training_is_not_served() -> None:
    with pytest.raises(NotCoveredError, match=r"workload\.phase=train is no serving; legal: prefill, decode"):
        served(parity_run("transformer", {}), 0)
