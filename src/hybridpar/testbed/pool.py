"""The testbeds of a batch of runs: each brought up when the first run asks for it, all down at the end. No torch here.

with Testbeds() as testbeds:
    fork_ranks(world, body, ..., enter=testbeds.of(plan).enter)
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from hybridpar.testbed.network import REGISTRY, PlainTestbed, ScaledTestbed, Testbed, owned
from hybridpar.testbed.plan import Plan


class Testbeds:
    """Context manager; one scale model stands at a time, as their devices share the cores."""

    def __init__(self, registry: Path = REGISTRY) -> None:
        self._registry = registry
        self._stack = contextlib.ExitStack()
        self._standing: ScaledTestbed | None = None

    def __enter__(self) -> Testbeds:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._standing = None
        self._stack.close()

    def of(self, plan: Plan | None) -> Testbed:
        """Where the ranks of a run go; None: plain loopback.

        Raises:
            TestbedError: the scale model cannot be brought up.
        """
        if plan is None:
            return PlainTestbed()
        if self._standing and _alike(self._standing.plan, plan):
            return self._standing
        self._standing = None
        self._stack.close()
        self._standing = self._stack.enter_context(owned(plan, self._registry))
        return self._standing


def _alike(one: Plan, other: Plan) -> bool:
    return replace(one, testbed_id=other.testbed_id) == other
