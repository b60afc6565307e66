"""Which strategies a run may use: a pure function to all violated constraints. No torch here.

A violation is one sentence that names the field, its value, the reason, and the nearest legal values.
`hybridpar run` and the workflow turn violations into a row with outcome `infeasible`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hybridpar.legality import deepspeed, generation, layers, pipeline, replicas, sequence
from hybridpar.legality.violation import Rule, Violation
from hybridpar.specs import RunSpec

# What this version trains. A value of the schema that is missing here is refused by name, never ignored.
AVAILABLE: Mapping[str, tuple[Any, ...]] = {
    "workload.precision": ("fp64", "fp32", "bf16"),
    "cluster.nodes": (1,),
}


# Tokens of the byte-level vocabulary.
BYTES = 256


def violations(run: RunSpec, *, on_text: bool = True) -> tuple[Violation, ...]:
    """Every constraint that the run violates; empty when it is legal.

    `on_text=False` leaves out what only real text asks for (parity checks train on random tokens).
    """
    rules = (*_RULES, _text_vocabulary) if on_text else _RULES
    return tuple(violation for rule in rules for violation in rule(run))


def infeasible_reason(run: RunSpec, *, on_text: bool = True) -> str | None:
    """All violations in one line, or None for a legal run."""
    found = violations(run, on_text=on_text)
    return " | ".join(str(violation) for violation in found) or None


def _available(run: RunSpec) -> Iterator[Violation]:
    for path, legal in AVAILABLE.items():
        section, _, name = path.partition(".")
        value = getattr(getattr(run, section), name)
        if value not in legal:
            yield Violation(path, value, "not available in this version", ", ".join(map(str, legal)))


def _cluster(run: RunSpec) -> Iterator[Violation]:
    places = run.cluster.devices_per_node
    if places and run.strategy.devices > places * run.cluster.nodes:
        yield Violation(
            "cluster.devices_per_node",
            places,
            f"the strategy asks for dp*tp*pp*cp={run.strategy.devices} devices on {run.cluster.nodes} node(s)",
            f"at least {-(-run.strategy.devices // run.cluster.nodes)}, or 0 for as many as asked",
        )


def _text_vocabulary(run: RunSpec) -> Iterator[Violation]:
    if run.model.vocab < BYTES:
        reason = f"text is read as bytes, which are {BYTES} tokens"
        yield Violation("model.vocab", run.model.vocab, reason, f"{BYTES} or more")


_RULES: tuple[Rule, ...] = (
    _available,
    _cluster,
    *replicas.RULES,
    *layers.RULES,
    *sequence.RULES,
    *pipeline.RULES,
    *generation.RULES,
    *deepspeed.RULES,
)
