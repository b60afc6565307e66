"""Which strategies a run may use: a pure function to all violated constraints. No torch here.

A violation is one sentence that names the field, its value, the reason, and the nearest legal values.
`hybridpar run` and the workflow turn violations into a row with outcome `infeasible`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hybridpar.specs import RunSpec

# What this version trains. A value of the schema that is missing here is refused by name, never ignored.
AVAILABLE: Mapping[str, tuple[Any, ...]] = {
    "model.family": ("transformer", "mamba2", "hybrid"),
    "workload.phase": ("train",),
    "workload.precision": ("fp64", "fp32", "bf16"),
    "strategy.schedule": ("gpipe", "1f1b"),
    "strategy.recompute": ("none", "full"),
    "strategy.offload": ("none",),
    "strategy.cp": (1,),
    "strategy.ep": (1,),
    "strategy.virtual": (1,),
    "cluster.nodes": (1,),
}


# Tokens of the byte-level vocabulary.
BYTES = 256


@dataclass(frozen=True)
class Violation:
    """One violated constraint."""

    field: str
    value: Any
    reason: str
    legal: str

    def __str__(self) -> str:
        return f"{self.field}={_text(self.value)}: {self.reason}; legal: {self.legal}"


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


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _divisors(n: int, smallest: int = 1) -> str:
    return ", ".join(str(k) for k in range(smallest, n + 1) if n % k == 0)


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


def _batch(run: RunSpec) -> Iterator[Violation]:
    batch, dp, micro = run.workload.global_batch, run.strategy.dp, run.workload.micro_batch
    if batch % dp:
        yield Violation("strategy.dp", dp, f"does not divide workload.global_batch={batch}", _divisors(batch))
    elif (batch // dp) % micro:
        yield Violation(
            "workload.micro_batch",
            micro,
            f"does not divide the {batch // dp} sequences of one replica (global_batch={batch}, dp={dp})",
            _divisors(batch // dp),
        )


def _tensor(run: RunSpec) -> Iterator[Violation]:
    tp, model = run.strategy.tp, run.model
    if run.strategy.sp and tp == 1:
        yield Violation("strategy.sp", True, "splits the sequence over tp ranks, and tp=1", "false, or tp of 2 or more")
    if run.strategy.sp and run.workload.seq_len % tp:
        yield Violation(
            "strategy.tp",
            tp,
            f"with sp must divide workload.seq_len={run.workload.seq_len}",
            _divisors(run.workload.seq_len),
        )
    if tp == 1:
        return
    if "A" in model.layer_kinds and model.kv_heads % tp:
        yield Violation(
            "strategy.tp", tp, f"does not divide model.kv_heads={model.kv_heads}", _divisors(model.kv_heads)
        )
    if "A" in model.layer_kinds and model.ffn_hidden % tp:
        yield Violation(
            "strategy.tp", tp, f"does not divide model.ffn_hidden={model.ffn_hidden}", _divisors(model.ffn_hidden)
        )
    if "M" in model.layer_kinds and model.ssm_heads % tp:
        yield Violation(
            "strategy.tp", tp, f"does not divide the {model.ssm_heads} Mamba heads", _divisors(model.ssm_heads)
        )
    if "M" in model.layer_kinds and model.ssm_groups > 1 and model.ssm_groups % tp:
        yield Violation(
            "strategy.tp",
            tp,
            f"would cut through the norm groups of model.ssm_groups={model.ssm_groups}",
            _divisors(model.ssm_groups),
        )
    if model.vocab < tp:
        yield Violation("strategy.tp", tp, f"exceeds model.vocab={model.vocab}", f"1 to {model.vocab}")


def _pipeline(run: RunSpec) -> Iterator[Violation]:
    pp, model = run.strategy.pp, run.model
    if pp == 1:
        return
    if pp > model.layers:
        yield Violation("strategy.pp", pp, f"exceeds model.layers={model.layers}", f"1 to {model.layers}")
    if model.tied_embeddings:
        yield Violation("strategy.pp", pp, "model.tied_embeddings would put one weight on two stages", "1")
    if run.micro_batches < pp and run.strategy.schedule == "1f1b" and not list(_batch(run)):
        yield Violation(
            "strategy.pp",
            pp,
            f"1f1b needs at least pp micro-batches a replica, and there are {run.micro_batches}",
            f"1 to {run.micro_batches}, or a smaller workload.micro_batch or strategy.dp",
        )


def _text_vocabulary(run: RunSpec) -> Iterator[Violation]:
    if run.model.vocab < BYTES:
        reason = f"text is read as bytes, which are {BYTES} tokens"
        yield Violation("model.vocab", run.model.vocab, reason, f"{BYTES} or more")


def _zero(run: RunSpec) -> Iterator[Violation]:
    zero, strategy = run.strategy.zero, run.strategy
    if zero and strategy.dp == 1:
        yield Violation("strategy.zero", zero, "shards over data replicas, and dp=1", "0, or dp of 2 or more")


def _overlap(run: RunSpec) -> Iterator[Violation]:
    strategy = run.strategy
    if strategy.overlap:
        return
    if strategy.dp == 1:
        yield Violation("strategy.overlap", False, "concerns gradients of data replicas, and dp=1", "true")
    elif strategy.engine == "torch" and strategy.zero >= 2:
        yield Violation(
            "strategy.overlap", False, f"FSDP2 (zero={strategy.zero}) always overlaps", "true, or zero of 0 or 1"
        )


def _deepspeed(run: RunSpec) -> Iterator[Violation]:
    strategy = run.strategy
    if strategy.engine != "deepspeed":
        return
    if run.workload.precision != "fp32":
        precision = run.workload.precision
        yield Violation("workload.precision", precision, "engine=deepspeed is compared in fp32 in this version", "fp32")
    if strategy.recompute != "none":
        yield Violation("strategy.recompute", strategy.recompute, "not available with engine=deepspeed", "none")
    if strategy.pp > 1 and strategy.zero == 0:
        reason = "DeepSpeed's pipeline engine at ZeRO-0 clips each stage by its own norm, not by the global one"
        yield Violation("strategy.zero", strategy.zero, reason, "1, with dp of 2 or more")
    if strategy.tp > 1:
        yield Violation("strategy.tp", strategy.tp, "engine=deepspeed is offered for dp and pp", "1, or engine=torch")
    if strategy.pp > 1 and strategy.zero > 1:
        yield Violation("strategy.zero", strategy.zero, "DeepSpeed's PipelineModule refuses ZeRO-2 and ZeRO-3", "0, 1")
    if strategy.pp > 1 and strategy.schedule != "1f1b":
        yield Violation("strategy.schedule", strategy.schedule, "DeepSpeed's PipelineModule runs 1F1B", "1f1b")


_RULES: tuple[Callable[[RunSpec], Iterator[Violation]], ...] = (
    _available,
    _cluster,
    _batch,
    _tensor,
    _pipeline,
    _zero,
    _overlap,
    _deepspeed,
)
