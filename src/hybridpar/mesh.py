"""The rank grid: one order of axes, every group a slice of it. No torch here.

Axes from the outermost to the innermost: pp, dp, cp, tp. Neighbouring ranks (same node) thus share a
tp group, the axis that talks most; pipeline stages are farthest apart, the axis that talks least.
ep is no axis of its own: it splits dp into dp/ep blocks of ep neighbouring replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from hybridpar.specs import Strategy

Axis = Literal["pp", "dp", "cp", "tp"]
AXES: tuple[Axis, ...] = ("pp", "dp", "cp", "tp")


@dataclass(frozen=True)
class Coordinate:
    """Where one rank stands on each axis."""

    pp: int
    dp: int
    cp: int
    tp: int


@dataclass(frozen=True)
class RankGrid:
    """All ranks of a run, laid out as pp x dp x cp x tp."""

    pp: int
    dp: int
    cp: int
    tp: int

    @classmethod
    def of(cls, strategy: Strategy) -> RankGrid:
        """The grid of a strategy's degrees."""
        return cls(pp=strategy.pp, dp=strategy.dp, cp=strategy.cp, tp=strategy.tp)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Degrees in the order of AXES."""
        return (self.pp, self.dp, self.cp, self.tp)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp * self.cp * self.tp

    @cached_property
    def _ranks(self) -> np.ndarray:
        return np.arange(self.size).reshape(self.shape)

    def coordinate(self, rank: int) -> Coordinate:
        """Position of a rank.

        Raises:
            ValueError: no such rank.
        """
        if not 0 <= rank < self.size:
            raise ValueError(f"rank={rank} is not in the grid; legal: 0 to {self.size - 1}")
        return Coordinate(*(int(i) for i in np.unravel_index(rank, self.shape)))

    def groups(self, *axes: Axis) -> tuple[tuple[int, ...], ...]:
        """The groups of ranks that differ only along `axes` (in the order of AXES); they partition all ranks."""
        chosen = [AXES.index(axis) for axis in AXES if axis in axes]
        kept = [i for i in range(len(AXES)) if i not in chosen]
        size = int(np.prod([self.shape[i] for i in chosen]))
        rows = self._ranks.transpose(*kept, *chosen).reshape(-1, size)
        return tuple(tuple(int(rank) for rank in row) for row in rows)

    def blocks(self, axis: Axis, size: int) -> tuple[tuple[int, ...], ...]:
        """Groups of `size` neighbours along one axis (a divisor of its degree); they partition all ranks."""
        return tuple(group[first : first + size] for group in self.groups(axis) for first in range(0, len(group), size))

    def across_blocks(self, axis: Axis, size: int, *others: Axis) -> tuple[tuple[int, ...], ...]:
        """Groups of the ranks at one place in every block of `size` along `axis`, and along `others`."""
        where = {rank: getattr(self.coordinate(rank), axis) % size for rank in range(self.size)}
        return tuple(
            tuple(rank for rank in group if where[rank] == place)
            for group in self.groups(axis, *others)
            for place in range(size)
        )

    def label(self, ranks: Sequence[int]) -> str:
        """The axes along which the ranks differ, e.g. "tp" or "dp+tp"."""
        places = [self.coordinate(rank) for rank in ranks]
        return "+".join(axis for axis in AXES if len({getattr(place, axis) for place in places}) > 1)

    def group_of(self, rank: int, *axes: Axis) -> tuple[int, ...]:
        """The group along `axes` that holds `rank`."""
        return next(group for group in self.groups(*axes) if rank in group)
