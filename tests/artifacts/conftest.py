"""Synthetic studies, written once: a full grid, a small one, and one in which nothing finished."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from hybridpar.artifacts import inputs
from hybridpar.artifacts.inputs import Study
from tests.artifacts import synthetic


@pytest.fixture(scope="session")
def small_paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Tables and benchmarks of a study with one size, both families, up to 4 ranks."""
    return synthetic.write(tmp_path_factory.mktemp("small"), sizes=("small",), worlds=(1, 2, 4), repeats=1)


@pytest.fixture(scope="session")
def full(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """Two sizes, both families, up to 8 ranks, hybrids."""
    paths = synthetic.write(tmp_path_factory.mktemp("full"), sizes=("medium", "large"), worlds=(1, 2, 8))
    return inputs.load(*paths)


@pytest.fixture(scope="session")
def small(small_paths: tuple[Path, Path]) -> Study:
    """The small study, loaded."""
    return inputs.load(*small_paths)


@pytest.fixture(scope="session")
def lone(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """One family on one device, no benchmark, and no comparison with theory."""
    tables, bench = synthetic.write(
        tmp_path_factory.mktemp("lone"), families=("llama",), sizes=("small",), worlds=(1,), repeats=1
    )
    shutil.rmtree(bench)
    (tables / "theory.parquet").unlink()
    return inputs.load(tables, bench)


@pytest.fixture(scope="session")
def failed(small: Study) -> Study:
    """A study in which every run crashed."""
    names = ("steps", "collectives", "memory", "bench", "departures", "theory")
    nothing = {name: getattr(small, name).head(0) for name in names}
    return replace(small, runs=small.runs.assign(outcome="crash", reason="rank 0 left with exit code 1"), **nothing)
