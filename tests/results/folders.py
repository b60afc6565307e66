"""Run folders as a launcher leaves them, written by the launcher's own code; only the ranks' events are invented."""

from __future__ import annotations

import json
from pathlib import Path

from hybridpar.events import Event, EventWriter
from hybridpar.launch import environment
from hybridpar.launch.folder import RunFolder
from hybridpar.launch.forked import RankExit
from hybridpar.launch.result import Circumstances, assemble, without_launch
from hybridpar.legality import infeasible_reason
from hybridpar.outcome import Outcome
from hybridpar.specs import RunSpec
from hybridpar.study import Study, load_study

STUDY = {
    "name": "tiny",
    "defaults": {"workload": {"seq_len": 16, "global_batch": 4, "steps": 3}, "cluster": {"preset": "local-cpu"}},
    "sweeps": [
        {"name": "good", "models": ["llama-toy"], "strategies": [{}, {"tp": 2, "pp": 2}]},
        {"name": "bad", "models": ["llama-toy"], "strategies": [{"tp": 8}, {"dp": 2}]},
    ],
}


def tiny_study(folder: Path) -> Study:
    """Four cells: two that end ok, an illegal one (tp=4) and one that crashes (dp=2)."""
    path = folder / "tiny.yaml"
    path.write_text(json.dumps(STUDY))
    return load_study(path)


def leave(runs_dir: Path, study: Study) -> None:
    """The folder of every cell."""
    for run in study.runs:
        folder = RunFolder(runs_dir / run.run_id)
        folder.create()
        folder.write("spec.json", run.model_dump(mode="json"))
        folder.write("environment.json", environment.describe(run, "cpu", None))
        reason = infeasible_reason(run)
        if reason:
            folder.write("result.json", without_launch(run, Outcome(kind="infeasible", reason=reason), "local-cpu", 1))
            continue
        crashed = run.strategy.dp > 1
        diaries = [_diary(folder.path, run, rank, crashed=crashed) for rank in range(run.strategy.devices)]
        exits = [
            RankExit(rank=rank, exit_code=int(crashed), signal=None, killed_by_launcher=False, log_tail="", stacks="")
            for rank in range(run.strategy.devices)
        ]
        circumstances = Circumstances("local-cpu", peak_flops_per_s=1e9, started_at=0.5, total_s=7.0, attempt=1)
        folder.write("result.json", assemble(run, exits, diaries, circumstances))


def _diary(folder: Path, run: RunSpec, rank: int, *, crashed: bool) -> list[Event]:
    with EventWriter(folder, rank) as writer:
        writer.emit("phase", name="build")
        if crashed:
            writer.emit("error", type="RuntimeError", message="a fault", traceback="a fault")
            return _read(folder, rank)
        writer.emit("model", parameters=1000)
        held = {"gradients": 10, "optimizer": 20, "activations": 5, "buffers": 0, "host": 7, "cache": 0}
        writer.emit("memory", parameters=100 + rank, **held)
        for step in range(run.workload.steps):
            warmup = step < run.workload.warmup_steps
            writer.emit("step", step=step, loss=5.0 - step, grad_norm=1.0, seconds=1.0 + rank, warmup=warmup)
            if not warmup and run.strategy.devices > 1:
                sent = {"calls": 2, "bytes": 64, "wire_bytes": 32, "seconds": 0.5, "exposed_seconds": 0.25 * rank}
                writer.emit("comm", step=step, op="all_reduce", group="tp", group_size=2, **sent)
        writer.emit("end")
    return _read(folder, rank)


def _read(folder: Path, rank: int) -> list[Event]:
    return [json.loads(line) for line in (folder / f"events-{rank}.jsonl").read_text().splitlines()]
