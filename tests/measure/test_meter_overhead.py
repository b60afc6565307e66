"""What the meter costs is measured beside plain gloo."""

from __future__ import annotations

import pytest

from hybridpar.launch.forked import preload
from hybridpar.measure.meter_overhead import meter_overhead
from hybridpar.parity_layouts import parity_run


def test_a_step_and_its_calls_are_told() -> None:
    preload()
    seen = meter_overhead(parity_run("transformer", {"tp": 2}, precision="fp32"), rounds=4)
    # 8 micro-batches of 9 layers, each with 2 all-reduces forward and 2 backward; the embedding; the loss: 3 more, as
    # the gradient of the head's input is summed too; and the norm.
    assert seen.calls == 8 * (9 * 4 + 1 + 3) + 1
    assert seen.step_seconds > 0
    assert seen.low <= seen.seconds_a_call <= seen.high
    assert seen.row()["share"] == pytest.approx(seen.calls * seen.seconds_a_call / seen.step_seconds)


def test_one_device_sends_nothing() -> None:
    with pytest.raises(ValueError, match="a run on 1 device sends nothing; legal: a strategy of 2 or more"):
        meter_overhead(parity_run("transformer", {}), rounds=4)


def test_few_rounds_tell_nothing() -> None:
    with pytest.raises(ValueError, match="rounds=1 is not legal; it must be at least 4"):
        meter_overhead(parity_run("transformer", {"tp": 2}), rounds=1)
