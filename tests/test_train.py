"""The training loop of one rank: its share of the data, what it tells, and when it gives up."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybridpar import train
from hybridpar.mesh import Coordinate, RankGrid
from hybridpar.parallel.engine import Parts, StepResult
from hybridpar.specs import RunSpec, parse_run_spec


@dataclass
class _Mesh:
    """The place of one rank, without a process group."""

    grid: RankGrid
    rank: int
    device: torch.device

    @property
    def coordinate(self) -> Coordinate:
        return self.grid.coordinate(self.rank)


class _Corpus:
    """Row r of step s holds 1000 s + r; targets are one more."""

    def batch(self, step: int, global_batch: int, seq_len: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        rows = 1000 * step + np.arange(global_batch, dtype=np.int64)
        tokens = np.repeat(rows[:, None], seq_len, axis=1)
        return tokens, tokens + 1


@dataclass
class _Engine:
    """Gives the losses it was told to give."""

    losses: list[float]
    seen: list[torch.Tensor] = field(default_factory=list)

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> StepResult:
        self.seen.append(tokens)
        return StepResult(loss=self.losses[len(self.seen) - 1], grad_norm=1.0)

    def parts(self) -> Parts:
        return Parts((torch.zeros(4),), (), (), ())


def _run(**workload: Any) -> RunSpec:
    return parse_run_spec(
        {
            "model": {"preset": "llama-toy"},
            "workload": {"seq_len": 4, "global_batch": 8, "steps": 3, **workload},
            "strategy": {"dp": 2, "tp": 2},
        }
    )


def _train(run: RunSpec, rank: int, losses: list[float], monkeypatch: pytest.MonkeyPatch) -> tuple[_Engine, list[dict]]:
    engine, told = _Engine(losses), []
    monkeypatch.setattr(train, "build_engine", lambda run, mesh: engine)
    mesh = _Mesh(RankGrid.of(run.strategy), rank, torch.device("cpu"))
    train.train(run, mesh, _Corpus(), lambda kind, **fields: told.append({"kind": kind, **fields}), Path("nowhere"))
    return engine, told


@pytest.mark.parametrize(("rank", "rows"), [(0, range(4)), (1, range(4)), (2, range(4, 8)), (3, range(4, 8))])
def test_ranks_of_a_replica_see_its_share_of_the_global_batch(
    rank: int, rows: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _ = _train(_run(), rank, [3.0, 2.0, 1.0], monkeypatch)
    for step, tokens in enumerate(engine.seen):
        assert tokens.dtype == torch.int64
        assert tokens[:, 0].tolist() == [1000 * step + row for row in rows]


def test_phases_steps_and_memory_are_told_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    _, told = _train(_run(), 0, [3.0, 2.0, 1.0], monkeypatch)
    assert [event.get("name", event["kind"]) for event in told] == [
        *("build", "model", "warmup", "memory", "step", "train", "step", "step")
    ]
    steps = [event for event in told if event["kind"] == "step"]
    assert [(event["step"], event["loss"], event["warmup"]) for event in steps] == [
        *((0, 3.0, True), (1, 2.0, False), (2, 1.0, False))
    ]
    assert all(event["seconds"] > 0 for event in steps)


def test_without_warm_up_no_step_is_slowed_by_accounting(monkeypatch: pytest.MonkeyPatch) -> None:
    _, told = _train(_run(warmup_steps=0), 0, [3.0, 2.0, 1.0], monkeypatch)
    assert [event["kind"] for event in told] == ["phase", "model", "phase", "step", "step", "step"]


def test_only_rank_0_tells_the_size_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    _, told = _train(_run(), 1, [3.0, 2.0, 1.0], monkeypatch)
    assert not [event for event in told if event["kind"] == "model"]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_ends_training_and_names_the_step(bad: float, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(train.NonFiniteError, match=f"loss is {bad} at step 1"):
        _train(_run(), 0, [3.0, bad, 1.0], monkeypatch)


def test_parameters_are_counted_over_the_whole_model() -> None:
    hidden, ffn, vocab, layers, kv = 64, 176, 256, 4, 32
    attention = 2 * hidden * hidden + 2 * hidden * kv
    block = attention + 3 * hidden * ffn + 2 * hidden
    assert train.parameter_count(_run().model) == 2 * vocab * hidden + layers * block + hidden
