"""Parameters of which a rank of DeepSpeed holds a piece beyond what ZeRO cuts, and how the whole is seen again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Pieces:
    """`names` (this rank's own) of which each rank of `group` holds another piece; `assemble` turns everything that a
    rank holds, by its own names, into whole tensors by dense names (collective), and `cut` turns those into what the
    rank holds of them."""

    group: dist.ProcessGroup
    names: frozenset[str]
    assemble: Callable[[dict[str, Tensor]], dict[str, Tensor]]
    cut: Callable[[dict[str, Tensor]], dict[str, Tensor]]
