"""One violated constraint, as data and as a sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hybridpar.specs import RunSpec

# Longer lists of legal values tell nothing that their rule does not.
_MANY = 24


@dataclass(frozen=True)
class Violation:
    """One violated constraint."""

    field: str
    value: Any
    reason: str
    legal: str

    def __str__(self) -> str:
        return f"{self.field}={_text(self.value)}: {self.reason}; legal: {self.legal}"


Rule = Callable[[RunSpec], Iterator[Violation]]


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(map(str, value)) + "]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def divisors(n: int) -> str:
    """All divisors of n, in words where they are many."""
    if n > 100_000:
        return f"a divisor of {n}"
    found = [k for k in range(1, n + 1) if n % k == 0]
    return ", ".join(map(str, found)) if len(found) <= _MANY else f"a divisor of {n}"


def those(candidates: range, legal: Callable[[int], bool]) -> str:
    """The candidates that are legal, in words."""
    return ", ".join(str(n) for n in candidates if legal(n)) or "none"


def up_to(largest: int) -> str:
    """All whole numbers from 1, in words."""
    return "1" if largest <= 1 else f"1 to {largest}"
