"""Strategies as arrays: one entry a strategy, so that a whole space is computed at once. No torch here.

A `Candidates` holds what changes from one strategy to the next. Codes stand for words: SCHEDULES, RECOMPUTES, OFFLOADS
and CP_KINDS give them, in order. `most_layers` and `last_layers` are the layers of the fullest rank and of the rank
with the head, 0 where layers are spread as evenly as can be.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from hybridpar.parallel.sharding import stages_of
from hybridpar.specs import ContextParallelKind, Offload, Recompute, Schedule, Strategy

SCHEDULES: tuple[str, ...] = get_args(Schedule)
RECOMPUTES: tuple[str, ...] = get_args(Recompute)
OFFLOADS: tuple[str, ...] = get_args(Offload)
CP_KINDS: tuple[str, ...] = get_args(ContextParallelKind)

Array = npt.NDArray[np.float64]
_CODES: Mapping[str, tuple[str, ...]] = {
    "schedule": SCHEDULES,
    "recompute": RECOMPUTES,
    "offload": OFFLOADS,
    "cp_kind": CP_KINDS,
}


@dataclass(frozen=True)
class Candidates:
    """Arrays of one length. Degrees and `micro_batch` are whole numbers held as floats, switches are 0 or 1."""

    dp: Array
    tp: Array
    pp: Array
    cp: Array
    ep: Array
    zero: Array
    sp: Array
    schedule: Array
    virtual: Array
    micro_batch: Array
    recompute: Array
    offload: Array
    overlap: Array
    cp_kind: Array
    most_layers: Array
    last_layers: Array

    def __post_init__(self) -> None:
        lengths = {name: len(getattr(self, name)) for name in FIELDS}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"arrays of a Candidates must be of one length, not {lengths}")

    def __len__(self) -> int:
        return len(self.dp)

    @property
    def devices(self) -> Array:
        """dp*tp*pp*cp."""
        return self.dp * self.tp * self.pp * self.cp

    def __getitem__(self, index: slice | npt.NDArray[Any]) -> Candidates:
        """Some of them: by slice, by mask, or by positions."""
        return Candidates(**{name: getattr(self, name)[index] for name in FIELDS})

    def strategy(self, index: int) -> Strategy:
        """One as a `Strategy`; where layers are uneven `stage_layers` is not restored."""
        whole = {name: int(getattr(self, name)[index]) for name in ("dp", "tp", "pp", "cp", "ep", "zero", "virtual")}
        words = {name: legal[int(getattr(self, name)[index])] for name, legal in _CODES.items()}
        return Strategy(**whole, **words, sp=bool(self.sp[index]), overlap=bool(self.overlap[index]))  # type: ignore[arg-type]

    def strategies(self) -> Iterator[tuple[Strategy, int]]:
        """All, each with its micro-batch."""
        for index in range(len(self)):
            yield self.strategy(index), int(self.micro_batch[index])


FIELDS: tuple[str, ...] = tuple(one.name for one in fields(Candidates))
_DEFAULTS: Mapping[str, float] = {
    **dict.fromkeys(("dp", "tp", "pp", "cp", "ep", "virtual", "micro_batch", "overlap"), 1.0),
    **dict.fromkeys(("zero", "sp", "recompute", "offload", "cp_kind", "most_layers", "last_layers"), 0.0),
    "schedule": float(SCHEDULES.index("1f1b")),
}


def of_arrays(**columns: Sequence[Any] | npt.NDArray[Any] | str | float) -> Candidates:
    """From columns of numbers or words (a single value is repeated); left out: 1, 1f1b, none, overlapping.

    Raises:
        ValueError: a column that does not exist, a word that is not legal, a number out of range, lengths that differ.
    """
    unknown = set(columns) - set(FIELDS)
    if unknown:
        raise ValueError(f"{', '.join(sorted(unknown))} is no column; legal: {', '.join(FIELDS)}")
    arrays = {name: _column(name, columns.get(name, _DEFAULTS[name])) for name in FIELDS}
    lengths = {len(one) for one in arrays.values() if len(one) != 1}
    if len(lengths) > 1:
        told = {name: len(one) for name, one in arrays.items() if len(one) != 1}
        raise ValueError(f"columns must be of one length, not {told}")
    length = lengths.pop() if lengths else 1
    return Candidates(**{name: np.resize(one, length) if len(one) == 1 else one for name, one in arrays.items()})


def _column(name: str, given: Any) -> Array:
    values = np.atleast_1d(np.asarray(given))
    if values.dtype.kind in "US":
        legal = _CODES.get(name)
        if legal is None or not set(values.tolist()) <= set(legal):
            raise ValueError(f"{name}={given!r} is not legal; legal: {', '.join(legal or ('numbers',))}")
        table = {word: float(code) for code, word in enumerate(legal)}
        return np.array([table[word] for word in values.tolist()], dtype=np.float64)
    values = values.astype(np.float64)
    least = 1 if name in ("dp", "tp", "pp", "cp", "ep", "virtual", "micro_batch") else 0
    most = len(_CODES[name]) - 1 if name in _CODES else {"zero": 3, "sp": 1, "overlap": 1}.get(name, np.inf)
    odd = ~((values >= least) & (values <= most) & (values == np.floor(values)))
    if odd.any():
        raise ValueError(f"{name}={values[odd][0]:g} is not legal; legal: whole numbers from {least} to {most:g}")
    return values


def of_strategies(strategies: Iterable[Strategy], micro_batch: int | Iterable[int] = 1) -> Candidates:
    """From one or many strategies, each with its micro-batch.

    Raises:
        ValueError: no strategies, or not one micro-batch for each of them.
    """
    found = list(strategies)
    sizes = [micro_batch] * len(found) if isinstance(micro_batch, int) else list(micro_batch)
    if not found or len(sizes) != len(found):
        raise ValueError(f"{len(found)} strategies with {len(sizes)} micro_batches; there must be one for each")
    numbers = ("dp", "tp", "pp", "cp", "ep", "zero", "virtual")
    columns: dict[str, Any] = {name: [getattr(one, name) for one in found] for name in (*numbers, *_CODES)}
    columns |= {name: [float(getattr(one, name)) for one in found] for name in ("sp", "overlap")}
    uneven = [_uneven(one) for one in found]
    columns |= {"most_layers": [most for most, _ in uneven], "last_layers": [last for _, last in uneven]}
    return of_arrays(micro_batch=sizes, **columns)


def of_strategy(strategy: Strategy, micro_batch: int = 1) -> Candidates:
    """From one."""
    return of_strategies([strategy], micro_batch)


def _uneven(strategy: Strategy) -> tuple[int, int]:
    """Layers of the fullest rank and of the one that has the last stage, where they are told; else 0, 0."""
    if not strategy.stage_layers:
        return 0, 0
    held = [stages_of(strategy, rank) for rank in range(strategy.pp)]
    counts = [sum(strategy.stage_layers[stage] for stage in stages) for stages in held]
    last = next(rank for rank, stages in enumerate(held) if strategy.stages - 1 in stages)
    return max(counts), counts[last]


def join(parts: Sequence[Candidates]) -> Candidates:
    """One after the other."""
    return Candidates(**{name: np.concatenate([getattr(one, name) for one in parts]) for name in FIELDS})
