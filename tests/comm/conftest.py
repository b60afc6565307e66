"""A parent that has imported what its forked ranks need, and starts no threads."""

from __future__ import annotations

import pytest
import torch

from hybridpar.launch.forked import preload


@pytest.fixture(scope="session", autouse=True)
def _warm() -> None:
    torch.set_num_threads(1)
    preload()
