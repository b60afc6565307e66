"""Initial parameters, drawn per name: any shard of any layout equals the slice of the dense parameter.

Symbols: L layers. Scales follow GPT-2 (Radford et al. 2019: normal 0.02, projections back into the residual stream
over sqrt(2L)) and Mamba-2's reference choices (arXiv 2405.21060: A uniform in [1, 16], dt log-uniform in
[0.001, 0.1], D one).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hybridpar.specs import ModelSpec

_INTO_RESIDUAL = ("wo.weight", "w_down.weight", "w_out.weight", "experts.w_down")
_SCALE = 0.02
_A_RANGE = (1.0, 16.0)
_DT_RANGE = (1e-3, 1e-1)


def dense_parameter(name: str, shape: Sequence[int], model: ModelSpec, seed: int) -> Tensor:
    """The whole parameter `name` of the one-device model, float64 on the CPU.

    The draw depends on (seed, name, shape) alone: not on the layout, the order of creation or the precision.
    """
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    module, leaf = ("." + name).split(".")[-2:]
    size = tuple(shape)
    if leaf == "D" or module.startswith("norm"):
        return torch.ones(size, dtype=torch.float64)
    if leaf == "bias":
        return torch.zeros(size, dtype=torch.float64)
    uniform = torch.rand(size, generator=generator, dtype=torch.float64)
    if leaf == "A_log":
        return (_A_RANGE[0] + uniform * (_A_RANGE[1] - _A_RANGE[0])).log()
    if leaf == "dt_bias":
        low, high = (math.log(dt) for dt in _DT_RANGE)
        return (low + uniform * (high - low)).exp().expm1().log()  # softplus(dt_bias) = dt
    if module.startswith("conv"):
        return (2 * uniform - 1) / math.sqrt(size[-1])
    scale = _SCALE / math.sqrt(2 * model.layers) if name.endswith(_INTO_RESIDUAL) else _SCALE
    return torch.randn(size, generator=generator, dtype=torch.float64) * scale


@torch.no_grad()
def initialise(module: nn.Module, model: ModelSpec, seed: int, *, prefix: str = "") -> None:
    """Fill every parameter of a one-device model (or of a part whose names continue `prefix`) in place."""
    for name, parameter in module.named_parameters():
        parameter.copy_(dense_parameter(prefix + name, parameter.shape, model, seed))
