"""Ranks are forked from a warm parent."""

import pytest

from hybridpar.launch.forked import preload


@pytest.fixture(scope="session", autouse=True)
def _warm() -> None:
    preload()
