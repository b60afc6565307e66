"""Which ranks hold the same parameters as one rank does: the groups of `hybridpar.parallel.replicas`. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from hybridpar.mesh import RankGrid
from hybridpar.specs import Strategy
from hybridpar.theory.parameters import Held


class Replicas:
    """The groups of `rank`, each a tuple of ranks that holds it."""

    def __init__(self, strategy: Strategy, rank: int) -> None:
        self._strategy, self.rank = strategy, rank
        self._grid = RankGrid.of(strategy)

    @cached_property
    def all(self) -> tuple[int, ...]:
        """The ranks with the same dense parameters."""
        return self._grid.group_of(self.rank, "dp", "cp")

    @cached_property
    def shards(self) -> tuple[int, ...]:
        """The ranks over which FSDP2 spreads one copy."""
        size = self._strategy.zero_group
        if not 0 < size < len(self.all):
            return self.all
        first = self.all.index(self.rank) // size * size
        return self.all[first : first + size]

    @cached_property
    def copies(self) -> tuple[int, ...]:
        """The ranks with the same shard (HSDP)."""
        if self.shards == self.all:
            return (self.rank,)
        return self.all[self.all.index(self.rank) % len(self.shards) :: len(self.shards)]

    @cached_property
    def ep(self) -> tuple[int, ...]:
        """The ranks over which all experts lie."""
        return self._mine(self._grid.blocks("dp", self._strategy.ep))

    @cached_property
    def across_ep(self) -> tuple[int, ...]:
        """The ranks with the same experts."""
        if self._strategy.ep == 1:
            return self.all
        return self._mine(self._grid.across_blocks("dp", self._strategy.ep, "cp"))

    def is_apart(self, one: Held) -> bool:
        """Whether a parameter is not the same on all replicas."""
        return self._strategy.ep > 1 and one.is_expert

    def sharding(self, one: Held) -> tuple[int, ...]:
        """The ranks over which FSDP2 spreads a parameter; none where it is whole on each."""
        if self._strategy.zero < 2 or len(self.all) == 1:
            return ()
        ranks = self.across_ep if self.is_apart(one) else self.shards
        return ranks if len(ranks) > 1 else ()

    def _mine(self, partition: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        return next(ranks for ranks in partition if self.rank in ranks)
