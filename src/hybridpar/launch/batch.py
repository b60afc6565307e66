"""Runs, one or many, from one warm parent: each keeps its own folder, and none loses another's result.

A finished run is never run again, except a crash or timeout that has tries left. Everything may be interrupted: what
is finished stays, and the same call goes on from there. No torch at import.
"""

from __future__ import annotations

import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridpar import corpus
from hybridpar.checkpoints import CheckpointError, steps_done
from hybridpar.events import read_all_events
from hybridpar.launch import environment
from hybridpar.launch.folder import InUseError, LaunchError, RunFolder, one_sentence
from hybridpar.launch.forked import RankExit, fork_ranks, preload, values
from hybridpar.launch.result import Circumstances, assemble, line_of, without_launch
from hybridpar.launch.torchrun import torchrun_ranks
from hybridpar.legality import infeasible_reason
from hybridpar.outcome import RETRIED, Outcome
from hybridpar.specs import Precision, RunSpec

Result = dict[str, Any]
Progress = Callable[[str], None]
_CEILING_DEADLINE_S = 120.0


def run_one(run: RunSpec, out_dir: Path, *, force: bool = False) -> Result:
    """Execute one run and write its folder; a finished result of the same run is returned as it is, unless it is
    a crash or timeout, which is tried again.

    Args:
        run: what to train.
        out_dir: its folder, made when missing.
        force: run again though a result is there.

    Returns:
        The content of result.json, whatever the outcome.

    Raises:
        LaunchError: the folder cannot be used, or another launcher uses it.
    """
    folder = RunFolder(out_dir)
    folder.create()
    with folder.locked(wait=False):
        done = folder.result(run.run_id)
        if done and done["outcome"] not in RETRIED and not force:
            return done
        return _Launcher().launch(run, folder, attempt=1, earlier=())


def _say(line: str) -> None:
    print(line, flush=True)


def run_batch(runs: Sequence[RunSpec], runs_dir: Path, *, retries: int = 1, progress: Progress = _say) -> list[Result]:
    """Execute many runs, each in `runs_dir/<run_id>`, forked from this process.

    Args:
        runs: what to train, in this order.
        runs_dir: parent of the run folders.
        retries: how often a crash or timeout is tried again, over all calls.
        progress: told one line for each run.

    Returns:
        The results in the order of `runs`.

    Raises:
        LaunchError: a folder cannot be used; after all other runs have finished.
        KeyboardInterrupt: after the ranks of the current run have been killed; finished results are kept.
    """
    batch = _Batch(total=len(runs), progress=progress)
    results: dict[str, Result] = {}
    failures: list[LaunchError] = []
    waiting = deque((run, False) for run in runs)
    while waiting:
        run, wait = waiting.popleft()
        folder = RunFolder(runs_dir / run.run_id)
        try:
            folder.create()
            with folder.locked(wait=wait):
                results[run.run_id] = _settle(run, folder, retries, batch)
        except InUseError:
            progress(f"{_label(run)}: another launcher is on it; it is looked at again at the end")
            waiting.append((run, True))
        except LaunchError as error:
            progress(f"{_label(run)}: {error}")
            failures.append(error)
    if failures:
        raise LaunchError(f"{len(failures)} of {len(runs)} runs could not be kept; the first: {failures[0]}")
    return [results[run.run_id] for run in runs]


def _settle(run: RunSpec, folder: RunFolder, retries: int, batch: _Batch) -> Result:
    """Bring one run to an outcome that stays."""
    result, earlier = folder.result(run.run_id), tuple[str, ...]()
    if result and not _has_tries_left(result, retries):
        batch.skipped(run, result)
        return result
    while result is None or _has_tries_left(result, retries):
        attempt = 1
        if result:
            attempt = result["attempt"] + 1
            earlier = (*earlier, f"attempt {result['attempt']} ended {result['outcome']}: {result['reason']}")
        start = time.monotonic()
        result = batch.launcher.launch(run, folder, attempt, earlier)
        batch.tried(run, result, time.monotonic() - start, again=_has_tries_left(result, retries))
    return result


def _has_tries_left(result: Result, retries: int) -> bool:
    return result["outcome"] in RETRIED and result["attempt"] <= retries


def _label(run: RunSpec) -> str:
    return f"{run.model.name} {run.strategy.label}" + (f" repeat {run.repeat}" if run.repeat else "")


def _cannot_start_from(run: RunSpec) -> Outcome | None:
    if not run.workload.start_from:
        return None
    try:
        steps_done(Path(run.workload.start_from), run)
    except CheckpointError as error:
        return Outcome(kind="infeasible", reason=f"workload.start_from: {error}")
    return None


@dataclass
class _Launcher:
    """What is made once for all runs of this process: warm imports and measured ceilings."""

    ceilings: dict[tuple[environment.Device, Precision], float] = field(default_factory=dict)
    data: dict[str, Path] = field(default_factory=dict)

    def launch(self, run: RunSpec, folder: RunFolder, attempt: int, earlier: tuple[str, ...]) -> Result:
        """One try of one run, from an empty folder to a written result."""
        with one_sentence(folder.path):
            folder.clear()
            folder.write("spec.json", run.model_dump(mode="json"))
            result = self._tried(run, folder, attempt, earlier)
            folder.write("result.json", result)
        return result

    def _tried(self, run: RunSpec, folder: RunFolder, attempt: int, earlier: tuple[str, ...]) -> Result:
        device = environment.resolve_device(run)
        testbed = environment.testbed(run, device)
        refused = self._refusal(run, device)
        if refused:
            folder.write("environment.json", environment.describe(run, device, None))
            return without_launch(run, refused, testbed, attempt)
        ceiling = self._ceiling(run, device)
        peak = environment.peak_flops_per_s(run, device, ceiling)
        folder.write("environment.json", environment.describe(run, device, _peak(run, device, ceiling, peak)))
        kills, started_at, start = environment.kernel_oom_kills(), time.time(), time.monotonic()
        exits = self._start(run, folder, device)
        circumstances = Circumstances(
            testbed=testbed,
            peak_flops_per_s=peak,
            started_at=started_at,
            total_s=time.monotonic() - start,
            attempt=attempt,
            earlier=earlier,
            kernel_oom_kills=environment.kernel_oom_kills() - kills,
        )
        return assemble(run, exits, read_all_events(folder.path, run.strategy.devices), circumstances)

    def _refusal(self, run: RunSpec, device: environment.Device) -> Outcome | None:
        """Why the run cannot be started, if it cannot: it is illegal, or the machine or its data are not there."""
        reason = infeasible_reason(run) or environment.lacking(run, device)
        if reason:
            return Outcome(kind="infeasible", reason=reason)
        preload(deepspeed=run.strategy.engine == "deepspeed")
        try:
            self._prepared(run)
        except corpus.CorpusError as error:
            return Outcome(kind="crash", reason=str(error))
        return _cannot_start_from(run)

    def _prepared(self, run: RunSpec) -> Path:
        name = run.workload.data
        if name not in self.data:
            self.data[name] = corpus.prepare(name)
        return self.data[name]

    def _start(self, run: RunSpec, folder: RunFolder, device: environment.Device) -> tuple[RankExit, ...]:
        data = self._prepared(run)
        if run.cluster.launcher == "torchrun":
            return torchrun_ranks(run, folder, device, data)
        from hybridpar.launch.rank import forked_body

        body = forked_body(run, folder, device, data)
        exits = fork_ranks(run.strategy.devices, body, deadline_s=run.cluster.deadline_s, log_dir=folder.logs)
        folder.store.unlink(missing_ok=True)
        return exits

    def _ceiling(self, run: RunSpec, device: environment.Device) -> float:
        """Measured matmul rate of one core or GPU in the run's precision [FLOP/s]; in a process of its own."""
        key = (device, run.workload.precision)
        if key not in self.ceilings:
            with tempfile.TemporaryDirectory(prefix="hybridpar-ceiling-") as logs:
                exits = fork_ranks(1, lambda _rank: _measure(*key), deadline_s=_CEILING_DEADLINE_S, log_dir=Path(logs))
            try:
                self.ceilings[key] = values(exits)[0]
            except RuntimeError as error:
                raise LaunchError(f"the matmul ceiling of {device} in {key[1]} cannot be measured: {error}") from None
        return self.ceilings[key]


def _measure(device: environment.Device, precision: Precision) -> float:
    from hybridpar.measure.ceiling import matmul_flops_per_s

    return matmul_flops_per_s(1, precision, device)


def _peak(run: RunSpec, device: environment.Device, ceiling: float, peak: float) -> dict[str, Any]:
    unit = "GPU" if device == "cuda" else "core"
    return {
        "precision": run.workload.precision,
        f"measured_flops_per_s_per_{unit.lower()}": ceiling,
        "run_flops_per_s": peak,
        "note": f"a matmul measured on one {unit} times the {unit}s that the run's {run.strategy.devices} ranks have"
        + ("" if device == "cuda" else f"; ranks beyond the machine's {environment.cores()} cores share them"),
    }


@dataclass
class _Batch:
    """How far a batch is."""

    total: int
    progress: Progress
    launcher: _Launcher = field(default_factory=_Launcher)
    settled: int = 0
    spent_s: float = 0.0
    executed: int = 0

    def skipped(self, run: RunSpec, result: Result) -> None:
        """Its result was there already."""
        self.settled += 1
        self.progress(f"[{self.settled}/{self.total}] {_label(run)}: kept ({line_of(result)})")

    def tried(self, run: RunSpec, result: Result, seconds: float, *, again: bool) -> None:
        """One try ended."""
        self.spent_s += seconds
        if again:
            self.progress(f"{_label(run)}: {line_of(result)}; it is tried again")
            return
        self.settled += 1
        self.executed += 1
        left = (self.total - self.settled) * self.spent_s / self.executed
        ahead = f"; about {left:.0f} s left" if self.settled < self.total else ""
        self.progress(f"[{self.settled}/{self.total}] {_label(run)}: {line_of(result)} ({seconds:.1f} s){ahead}")
