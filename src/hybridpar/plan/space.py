"""Every legal strategy for a model, a workload and a number of devices, as arrays. No torch here.

Legality is that of `hybridpar.legality`, rule by rule, but decided once for all strategies that share what a rule looks
at; a test holds the two against each other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from hybridpar.cost.space import CP_KINDS, OFFLOADS, RECOMPUTES, SCHEDULES, Candidates
from hybridpar.legality.pipeline import SPLIT_BACKWARD
from hybridpar.specs import ModelSpec, WorkloadSpec

_DEGREES = ("dp", "tp", "pp", "cp", "ep")
_ROWS = ("zero", "offload", "schedule", "virtual", "sp", "cp_kind", "recompute")


class SpaceError(ValueError):
    """Nothing to choose from; one sentence."""


@dataclass(frozen=True)
class Options:
    """What may be chosen. Degrees left empty: every divisor of the devices.

    Attributes:
        tp, pp, cp, ep: degrees; ep lies inside dp.
        micro_batch: sequences of a forward pass.
        virtual: stages a device, where a schedule leaves the choice.
    """

    tp: tuple[int, ...] = ()
    pp: tuple[int, ...] = ()
    cp: tuple[int, ...] = ()
    ep: tuple[int, ...] = ()
    micro_batch: tuple[int, ...] = (1, 2, 4, 8, 16)
    zero: tuple[int, ...] = (0, 1, 2, 3)
    sp: tuple[bool, ...] = (False, True)
    schedule: tuple[str, ...] = SCHEDULES
    virtual: tuple[int, ...] = (1, 2, 3, 4, 6, 8)
    recompute: tuple[str, ...] = RECOMPUTES
    offload: tuple[str, ...] = OFFLOADS
    cp_kind: tuple[str, ...] = CP_KINDS

    def __post_init__(self) -> None:
        for name, legal in (
            ("schedule", SCHEDULES),
            ("recompute", RECOMPUTES),
            ("offload", OFFLOADS),
            ("cp_kind", CP_KINDS),
            ("zero", (0, 1, 2, 3)),
        ):
            odd = [value for value in getattr(self, name) if value not in legal]
            if odd:
                raise SpaceError(f"{name}={odd[0]} is not legal; legal: {', '.join(map(str, legal))}")
        for name in ("tp", "pp", "cp", "ep", "micro_batch", "virtual"):
            odd = [value for value in getattr(self, name) if value < 1]
            if odd:
                raise SpaceError(f"{name}={odd[0]} is not legal; it must be at least 1")


@dataclass(frozen=True)
class Degrees:
    """One way to lay ranks out."""

    dp: int
    tp: int
    pp: int
    cp: int
    ep: int


def legal_candidates(
    model: ModelSpec, workload: WorkloadSpec, devices: int, options: Options = Options(), *, trains: bool = True
) -> Candidates:
    """Every legal strategy on exactly so many devices; `workload.micro_batch` is chosen, not read.

    Raises:
        SpaceError: there is none.
    """
    rules = _Rules(model, workload, options, trains)
    found = [part for degrees in rules.degrees(devices) for part in rules.of(degrees) if len(part.rows)]
    if not found:
        raise SpaceError(
            f"no strategy of {model.name} on {devices} devices is legal with global_batch={workload.global_batch}, "
            f"seq_len={workload.seq_len} and these options; `hybridpar check` tells of one strategy why"
        )
    lengths = [len(part.rows) for part in found]
    shared = {name: np.repeat([float(getattr(part.degrees, name)) for part in found], lengths) for name in _DEGREES}
    chosen = dict(zip(_ROWS, np.concatenate([part.rows for part in found]).T.copy(), strict=True))
    micro_batch = np.repeat([float(part.micro_batch) for part in found], lengths)
    rest = {"overlap": np.ones(sum(lengths)), **dict.fromkeys(("most_layers", "last_layers"), np.zeros(sum(lengths)))}
    return Candidates(**shared, **chosen, micro_batch=micro_batch, **rest)


@dataclass(frozen=True)
class _Part:
    """Strategies that share degrees and micro-batch; the rest one a row, columns as `_ROWS`."""

    degrees: Degrees
    micro_batch: int
    rows: np.ndarray


@dataclass(frozen=True)
class _Rules:
    model: ModelSpec
    workload: WorkloadSpec
    options: Options
    trains: bool
    kinds: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kinds", frozenset(self.model.layer_kinds))

    # Degrees

    def degrees(self, devices: int) -> Iterator[Degrees]:
        """Those that divide the devices, the model, the sequence and the batch."""
        model, batch = self.model, self.workload.global_batch
        every = _divisors(devices)
        for tp in self._asked("tp", every):
            if not self._tensor(tp):
                continue
            for cp in self._asked("cp", _divisors(devices // tp)):
                if not any(self._context(cp, kind, tp) for kind in self._kinds_of_context(cp)):
                    continue
                for pp in self._asked("pp", _divisors(devices // tp // cp)):
                    dp = devices // tp // cp // pp
                    if pp > model.layers or batch % dp:
                        continue
                    for ep in self._asked("ep", _divisors(dp)):
                        if ep == 1 or ep <= model.experts:
                            yield Degrees(dp, tp, pp, cp, ep)

    def _asked(self, name: str, divisors: Sequence[int]) -> list[int]:
        asked = getattr(self.options, name)
        return [one for one in divisors if not asked or one in asked]

    def _tensor(self, tp: int) -> bool:
        model = self.model
        if tp == 1:
            return True
        if model.vocab < tp:
            return False
        if self.kinds & set("AE"):
            shared = model.kv_heads % tp == 0 or tp % model.kv_heads == 0
            if model.heads % tp or not shared or model.ffn_hidden % tp:
                return False
        if "M" in self.kinds:
            return model.ssm_heads % tp == 0 and (model.ssm_groups == 1 or model.ssm_groups % tp == 0)
        return True

    def _kinds_of_context(self, cp: int) -> tuple[str, ...]:
        """Ways across cp ranks that differ: none where nothing is split, one where no layer attends."""
        if cp == 1 or not self.kinds & set("AE"):
            return CP_KINDS[:1]
        return self.options.cp_kind

    def _context(self, cp: int, kind: str, tp: int) -> bool:
        if cp == 1:
            return True
        attends = bool(self.kinds & set("AE"))
        pieces = cp * (2 if kind == "ring" and attends else 1)
        if self.workload.seq_len % pieces:
            return False
        if "M" in self.kinds and self.workload.seq_len // pieces < self.model.ssm_conv - 1:
            return False
        return not (kind == "ulysses" and attends and max(1, self.model.heads // tp) % cp)

    # What else there is to choose

    def of(self, degrees: Degrees) -> Iterator[_Part]:
        """All strategies of some degrees, a micro-batch at a time."""
        share = self.workload.global_batch // degrees.dp
        ways = tuple(kind for kind in self._kinds_of_context(degrees.cp) if self._context(degrees.cp, kind, degrees.tp))
        splits = degrees.tp > 1 and (self.workload.seq_len // degrees.cp) % degrees.tp == 0
        sp = tuple(one for one in self.options.sp if (self.trains and splits) or not one)
        for micro_batch in self.options.micro_batch:
            if share % micro_batch:
                continue
            schedules = self._schedules(degrees.pp, share // micro_batch)
            rows = _rows(self.options, self.trains, schedules, degrees.dp * degrees.cp > 1, sp, ways)
            yield _Part(degrees, micro_batch, rows)

    def _schedules(self, pp: int, micro_batches: int) -> tuple[tuple[str, int], ...]:
        """Schedules, each with its stages a device."""
        if pp == 1 or not self.trains:
            return (("1f1b", 1),)
        fixed = {"gpipe": (1,), "1f1b": (1,), "zb-v": (2,), "dualpipe-v": (2,)}
        return tuple(
            (schedule, virtual)
            for schedule in self.options.schedule
            for virtual in fixed.get(schedule, self.options.virtual)
            if pp * virtual <= self.model.layers and _in_time(schedule, virtual, pp, micro_batches)
        )


def _in_time(schedule: str, virtual: int, pp: int, micro_batches: int) -> bool:
    """Whether there are enough micro-batches, and rounds divide them."""
    if micro_batches < {"1f1b": pp, "dualpipe-v": pp * virtual}.get(schedule, 1):
        return False
    if schedule == "interleaved" and virtual < 2:
        return False
    return schedule not in ("interleaved", "zero-bubble") or micro_batches % max(1, micro_batches // pp) == 0


@lru_cache(maxsize=4096)
def _rows(
    options: Options,
    trains: bool,
    schedules: tuple[tuple[str, int], ...],
    has_replicas: bool,
    sp: tuple[bool, ...],
    ways: tuple[str, ...],
) -> np.ndarray:
    """Codes of all legal combinations, one a row, columns as `_ROWS`."""
    states = [
        (zero, offload)
        for zero in options.zero
        for offload in options.offload
        if trains or (zero == 0 and offload == "none")
        if zero == 0 or has_replicas
        if offload != "parameters" or zero == 3
        if offload != "optimizer" or zero != 1
    ]
    recomputes = options.recompute if trains else ("none",)
    rows = [
        (
            zero,
            OFFLOADS.index(offload),
            SCHEDULES.index(schedule),
            virtual,
            int(parallel),
            CP_KINDS.index(way),
            RECOMPUTES.index(recompute),
        )
        for (zero, offload), (schedule, virtual), parallel, way, recompute in itertools.product(
            states, schedules, sp, ways, recomputes
        )
        if zero < 3 or schedule not in SPLIT_BACKWARD
    ]
    return np.array(rows, dtype=np.float64).reshape(-1, len(_ROWS))


@lru_cache(maxsize=1024)
def _divisors(n: int) -> tuple[int, ...]:
    return tuple(k for k in range(1, n + 1) if n % k == 0)
