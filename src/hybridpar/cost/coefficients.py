"""The free parameters of the cost model, their meaning and unit. No torch here.

All are properties of hardware and kernels in general: none belongs to a row, a model, a configuration or a source.
`RAW` comes from microbenchmarks and data sheets alone (and where neither says anything, about hosts and about what
overlaps, from what is usual), `hybridpar.cost.calibrate` fits them to runs. `FITTED` names the file with those that
were fitted to the published runs.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Coefficients:
    """Shares are of 1, latencies in seconds.

    Attributes:
        matmul: share of the best measured product that large products in training reach.
        throttle: exponent by which products slow down with the FLOP/s that each watt of the board has to feed:
            sustained load is bound by power on all recent accelerators, short benchmarks are not.
        matmul_traffic: how many times the operands of a product pass through device memory, for what it costs beside
            the arithmetic.
        grouped: speed of grouped products (experts) over that of plain ones.
        attention: share of the bf16 ceiling that a fused attention kernel reaches at wide heads, on causal FLOPs.
        head_half: width of a head at which a fused attention kernel reaches half of that.
        scores: share of the bytes of stored attention scores that reach device memory: kernels skip what is masked, and
            caches hold small matrices.
        scan: share of the bf16 ceiling that products inside SSD chunks reach.
        memory: share of device memory bandwidth that elementwise kernels reach.
        link: share of the link's data-sheet bandwidth that collectives in a node reach.
        nic: share of the network's data-sheet bandwidth that collectives across nodes reach.
        link_latency: seconds a collective takes beside its bytes, in a node.
        nic_latency: seconds a round of a collective takes beside its bytes, across nodes.
        slow_latency: the same on Ethernet fabrics.
        kernel: seconds of host time a kernel launch, framework included.
        contention: seconds of host time that each tensor-parallel rank adds to a layer, where a pipeline crosses an
            Ethernet fabric (seen with EFA; why is not known).
        tp_hidden: share of tensor-parallel communication that a program which overlaps it hides.
        gradient_hidden: share of the gradients' reduction that the last backward pass hides.
        gather_hidden: share of gathers and reductions of ZeRO-3 that computation hides.
        pipe_hidden: share of what a pipeline without interleaving sends that computation hides.
        turn: seconds that a stage spends on each micro-batch beside its layers, in a pipeline.
        stragglers: by which share of its computation a step gets longer each time that nodes double.
        step: seconds a step has beside all else.
    """

    matmul: float = 1.0
    throttle: float = 0.1
    matmul_traffic: float = 1.0
    grouped: float = 0.8
    attention: float = 0.7
    head_half: float = 24.0
    scores: float = 0.6
    scan: float = 0.3
    memory: float = 0.8
    link: float = 0.78
    nic: float = 0.85
    link_latency: float = 15e-6
    nic_latency: float = 8e-6
    slow_latency: float = 38e-6
    kernel: float = 30e-6
    contention: float = 1e-4
    tp_hidden: float = 0.3
    gradient_hidden: float = 0.5
    gather_hidden: float = 0.9
    pipe_hidden: float = 0.3
    turn: float = 2e-3
    stragglers: float = 0.01
    step: float = 0.01

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if not (np.isfinite(value) and value > 0):
                raise ValueError(f"{one.name}={value!r} is not legal; it must be above 0")
            if one.name in SHARES and value > SHARES[one.name]:
                raise ValueError(f"{one.name}={value!r} is not legal; it must be at most {SHARES[one.name]:g}")

    def as_dict(self) -> dict[str, float]:
        """By name."""
        return asdict(self)


FITTED = Path(__file__).parents[3] / "data" / "cost" / "fitted.json"
# The largest legal value; a product may be faster than the one that was taken for the best.
SHARES = {
    **dict.fromkeys(("tp_hidden", "gradient_hidden", "gather_hidden", "pipe_hidden"), 1.0),
    **dict.fromkeys(("matmul", "attention", "memory", "link", "nic", "scan"), 1.25),
}
NAMES: tuple[str, ...] = tuple(one.name for one in fields(Coefficients))
RAW = Coefficients()


def to_vector(coefficients: Coefficients, names: tuple[str, ...] = NAMES) -> npt.NDArray[np.float64]:
    """Logarithms, in the order of `names`."""
    return np.log([getattr(coefficients, name) for name in names])


def from_vector(
    vector: npt.NDArray[np.float64], base: Coefficients = RAW, names: tuple[str, ...] = NAMES
) -> Coefficients:
    """The coefficients of logarithms, shares cut at their largest legal value; the rest as in `base`."""
    values: dict[str, Any] = {}
    for name, logarithm in zip(names, vector, strict=True):
        values[name] = min(float(np.exp(logarithm)), SHARES.get(name, np.inf))
    return replace(base, **values)
