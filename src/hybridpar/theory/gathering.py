"""When FSDP2 gathers parameters, and how much of them is whole at once. No torch here.

A unit (a block with its experts, or the rest of a stage: its root) is gathered before it is used, unless it is whole.

    after a forward pass    with ZeRO-3 a block lets go of what it gathered; the root and, with ZeRO-2, all stay whole
    after a backward pass   with ZeRO-3 each unit lets go; but in a pipeline it stays whole, until a forward pass lets
                            go of it or the stage is done: torch's stages reduce gradients once, at the end
    schedules of actions    torch gathers a stage whole before its first pass, and lets go of it where three other
                            stages come first (Zhao et al. 2023, arXiv 2304.11277, is without pipelines)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from hybridpar.specs import RunSpec
from hybridpar.theory.schedule import Action, actions_of_rank

_AHEAD = 3  # stages that torch.distributed.pipelining keeps whole, or gathers ahead
_BY_ACTIONS = ("interleaved", "zero-bubble", "zb-v", "dualpipe-v")

Event = tuple[Literal["gather", "release"], int]


@dataclass(frozen=True)
class Unit:
    """What is gathered together: `bytes` when whole; a block has its experts as a unit of their own beside it."""

    name: str
    stage: int
    bytes: int

    @property
    def is_root(self) -> bool:
        """Whether it is what blocks leave of a stage."""
        return self.name.startswith("root")

    @property
    def block(self) -> str:
        """The block that it belongs to; a root is alone."""
        return self.name.removesuffix(" experts")


@dataclass
class Gathering:
    """How often each unit of a rank is gathered in a step, and the most bytes that are whole at once."""

    times: Counter[str] = field(default_factory=Counter)
    peak: int = 0


def gathering(run: RunSpec, pp_rank: int, units: Sequence[Unit]) -> Gathering:
    """Walk through the step of a pp rank that holds `units`."""
    walk = _Walk(run.strategy.zero, run.strategy.pp > 1, units)
    actions = actions_of_rank(run, pp_rank)
    events = _with_stages_ahead(actions) if _is_by_actions(run) else iter(actions)
    for event in events:
        if isinstance(event, Action):
            walk.run(event)
        else:
            walk.all_of(*event)
    return walk.seen


def _is_by_actions(run: RunSpec) -> bool:
    return run.strategy.pp > 1 and run.strategy.schedule in _BY_ACTIONS


def _with_stages_ahead(actions: Sequence[Action]) -> Iterator[Action | Event]:
    """The actions, with those that torch adds: which stages it gathers, and which it lets go of.

    It asks for a stage early, but waits for it, and so has it whole, right before the first pass through it.
    """
    whole: list[int] = []
    asked: list[int] = []
    for place, action in enumerate(actions):
        soon = list(dict.fromkeys(later.stage for later in actions[place:]))[:_AHEAD]
        for stage in [stage for stage in whole if stage not in soon]:
            whole.remove(stage)
            yield "release", stage
        asked += [stage for stage in soon if stage not in asked + whole]
        if action.stage in asked:
            asked.remove(action.stage)
            whole.append(action.stage)
            yield "gather", action.stage
        yield action


class _Walk:
    def __init__(self, zero: int, is_pipeline: bool, units: Sequence[Unit]) -> None:
        self._lets_go, self._is_pipeline = zero == 3, is_pipeline
        self._units: Mapping[str, Unit] = {unit.name: unit for unit in units}
        self._whole: set[str] = set()
        self._bytes = 0
        self.seen = Gathering()

    def run(self, action: Action) -> None:
        """A pass through a stage, block by block; the order of blocks changes nothing."""
        if action.kind in ("I", "W"):
            return  # legal with ZeRO-2 alone, where all is whole since F
        stays = not self._lets_go or (self._is_pipeline and action.kind != "F")
        roots, blocks = self._of(action.stage)
        for root in roots:
            self._gather(root)
        for members in blocks:
            for unit in members:
                self._gather(unit)
            for unit in () if stays else members:
                self._release(unit)
        for root in () if stays or action.kind == "F" else roots:
            self._release(root)

    def all_of(self, kind: str, stage: int) -> None:
        """Gather or let go of a whole stage."""
        for unit in self._units.values():
            if unit.stage == stage:
                self._gather(unit.name) if kind == "gather" else self._release(unit.name)

    def _of(self, stage: int) -> tuple[list[str], list[list[str]]]:
        blocks: dict[str, list[str]] = {}
        for unit in self._units.values():
            if unit.stage == stage and not unit.is_root:
                blocks.setdefault(unit.block, []).append(unit.name)
        roots = [unit.name for unit in self._units.values() if unit.stage == stage and unit.is_root]
        return roots, list(blocks.values())

    def _gather(self, name: str) -> None:
        if name in self._whole:
            return
        self._whole.add(name)
        self._bytes += self._units[name].bytes
        self.seen.times[name] += 1
        self.seen.peak = max(self.seen.peak, self._bytes)

    def _release(self, name: str) -> None:
        if name in self._whole:
            self._whole.remove(name)
            self._bytes -= self._units[name].bytes
