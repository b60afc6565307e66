"""The best strategy of a space, what it competes with, and what would change the choice. No torch here.

Everything is exact for the cost model: all legal strategies are computed, none is skipped, so the answer is that of
brute force.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np

from hybridpar.cost.coefficients import RAW, Coefficients
from hybridpar.cost.doubt import Doubt
from hybridpar.cost.hardware import Accelerator
from hybridpar.cost.predict import Prediction, predict_many
from hybridpar.cost.space import CP_KINDS, OFFLOADS, RECOMPUTES, SCHEDULES, Array, Candidates, of_strategy
from hybridpar.plan.space import Options, SpaceError, legal_candidates
from hybridpar.specs import ClusterSpec, ModelSpec, Strategy, WorkloadSpec

Objective = Literal["time", "memory", "cost"]
OBJECTIVES: tuple[str, ...] = get_args(Objective)

ANYTHING = Options()
USUAL_DOUBT = Doubt()
MOST_RISK = 0.1  # chance of running out of memory that a plan may take


@dataclass(frozen=True)
class Task:
    """What is to be planned. `devices` are all used, but where cost is minimised, which may leave some idle."""

    model: ModelSpec
    workload: WorkloadSpec
    hardware: Accelerator
    devices: int
    options: Options = ANYTHING
    coefficients: Coefficients = RAW
    doubt: Doubt = USUAL_DOUBT
    most_risk: float = MOST_RISK

    @property
    def cluster(self) -> ClusterSpec:
        """As many nodes as the devices fill."""
        node = self.hardware.node
        return ClusterSpec(name=self.hardware.name, devices_per_node=node, nodes=max(1, -(-self.devices // node)))


@dataclass(frozen=True)
class Choice:
    """One strategy with what is predicted of it."""

    strategy: Strategy
    micro_batch: int
    seconds: float
    low: float
    high: float
    bytes: float
    p_oom: float
    tokens_per_s: float
    mfu: float
    parts: Mapping[str, float]
    held: Mapping[str, float]

    @property
    def device_seconds(self) -> float:
        """What a step costs."""
        return self.seconds * self.strategy.devices

    @property
    def label(self) -> str:
        """Its strategy and micro-batch."""
        return f"{self.strategy.label} micro-batch {self.micro_batch}"

    def row(self) -> dict[str, Any]:
        """Plain data."""
        return {"label": self.label, **asdict(self), "strategy": self.strategy.model_dump()}


@dataclass(frozen=True)
class Searched:
    """A whole space, computed."""

    task: Task
    candidates: Candidates
    prediction: Prediction

    @cached_property
    def fits(self) -> np.ndarray:
        """Which may be tried: the chance of running out of memory is small enough."""
        return self.prediction.p_oom <= self.task.most_risk

    def choice(self, index: int) -> Choice:
        """One of them."""
        p, i = self.prediction, int(index)
        return Choice(
            strategy=self.candidates.strategy(i),
            micro_batch=int(self.candidates.micro_batch[i]),
            **{name: float(getattr(p, name)[i]) for name in _NUMBERS},
            parts={name: float(values[i]) for name, values in p.parts.items()},
            held={name: float(values[i]) for name, values in p.held.items()},
        )

    def best(self, objective: Objective = "time", among: np.ndarray | None = None) -> int | None:
        """Position of the best that fits (and is `among` some); None where none does. Of equals the simplest: the
        fewest ways of splitting, and none that saves memory for nothing."""
        chosen = self.fits if among is None else self.fits & among
        places = np.flatnonzero(chosen)
        if not len(places):
            return None
        scores = self.score(objective)[places]
        equals = places[scores <= scores.min() * (1 + 1e-9)]
        return int(equals[np.argmin(self._complexity[equals])])

    def score(self, objective: Objective) -> Array:
        """What is minimised."""
        if objective == "memory":
            return self.prediction.bytes
        return self.prediction.seconds * (self.candidates.devices if objective == "cost" else 1.0)

    @cached_property
    def _complexity(self) -> Array:
        c = self.candidates
        axes = sum((getattr(c, name) > 1).astype(float) for name in ("dp", "tp", "pp", "cp", "ep"))
        extras = c.zero + c.offload + c.recompute + c.cp_kind + (c.virtual > 1) + np.abs(c.schedule - _1F1B)
        return 100.0 * axes + extras

    def pareto(self) -> list[int]:
        """Those that fit and that no other beats in both time and memory, from the fastest on."""
        places = np.flatnonzero(self.fits)
        order = places[np.lexsort((self.prediction.bytes[places], self.prediction.seconds[places]))]
        least = np.minimum.accumulate(self.prediction.bytes[order])
        before = np.concatenate(([np.inf], least[:-1]))
        return [int(i) for i in order[self.prediction.bytes[order] < before]]


_NUMBERS = ("seconds", "low", "high", "bytes", "p_oom", "tokens_per_s", "mfu")
_1F1B = float(SCHEDULES.index("1f1b"))


def search(task: Task) -> Searched:
    """Compute every legal strategy.

    Raises:
        SpaceError: nothing is legal.
        HardwareError: the accelerator cannot compute in the workload's precision.
    """
    candidates = legal_candidates(task.model, task.workload, task.devices, task.options)
    return Searched(task, candidates, _predicted(task, candidates))


def _predicted(task: Task, candidates: Candidates) -> Prediction:
    return predict_many(
        task.model, task.workload, task.cluster, task.hardware, candidates, task.coefficients, doubt=task.doubt
    )


def one_choice(task: Task, strategy: Strategy, micro_batch: int) -> Choice:
    """What is predicted of one strategy.

    Raises:
        HardwareError: see `search`.
    """
    candidates = of_strategy(strategy, micro_batch)
    return Searched(task, candidates, _predicted(task, candidates)).choice(0)


def cheapest_size(task: Task) -> Task:
    """The same with as few devices as make a token cheapest: halves of the cluster are tried, down to one device.

    Raises:
        SpaceError: nothing is legal at any size.
    """
    sizes = [task.devices >> halvings for halvings in range(task.devices.bit_length())]
    sizes = [size for place, size in enumerate(sizes) if size and size << place == task.devices]
    costs = {size: _cost(replace(task, devices=size)) for size in sizes}
    return replace(task, devices=min(sizes, key=lambda size: (costs[size], size)))


def _cost(task: Task) -> float:
    try:
        searched = search(task)
    except SpaceError:
        return float("inf")
    best = searched.best("cost")
    return float("inf") if best is None else float(searched.score("cost")[best])


# Why not otherwise


@dataclass(frozen=True)
class Rival:
    """The best of those that do without something, or with: its score over the winner's, and what makes it lose.

    `more` are the parts of the step that cost it most beside the winner, in seconds; `reason` tells why there is none.
    """

    name: str
    choice: Choice | None
    ratio: float
    more: Mapping[str, float]
    reason: str = ""


def rivals(searched: Searched, winner: int, objective: Objective = "time") -> list[Rival]:
    """The best strategy of each kind that the winner is not."""
    return [_rival(searched, winner, objective, name, among) for name, among in _kinds(searched, winner)]


def _kinds(searched: Searched, winner: int) -> Iterator[tuple[str, np.ndarray]]:
    c = searched.candidates
    single = {
        "data parallelism alone": c.tp * c.pp * c.cp * c.ep == 1,
        "tensor parallelism alone": c.dp * c.pp * c.cp == 1,
        "a pipeline alone": c.dp * c.tp * c.cp == 1,
        "data and tensor parallelism": c.pp * c.cp == 1,
        "data parallelism and a pipeline": c.tp * c.cp == 1,
    }
    for name, among in single.items():
        if among.any() and not among[winner]:
            yield name, among
    for axis in ("tp", "pp", "cp", "ep"):
        values = getattr(c, axis)
        if values[winner] > 1:
            yield f"no {axis}", values == 1
        for factor, what in ((0.5, "half"), (2.0, "twice")):
            there = values == values[winner] * factor
            if there.any() and values[winner] * factor != 1:
                yield f"{what} the {axis} ({int(values[winner] * factor)})", there
    for zero in sorted(set(c.zero.tolist()) - {float(c.zero[winner])}):
        yield f"zero={int(zero)}", c.zero == zero
    if c.recompute[winner]:
        yield "no recomputation", c.recompute == 0
    if c.pp[winner] > 1:
        for code in sorted(set(c.schedule.tolist()) - {float(c.schedule[winner])}):
            yield f"schedule={SCHEDULES[int(code)]}", (c.schedule == code) & (c.pp > 1)
    if c.tp[winner] > 1:
        yield ("no sequence parallelism", (c.sp == 0)) if c.sp[winner] else ("sequence parallelism", c.sp == 1)


def _rival(searched: Searched, winner: int, objective: Objective, name: str, among: np.ndarray) -> Rival:
    if not among.any():
        return Rival(name, None, float("inf"), {}, "no such strategy is legal")
    best = searched.best(objective, among)
    if best is None:
        places = np.flatnonzero(among)
        least = searched.choice(int(places[np.argmin(searched.prediction.bytes[places])]))
        reason = (
            f"does not fit: at least {least.bytes / 2**30:.1f} GiB ({least.label}), of which "
            f"{_largest(least.held)} is the largest part"
        )
        return Rival(name, None, float("inf"), {}, reason)
    scores = searched.score(objective)
    ours, theirs = searched.prediction.parts, searched.choice(best)
    differences = {
        part: theirs.parts[part] - float(ours[part][winner]) for part in ours if not part.endswith("_hidden")
    }
    more = {part: d for part, d in sorted(differences.items(), key=lambda one: -one[1])[:3] if d > 0}
    return Rival(name, theirs, float(scores[best] / scores[winner]), more)


def _largest(held: Mapping[str, float]) -> str:
    return max(held, key=lambda name: held[name])


# What would change the choice


@dataclass(frozen=True)
class Change:
    """The world with one thing changed by `factor`, the best strategy there, and what the old one would lose by."""

    what: str
    factor: float
    best: Choice | None
    regret: float | None

    @property
    def is_kept(self) -> bool:
        """Whether the old choice is still the best."""
        return self.regret == 0.0


def sensitivity(task: Task, winner: Choice, objective: Objective = "time") -> list[Change]:
    """Search again with links, memory and batch halved and doubled."""
    return [
        _changed(name, factor, change(task, factor), winner, objective)
        for name, change in _CHANGES.items()
        for factor in (0.25, 0.5, 2.0, 4.0)
    ]


def _scaled(task: Task, **factors: float) -> Task:
    numbers = {
        name: getattr(task.hardware, name).model_copy(update={"value": getattr(task.hardware, name).value * factor})
        for name, factor in factors.items()
    }
    return replace(task, hardware=task.hardware.model_copy(update=numbers))


def _with_batch(task: Task, factor: float) -> Task:
    batch = max(1, round(task.workload.global_batch * factor))
    return replace(task, workload=task.workload.model_copy(update={"global_batch": batch}))


_CHANGES: Mapping[str, Callable[[Task, float], Task]] = {
    "bandwidth between nodes": lambda task, factor: _scaled(task, nic_gb_s=factor),
    "bandwidth within a node": lambda task, factor: _scaled(task, link_gb_s=factor),
    "device memory": lambda task, factor: _scaled(task, memory_gb=factor),
    "global batch": _with_batch,
}


def _changed(what: str, factor: float, task: Task, winner: Choice, objective: Objective) -> Change:
    try:
        searched = search(task)
    except SpaceError:
        return Change(what, factor, None, None)
    best = searched.best(objective)
    if best is None:
        return Change(what, factor, None, None)
    same = _place_of(searched.candidates, winner)
    scores = searched.score(objective)
    if same is None or not searched.fits[same]:
        return Change(what, factor, searched.choice(best), None)
    return Change(what, factor, searched.choice(best), float(scores[same] / scores[best]) - 1)


def _place_of(c: Candidates, choice: Choice) -> int | None:
    strategy = choice.strategy
    same = c.micro_batch == choice.micro_batch
    for name in ("dp", "tp", "pp", "cp", "ep", "zero", "virtual", "sp"):
        same &= getattr(c, name) == float(getattr(strategy, name))
    for name, words in (
        ("schedule", SCHEDULES),
        ("recompute", RECOMPUTES),
        ("offload", OFFLOADS),
        ("cp_kind", CP_KINDS),
    ):
        same &= getattr(c, name) == float(words.index(getattr(strategy, name)))
    places = np.flatnonzero(same)
    return int(places[0]) if len(places) else None
