"""The order in which one pipeline rank runs forward and backward passes, for every schedule. No torch here.

F forward, B backward, and where a schedule takes the backward pass in two parts: I gradients of the inputs, W of the
weights. Orders are those of torch.distributed.pipelining, which differ from the papers' in places (torch's own schedule
objects are what the tests compare with).

Symbols: p ranks of the pipeline, r this rank, v stages a rank, m micro-batches.

gpipe         all forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965, section 2.3)
1f1b          p - r forwards, then one backward for one forward (Narayanan et al. 2019, PipeDream, section 3.3)
interleaved   rounds of about p micro-batches on each of v stages; (v-1) rounds and 2 (p-1-r) forwards ahead
              (Narayanan et al. 2021, arXiv 2104.04473, section 2.2)
zero-bubble   the same with p-1-r forwards ahead, and W put off by r backwards (Qi et al. 2023, arXiv 2401.10241, ZB-H1)
zb-v          two stages in a V, at most 2p micro-batches held (Qi et al. 2023, section 6)
dualpipe-v    two stages in a V, forwards and backwards in pairs (DeepSeek-AI 2025, DualPipeV)
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from hybridpar.parallel.sharding import stages_of
from hybridpar.specs import RunSpec

Kind = Literal["F", "B", "I", "W"]


@dataclass(frozen=True)
class Action:
    """One pass of one micro-batch through one stage."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


def actions_of_rank(run: RunSpec, pp_rank: int) -> list[Action]:
    """Everything a pp rank runs in an optimizer step, in order; without a pipeline, micro-batch by micro-batch."""
    strategy, m = run.strategy, run.micro_batches
    if strategy.pp == 1:
        return [Action(kind, 0, micro_batch) for micro_batch in range(m) for kind in _WHOLE]
    stages = stages_of(strategy, pp_rank)
    match strategy.schedule:
        case "gpipe":
            return [Action(kind, stages[0], micro_batch) for kind in _WHOLE for micro_batch in range(m)]
        case "1f1b":
            return _one_forward_one_backward(stages[0], min(m, strategy.pp - pp_rank), m)
        case "interleaved" | "zero-bubble":
            return _in_rounds(stages, pp_rank, strategy.pp, m, splits=strategy.schedule == "zero-bubble")
        case "zb-v":
            return _zero_bubble_v(stages, pp_rank, strategy.pp, m)
        case _:
            return _dual_pipe_v(stages, pp_rank, strategy.pp, m)


_WHOLE: tuple[Kind, Kind] = ("F", "B")


class _Line:
    """Actions so far; each kind takes a stage's micro-batches in order, and a whole backward pass is both its parts."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.done: Counter[tuple[Kind, int]] = Counter()

    def add(self, kind: Kind, stage: int) -> None:
        parts: tuple[Kind, ...] = ("I", "W") if kind == "B" else (kind,)
        self.actions.append(Action(kind, stage, self.done[parts[0], stage]))
        for part in parts:
            self.done[part, stage] += 1


def _one_forward_one_backward(stage: int, ahead: int, m: int) -> list[Action]:
    line = _Line()
    for _ in range(ahead):
        line.add("F", stage)
    for _ in range(m - ahead):
        line.add("B", stage)
        line.add("F", stage)
    while line.done["W", stage] < m:
        line.add("B", stage)
    return line.actions


def _in_rounds(stages: tuple[int, ...], rank: int, p: int, m: int, *, splits: bool) -> list[Action]:
    a_round = m // max(1, m // p)
    total = m * len(stages)
    ahead = min(total, (len(stages) - 1) * a_round + (1 if splits else 2) * (p - 1 - rank))

    def stage_of(step: int, order: tuple[int, ...]) -> int:
        return order[step // a_round % len(order)]

    line = _Line()
    for step in range(ahead):
        line.add("F", stage_of(step, stages))
    backward: Kind = "I" if splits else "B"
    put_off: deque[int] = deque()
    for step in range(total):
        if ahead + step < total:
            line.add("F", stage_of(ahead + step, stages))
        stage = stage_of(step, stages[::-1])
        line.add(backward, stage)
        put_off.append(stage)
        if splits and step >= rank:
            line.add("W", put_off.popleft())
    while splits and put_off:
        line.add("W", put_off.popleft())
    return line.actions


def _zero_bubble_v(stages: tuple[int, ...], rank: int, p: int, m: int) -> list[Action]:
    """Made for at least 2p-1 micro-batches; of fewer, those that are there."""
    there, back = stages
    line, enough = _Line(), max(2 * p - 1, m)

    def whole(stage: int) -> None:
        line.add("I", stage)
        line.add("W", stage)

    for _ in range(2 * (p - rank) - 1):
        line.add("F", there)
    for _ in range(rank):
        line.add("F", back)
        line.add("F", there)
    for _ in range(p - rank):
        line.add("F", back)
        whole(back)
    while line.done["F", back] < line.done["F", there] or line.done["F", there] < enough:
        if line.done["F", there] < enough:
            line.add("F", there)
        whole(there)
        line.add("F", back)
        whole(back)
    for _ in range(rank):
        line.add("I", there)
        line.add("I", back)
    for _ in range(p - rank):
        line.add("I", there)
        line.add("W", there)
    for stage in (back, there):
        while line.done["W", stage] < line.done["I", stage]:
            line.add("W", stage)
    return [action for action in line.actions if action.micro_batch < m]


def _dual_pipe_v(stages: tuple[int, ...], rank: int, p: int, m: int) -> list[Action]:
    there, back = stages
    line = _Line()
    put_off: deque[int] = deque()

    def backward(stage: int, *, splits: bool) -> None:
        line.add("I" if splits else "B", stage)
        if splits:
            put_off.append(stage)

    def weights() -> None:
        if put_off:
            line.add("W", put_off.popleft())

    def times(count: int, do: Callable[[], None]) -> None:
        for _ in range(count):
            do()

    def pair(forward: int, back_through: int) -> None:
        line.add("F", forward)
        line.add("B", back_through)

    times(2 * (p - 1 - rank), lambda: line.add("F", there))
    for _ in range(rank + 1):
        line.add("F", there)
        line.add("F", back)
    for _ in range(p - 1 - rank):
        backward(back, splits=True)
        weights()
        line.add("F", back)
    for _ in range(m - 2 * p + rank + 1):
        pair(there, back)
        pair(back, there)
    for _ in range(p - 1 - rank):
        line.add("B", back)
        pair(back, there)
    # The last backward passes are split, from the middle of this stretch on, on odd ranks half a turn earlier.
    splits = False
    for turn in range(rank + 1):
        middle = turn == (rank + 1) // 2
        splits = splits or (middle and rank % 2 == 1)
        backward(back, splits=splits)
        splits = splits or (middle and rank % 2 == 0)
        backward(there, splits=splits)
    for _ in range(p - 1 - rank):
        weights()
        backward(there, splits=splits)
    times(rank + 1, weights)
    return line.actions
