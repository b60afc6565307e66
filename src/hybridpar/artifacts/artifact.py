"""What an artifact is: a figure, a table, or the honest absence of one, each with its caption and its runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
from matplotlib.figure import Figure


@dataclass(frozen=True)
class Provenance:
    """Where the numbers of one artifact come from."""

    tier: str
    testbed: str
    run_ids: tuple[str, ...]


@dataclass(frozen=True)
class FigureArtifact:
    """A drawn figure."""

    name: str
    title: str
    caption: str
    provenance: Provenance
    figure: Figure


@dataclass(frozen=True)
class Column:
    """One column of a table: where its values are, its heading (with unit), and how a value is written."""

    key: str
    heading: str
    write: Callable[[Any], str] = str
    numeric: bool = False


@dataclass(frozen=True)
class TableArtifact:
    """A table: `frame` holds full-precision values, `columns` says how they are shown."""

    name: str
    title: str
    caption: str
    provenance: Provenance
    frame: pd.DataFrame
    columns: tuple[Column, ...] = field(default=())

    def cells(self) -> list[list[str]]:
        """The shown text of every cell, row by row."""
        keys = [column.key for column in self.columns]
        return [
            [column.write(value) for column, value in zip(self.columns, row, strict=True)]
            for row in self.frame[keys].itertuples(index=False, name=None)
        ]


@dataclass(frozen=True)
class Missing:
    """A figure or table that this study has no runs for; it is said, not drawn as an empty panel."""

    name: str
    title: str
    caption: str


Artifact = FigureArtifact | TableArtifact | Missing
