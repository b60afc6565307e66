"""Bytes of parameters, gradients and optimizer state that one rank holds between steps, in closed form. No torch here.

Symbols: P_i elements of a parameter as a rank computes with it, e bytes of a number, n ranks that FSDP2 spreads one
copy over (a parameter's rows are padded to a multiple of n).

    parameters    e * sum P_i; sharded by FSDP2 e * sum ceil(rows_i / n) * P_i / rows_i
    gradients     as many; of a unit of FSDP2, all or (where this rank holds no row of it) nothing
    optimizer     AdamW: two numbers a parameter and its count of steps, 4 bytes for each tensor that is updated here
                  (Kingma & Ba 2015, arXiv 1412.6980, algorithm 1; Rajbhandari et al. 2020, arXiv 1910.02054, section
                  3.1); SGD: nothing. ZeRO-1 deals out whole tensors, the largest first, each to the rank that has least
    host          what offloading keeps in the host's memory: the optimizer's state with a copy of the parameters, or
                  (with parameters) both themselves
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybridpar.mesh import RankGrid
from hybridpar.specs import RunSpec
from hybridpar.theory.gathering import Unit, gathering
from hybridpar.theory.parameters import BYTES, Held, held_parameters
from hybridpar.theory.replicas import Replicas

_STEP = 4  # bytes of AdamW's count of steps


@dataclass(frozen=True)
class State:
    """Bytes by category; `gathered` is the most that FSDP2 holds of whole parameters at one time (see
    `hybridpar.theory.gathering`)."""

    parameters: int
    gradients: int
    optimizer: int
    host: int
    gathered: int


def state_of_rank(run: RunSpec, rank: int) -> State:
    """What `rank` holds."""
    forms = _Forms(run, rank)
    parameters, optimizer = forms.parameters(), forms.optimizer()
    match run.strategy.offload:
        case "parameters":
            device, host = (0, 0), parameters + optimizer
        case "optimizer":
            device, host = (parameters, 0), forms.updated() + optimizer
        case _:
            device, host = (parameters, optimizer), 0
    return State(device[0], forms.gradients(), device[1], host, forms.gathered())


class _Forms:
    def __init__(self, run: RunSpec, rank: int) -> None:
        self.run = run
        self.replicas = Replicas(run.strategy, rank)
        place = RankGrid.of(run.strategy).coordinate(rank)
        self.held, self.pp_rank = held_parameters(run.model, run.strategy, place), place.pp
        self.e = BYTES[run.workload.precision]

    def parameters(self) -> int:
        return self.e * sum(self._slot(one) for one in self.held if self._kept(one))

    def gradients(self) -> int:
        total = 0
        for members in units_of(self.held).values():
            if any(self._kept(one) for one in members):
                total += sum(self._slot(one) for one in members)
        return self.e * total

    def updated(self) -> int:
        return self.e * sum(self._kept(one) for one in self.held)

    def optimizer(self) -> int:
        if self.run.workload.optimizer != "adamw":
            return 0
        mine = self._updated_here()
        return sum(2 * self.e * self._kept(one) + _STEP for one in mine)

    def gathered(self) -> int:
        units = sharded_units(self.run, self.held, self.replicas)
        return gathering(self.run, self.pp_rank, units).peak

    def _sharded_over(self, one: Held) -> tuple[int, ...]:
        """The ranks among which FSDP2 spreads a parameter; none where it does not."""
        return self.replicas.sharding(one)

    def _slot(self, one: Held) -> int:
        ranks = self._sharded_over(one)
        return one.padded(len(ranks)) // len(ranks) if ranks else one.elements

    def _kept(self, one: Held) -> int:
        ranks = self._sharded_over(one)
        return one.shard(len(ranks), ranks.index(self.replicas.rank)) if ranks else one.elements

    def _updated_here(self) -> list[Held]:
        """Those that ZeRO-1 leaves to this rank, of dense parameters and of experts."""
        if self.run.strategy.zero != 1:
            return list(self.held)
        found = []
        for apart in (False, True):
            members = [one for one in self.held if self.replicas.is_apart(one) == apart]
            ranks = self.replicas.across_ep if apart else self.replicas.all
            found += dealt_out(members, len(ranks))[ranks.index(self.replicas.rank)]
        return found


def units_of(held: Sequence[Held]) -> dict[str, list[Held]]:
    """What FSDP2 gathers and scatters together: each block, its experts, and what is left of a stage."""
    units: dict[str, list[Held]] = {}
    for one in held:
        unit = ".".join(one.name.split(".")[:2]) if one.name.startswith("blocks.") else f"root {one.stage}"
        units.setdefault(f"{unit} experts" if one.is_expert else unit, []).append(one)
    return units


def sharded_units(run: RunSpec, held: Sequence[Held], replicas: Replicas) -> list[Unit]:
    """Those units that FSDP2 spreads over several ranks, with their bytes when whole."""
    e = BYTES[run.workload.precision]
    spread = [(unit, members, replicas.sharding(members[0])) for unit, members in units_of(held).items()]
    return [
        Unit(unit, members[0].stage, e * sum(one.padded(len(ranks)) for one in members))
        for unit, members, ranks in spread
        if ranks
    ]


def dealt_out(held: Sequence[Held], ranks: int) -> list[list[Held]]:
    """As torch's ZeroRedundancyOptimizer deals parameters out: the largest first, to whoever has least (the first)."""
    parts: list[list[Held]] = [[] for _ in range(ranks)]
    sizes = [0] * ranks
    for one in sorted(held, key=lambda one: one.elements, reverse=True):
        least = sizes.index(min(sizes))
        parts[least].append(one)
        sizes[least] += one.elements
    return parts
