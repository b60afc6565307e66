"""Served in parts equals served whole: a layout's greedy tokens and their logits against one device.

Every layout fills in the same random prompts and decodes the same number of tokens. Tokens must be the same, one by
one; logits may deviate by rounding, relative to the largest logit of their pass. The calling process forks the ranks,
so it computes no tensor itself.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hybridpar.launch.forked import fork_ranks, preload, values
from hybridpar.legality import infeasible_reason
from hybridpar.parity import TOLERANCES
from hybridpar.specs import RunSpec, Strategy

_DEADLINE_S = 60.0


@dataclass(frozen=True)
class Generated:
    """Tokens (passes, B) and the logits they were chosen from (passes, B, V), of the whole batch."""

    tokens: np.ndarray
    logits: np.ndarray


@dataclass(frozen=True)
class GenerationReport:
    """One layout against one device. `refused` is the reason of an illegal layout, `failed` that of a broken run."""

    run: RunSpec
    logits: float | None = None
    same_tokens: bool | None = None
    refused: str | None = None
    failed: str | None = None

    @property
    def verdict(self) -> str:
        """equal, differs, refused or failed."""
        if self.refused:
            return "refused"
        if self.failed:
            return "failed"
        within = self.logits is not None and self.logits <= TOLERANCES[self.run.workload.precision]["loss"]
        return "equal" if within and self.same_tokens else "differs"

    def row(self) -> dict[str, Any]:
        """Plain data for a table."""
        return {
            "family": self.run.model.family,
            "model": self.run.model.name,
            "layout": self.run.strategy.label,
            "devices": self.run.strategy.devices,
            "precision": self.run.workload.precision,
            "verdict": self.verdict,
            "logits": self.logits,
            "same_tokens": self.same_tokens,
            "reason": self.refused or self.failed,
        }


def compare_generation(runs: Iterable[RunSpec]) -> Iterator[GenerationReport]:
    """Compare layouts of inference runs (phase decode), in the order given."""
    dense: dict[RunSpec, Generated] = {}
    for run in runs:
        refused = infeasible_reason(run, on_text=False)
        if refused:
            yield GenerationReport(run, refused=refused)
            continue
        whole = run.model_copy(update={"strategy": Strategy()})
        try:
            if whole not in dense:
                dense[whole] = generate(whole)
            yield _report(run, generate(run), dense[whole])
        except RuntimeError as error:
            yield GenerationReport(run, failed=str(error))


def _report(run: RunSpec, ours: Generated, theirs: Generated) -> GenerationReport:
    if ours.logits.shape != theirs.logits.shape or not np.isfinite(ours.logits).all():
        return GenerationReport(run, logits=float("inf"), same_tokens=False)
    largest = np.abs(theirs.logits).max(axis=(1, 2), keepdims=True)
    deviation = float((np.abs(ours.logits - theirs.logits) / largest).max())
    return GenerationReport(run, logits=deviation, same_tokens=bool((ours.tokens == theirs.tokens).all()))


def generate(run: RunSpec) -> Generated:
    """Serve `run` in forked ranks.

    Raises:
        RuntimeError: a rank failed; the message holds the end of its log.
    """
    preload()
    folder = Path(tempfile.mkdtemp(prefix="hybridpar-generation-"))
    try:
        exits = fork_ranks(
            run.strategy.devices, lambda rank: _rank(run, rank, folder), deadline_s=_DEADLINE_S, log_dir=folder
        )
        shares = [value for value in values(exits) if value is not None]
    finally:
        shutil.rmtree(folder)
    by_replica = dict(shares)
    parts = [by_replica[replica] for replica in range(run.strategy.dp)]
    return Generated(
        np.concatenate([part.tokens for part in parts], axis=1),
        np.concatenate([part.logits for part in parts], axis=1),
    )


def _rank(run: RunSpec, rank: int, folder: Path) -> tuple[int, Generated] | None:
    """One rank; of each replica the last stage's first tp and cp rank answers with (its number, what it chose)."""
    import torch

    from hybridpar.comm.process_group import ProcessMesh, start, stop
    from hybridpar.parallel.apply import build_generator

    torch.set_num_threads(run.cluster.threads_per_rank)
    start(rank, run.strategy.devices, folder / "store", "cpu", _DEADLINE_S)
    mesh = ProcessMesh.build(run.strategy)
    generator = build_generator(run, mesh)
    generator.keep_logits()
    share = run.workload.global_batch // run.strategy.dp
    prompts = _prompts(run)[mesh.coordinate.dp * share : (mesh.coordinate.dp + 1) * share]
    generator.prefill(torch.from_numpy(prompts))
    chosen = [generator.chosen()]
    for _ in range(run.workload.steps):
        generator.decode()
        chosen.append(generator.chosen())
    generator.wait()
    logits = generator.logits()
    stop()
    tokens = [step.numpy() for step in chosen if step is not None]
    if logits is None or mesh.coordinate.tp or mesh.coordinate.cp:
        return None
    return mesh.coordinate.dp, Generated(np.stack(tokens), logits.double().numpy())


def _prompts(run: RunSpec) -> np.ndarray:
    generator = np.random.default_rng(run.seed)
    return generator.integers(0, run.model.vocab, (run.workload.global_batch, run.workload.seq_len))
