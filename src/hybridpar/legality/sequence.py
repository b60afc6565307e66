"""Constraints of splitting the sequence over cp ranks."""

from __future__ import annotations

from collections.abc import Iterator

from hybridpar.legality.violation import Rule, Violation, divisors
from hybridpar.segments import segments_per_rank
from hybridpar.specs import RunSpec


def _context(run: RunSpec) -> Iterator[Violation]:
    cp, length, model = run.strategy.cp, run.workload.seq_len, run.model
    if cp == 1:
        return
    pieces = cp * segments_per_rank(model, run.strategy)
    if length % pieces:
        balanced = "" if pieces == cp else " (two to each cp rank, so that all have as much of the causal mask)"
        yield Violation(
            "workload.seq_len", length, f"does not split into {pieces} equal pieces{balanced}",
            f"a multiple of {pieces}",
        )  # fmt: skip
    elif "M" in model.layer_kinds and length // pieces < model.ssm_conv - 1:
        yield Violation(
            "workload.seq_len",
            length,
            f"leaves {length // pieces} tokens a piece, and a convolution of width model.ssm_conv={model.ssm_conv} "
            f"looks back {model.ssm_conv - 1}",
            f"{pieces * (model.ssm_conv - 1)} or more",
        )


def _ulysses(run: RunSpec) -> Iterator[Violation]:
    strategy, model = run.strategy, run.model
    if strategy.cp == 1 or strategy.cp_kind != "ulysses" or not set(model.layer_kinds) & set("AE"):
        return
    heads_per_tp = max(1, model.heads // strategy.tp)
    if heads_per_tp % strategy.cp:
        yield Violation(
            "strategy.cp",
            strategy.cp,
            f"with cp_kind=ulysses must divide the {heads_per_tp} query heads of a tp rank",
            f"{divisors(heads_per_tp)}, or cp_kind=ring",
        )


RULES: tuple[Rule, ...] = (_context, _ulysses)
