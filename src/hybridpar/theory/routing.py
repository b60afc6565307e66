"""How many tokens come to a rank's experts under an even load. No torch here.

An even load gives each of X experts R/X of the R choices (tokens times top_k) of a rank, the first R mod X one more.
No router is so even: what a run really exchanges and computes differs from rank to rank, but not in the sum over ranks.
"""

from __future__ import annotations

from hybridpar.mesh import Coordinate
from hybridpar.parallel.sharding import part
from hybridpar.specs import RunSpec


def even_load(choices: int, experts: int) -> list[int]:
    """Choices of each expert."""
    base, extra = divmod(choices, experts)
    return [base + (index < extra) for index in range(experts)]


def arriving_choices(run: RunSpec, place: Coordinate, choices: int) -> int:
    """How many choices this rank's experts work on, when each of the ep ranks makes `choices`."""
    ep = run.strategy.ep
    mine = part(run.model.experts, ep, place.dp % ep)
    return ep * sum(even_load(choices, run.model.experts)[mine])
