"""How values are written in tables, and the columns that several tables have."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from hybridpar.artifacts import captions
from hybridpar.artifacts.artifact import Column


def number(digits: int = 0, scale: float = 1.0) -> Callable[[Any], str]:
    """Writes a number with `digits` decimals and thousands apart; what does not exist is a dash."""

    def write(value: Any) -> str:
        if value is None or (isinstance(value, float) and math.isnan(value)):
            return "–"
        return "∞" if math.isinf(value) else f"{value * scale:,.{digits}f}"

    return write


def scientific(value: Any) -> str:
    """Writes a small ratio as a power of ten; what does not exist is a dash."""
    if value is None or math.isnan(value):
        return "–"
    return "0" if value == 0 else f"{value:.1e}"


def yes_no(value: Any) -> str:
    """Writes a truth value."""
    return "yes" if value else "no"


def text(value: Any) -> str:
    """Writes words; none are a dash."""
    return value if isinstance(value, str) and value else "–"


def numeric(key: str, heading: str, digits: int = 0, scale: float = 1.0) -> Column:
    """A column of numbers, aligned right."""
    return Column(key, heading, number(digits, scale), numeric=True)


MODEL, RANKS, METHOD = Column("model", "model"), numeric("world", "ranks"), Column("method", "strategy")
LABEL = Column("strategy", "strategy", captions.short)
THROUGHPUT = (
    numeric("tokens_per_s", "tokens/s"),
    numeric("tokens_low", "min"),
    numeric("tokens_high", "max"),
    numeric("steps", "n"),
)
