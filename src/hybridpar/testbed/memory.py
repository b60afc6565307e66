"""A device of a scale model holds so many bytes and no more: which runs do not fit, and what breaks the limit. Pure.

Bytes are counted from tensors (`hybridpar.measure.memory`) or by closed forms, never from a process's pages: a rank of
the model is a process on a machine with far more memory, so nothing stops it but this rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hybridpar.outcome import Outcome
from hybridpar.specs import RunSpec
from hybridpar.theory.activations import peak_activations
from hybridpar.theory.state import state_of_rank

# In the order in which a training step comes to hold them; what an offloading strategy keeps in the host is not here.
ON_DEVICE = ("parameters", "buffers", "cache", "activations", "gradients", "optimizer")


def over_limit(held_by_rank: Sequence[Mapping[str, int]], limit_bytes: int) -> Outcome | None:
    """`oom` where a rank holds more than a device has; None where all fit, or there is no limit (0).

    Args:
        held_by_rank: peak bytes of each rank by category; those of ON_DEVICE count, a missing one as 0.
        limit_bytes: of a device [B].
    """
    if not limit_bytes:
        return None
    sums = [sum(held.get(name, 0) for name in ON_DEVICE) for held in held_by_rank]
    fullest = max(range(len(sums)), key=sums.__getitem__)
    if sums[fullest] <= limit_bytes:
        return None
    held = held_by_rank[fullest]
    return Outcome(
        kind="oom",
        reason=f"rank {fullest} holds {sums[fullest]} B at its peak, {sums[fullest] / limit_bytes:.2f} times the "
        f"{limit_bytes} B of its device; over the limit with {_breaks(held, limit_bytes)}",
        evidence=tuple(f"{name}: {held[name]} B" for name in ON_DEVICE if held.get(name)),
    )


def _breaks(held: Mapping[str, int], limit_bytes: int) -> str:
    """The category with which the sum first exceeds the limit."""
    total = 0
    for name in ON_DEVICE:
        total += held.get(name, 0)
        if total > limit_bytes:
            return name
    raise ValueError(f"{total} B do not exceed {limit_bytes} B")


def foreseen(run: RunSpec, rank: int) -> dict[str, int]:
    """What a rank will hold in training by closed forms, for `over_limit` before anything runs.

    Raises:
        NotCoveredError: there is no form for the run.
    """
    state = state_of_rank(run, rank)
    return {
        "parameters": state.parameters + state.gathered,
        "activations": peak_activations(run, rank),
        "gradients": state.gradients,
        "optimizer": state.optimizer,
    }
