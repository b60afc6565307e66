"""Constraints of splitting inside layers (tp) and over tokens between them (sp)."""

from __future__ import annotations

from collections.abc import Iterator

from hybridpar.legality.violation import Rule, Violation, divisors, those, up_to
from hybridpar.specs import ModelSpec, RunSpec


def _sequence_parallel(run: RunSpec) -> Iterator[Violation]:
    tp, cp, length = run.strategy.tp, run.strategy.cp, run.workload.seq_len
    if not run.strategy.sp:
        return
    if tp == 1:
        yield Violation("strategy.sp", True, "splits the sequence over tp ranks, and tp=1", "false, or tp of 2 or more")
    if length % cp == 0 and (length // cp) % tp:
        tokens = f"workload.seq_len={length}" if cp == 1 else f"the {length // cp} tokens of a cp rank"
        yield Violation("strategy.tp", tp, f"with sp must divide {tokens}", divisors(length // cp))


def _tensor(run: RunSpec) -> Iterator[Violation]:
    tp, model = run.strategy.tp, run.model
    if tp == 1:
        return
    if model.vocab < tp:
        yield Violation("strategy.tp", tp, f"exceeds model.vocab={model.vocab}", up_to(model.vocab))
    if set(model.layer_kinds) & set("AE"):
        yield from _attention(tp, model)
    if "M" in model.layer_kinds:
        yield from _mamba(tp, model)


def _attention(tp: int, model: ModelSpec) -> Iterator[Violation]:
    if model.heads % tp:
        yield Violation("strategy.tp", tp, f"does not divide model.heads={model.heads}", divisors(model.heads))
    elif model.kv_heads % tp and tp % model.kv_heads:
        yield Violation(
            "strategy.tp",
            tp,
            f"neither divides model.kv_heads={model.kv_heads} nor is a multiple of it",
            those(range(1, model.heads + 1), lambda n: _heads_fit(n, model)),
        )
    if model.ffn_hidden % tp:
        yield Violation(
            "strategy.tp", tp, f"does not divide model.ffn_hidden={model.ffn_hidden}", divisors(model.ffn_hidden)
        )


def _heads_fit(tp: int, model: ModelSpec) -> bool:
    return model.heads % tp == 0 and (model.kv_heads % tp == 0 or tp % model.kv_heads == 0)


def _mamba(tp: int, model: ModelSpec) -> Iterator[Violation]:
    if model.ssm_heads % tp:
        yield Violation(
            "strategy.tp", tp, f"does not divide the {model.ssm_heads} Mamba heads", divisors(model.ssm_heads)
        )
    if model.ssm_groups > 1 and model.ssm_groups % tp:
        reason = f"would cut through the norm groups of model.ssm_groups={model.ssm_groups}"
        yield Violation("strategy.tp", tp, reason, divisors(model.ssm_groups))


RULES: tuple[Rule, ...] = (_sequence_parallel, _tensor)
