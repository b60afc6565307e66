"""A real run on a scale model computes what it computes on plain loopback; only its times are another's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybridpar import corpus
from hybridpar.events import read_all_events
from hybridpar.launch.folder import RunFolder
from hybridpar.launch.forked import fork_ranks, preload, values
from hybridpar.launch.rank import forked_body
from hybridpar.specs import RunSpec, parse_run_spec
from hybridpar.testbed import network
from hybridpar.testbed.plan import Plan


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A prepared corpus."""
    monkeypatch.setenv("HYBRIDPAR_DATA", str(tmp_path / "corpus"))
    text = tmp_path / "words.txt"
    text.write_text("".join(f"line {number} of a short text\n" for number in range(400)))
    return corpus.prepare(str(text))


def _run() -> RunSpec:
    return parse_run_spec(
        {
            "model": {"preset": "llama-toy"},
            "workload": {"seq_len": 32, "global_batch": 4, "steps": 2, "precision": "fp64"},
            "strategy": {"dp": 2, "tp": 2},
        }
    )


def _steps(run: RunSpec, folder: Path, data: Path, testbed: network.Testbed) -> list[dict[str, Any]]:
    place = RunFolder(folder)
    place.create()
    place.clear()
    body = forked_body(run, place, "cpu", data)
    values(fork_ranks(4, body, deadline_s=60, log_dir=place.logs, enter=testbed.enter))
    return [event for event in read_all_events(folder, 4)[0] if event["kind"] == "step"]


def test_losses_are_the_same_and_replicas_across_nodes_wait_for_their_uplink(
    plan: Plan, registry: Path, tmp_path: Path, data: Path
) -> None:
    preload()
    run = _run()
    plain = _steps(run, tmp_path / "plain", data, network.PlainTestbed())
    with network.owned(plan, registry) as testbed:
        scaled = _steps(run, tmp_path / "scaled", data, testbed)
    assert len(plain) == 2
    assert [step["loss"] for step in scaled] == [step["loss"] for step in plain]
    assert [step["grad_norm"] for step in scaled] == [step["grad_norm"] for step in plain]
    # 4 layers of 64 wide: about 200 thousand float64 gradients on two tp ranks, over 100 Mbit/s that they share
    gradients = 8 * sum(event["parameters"] for event in _models(tmp_path / "scaled")[:1])
    assert scaled[1]["seconds"] > gradients * 8 / plan.inter_bit_s * 0.8


def _models(folder: Path) -> list[dict[str, Any]]:
    return [event for events in read_all_events(folder, 4) for event in events if event["kind"] == "model"]
