"""`hybridpar testbed`, without its command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridpar.specs import parse_run_spec
from hybridpar.testbed import commands, network
from hybridpar.testbed.check import Check, Reading
from hybridpar.testbed.plan import Plan, PlanError
from hybridpar.testbed.similarity import SimilarityError
from tests.testbed.left import left_of


@pytest.mark.parametrize(
    ("text", "rate"),
    [("800M", 800_000_000), ("1.5Gbit/s", 1_500_000_000), ("250000000", 250_000_000), (" 64 kbit ", 64_000)],
)
def test_rates_are_read_as_written(text: str, rate: int) -> None:
    assert commands.bit_s("--intra", text) == rate


@pytest.mark.parametrize("text", ["fast", "", "-5M", "8MB", "1e9", "nan"])
def test_what_is_no_rate_is_refused_by_the_name_of_its_option(text: str) -> None:
    with pytest.raises(PlanError, match=r"--intra='.*' is no rate; legal: bits a second, such as 800M or 1.5Gbit/s"):
        commands.bit_s("--intra", text)


def test_up_status_down(plan: Plan, registry: Path) -> None:
    entry = commands.up(plan, registry)
    assert (entry.testbed_id, entry.standing) == (plan.testbed_id, "kept")
    (line,) = commands.status_lines(commands.status(registry))
    assert line == f"{plan.testbed_id}: scale-2x2-400M-100M-share0.3; kept; 7 namespaces, 0 processes"
    assert commands.down(None, registry) == (plan.testbed_id,)
    assert left_of(plan) == []
    assert list(commands.status_lines(commands.status(registry))) == ["no testbed is up"]


def test_down_of_all_spares_the_testbeds_of_living_owners(plan: Plan, registry: Path) -> None:
    with network.owned(plan, registry):
        assert commands.down(None, registry) == ()
        assert left_of(plan)
        assert commands.down(plan.testbed_id, registry) == (plan.testbed_id,)
        assert left_of(plan) == []


def test_a_check_of_what_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(network.TestbedError, match="testbed='abcdef' is not up; legal: there is no testbed"):
        commands.check("abcdef", tmp_path)
    with pytest.raises(network.TestbedError, match="world=1 is not legal; legal: 2 or more"):
        commands.check_plain(1)


def test_readings_as_lines() -> None:
    found = Check("bed", (Reading("message", "bit/s", 8e8, 6e8, 5e8, 7e8, 5), Reading("core", "FLOP/s", None, 1e10, 1e10, 1e10, 1)), 1.5, 2)  # fmt: skip  # noqa: E501
    assert list(commands.check_lines(found)) == [
        "bed, 2 cores, load average before the check 1.5",
        "message: 6e+08 bit/s (5e+08 to 7e+08, n=5), asked 8e+08 (0.75 of it)",
        "core: 1e+10 FLOP/s (1e+10 to 1e+10, n=1)",
    ]


def test_a_scale_model_as_lines() -> None:
    run = parse_run_spec(
        {
            "model": {"preset": "llama-3-8b"},
            "workload": {"seq_len": 8192, "precision": "bf16"},
            "strategy": {"dp": 2, "tp": 2},
            "cluster": {"nodes": 2},
        }
    )
    head, *rest = commands.scale_lines(commands.scale_model(run, "h100-nvlink-ib", 1 / 32, 5e9))
    assert head.startswith("llama-3-8b-scaled-32: hidden 128, seq_len 256, vocab 4008; 2 nodes of 2 devices of 5e+09")
    assert any(line.startswith("communication/compute, tp (inside nodes): real 0.06") for line in rest)
    with pytest.raises(SimilarityError, match="cluster='moon' is unknown; legal: h100-nvlink-ib, "):
        commands.scale_model(run, "moon", 1 / 32, 5e9)
