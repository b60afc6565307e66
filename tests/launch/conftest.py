"""A short local text to train on, a warm parent, and a fixed ceiling where speed is not what is tested."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hybridpar import train
from hybridpar.launch import batch
from hybridpar.launch.forked import preload
from tests.launch.doubles import Fault, engine_with


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text long enough for every toy run."""
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text("".join(f"line {number} of a short text\n" for number in range(400)))
    return path


@pytest.fixture(scope="session")
def _warm() -> None:
    preload()


@pytest.fixture(autouse=True)
def _own_corpus_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("HYBRIDPAR_DATA", str(tmp_path_factory.getbasetemp() / "corpus"))


@pytest.fixture
def fixed_ceiling(monkeypatch: pytest.MonkeyPatch) -> float:
    """One core reaches this many FLOP/s, unmeasured."""
    monkeypatch.setattr(batch, "_measure", lambda device, precision: 1e11)
    return 1e11


@pytest.fixture
def with_fault(_warm: None, fixed_ceiling: float, monkeypatch: pytest.MonkeyPatch) -> Callable[[Fault], None]:
    """Let every rank forked from now on train an engine with the fault."""
    return lambda fault: monkeypatch.setattr(train, "build_engine", engine_with(fault))
