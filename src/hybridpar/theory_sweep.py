"""Which runs the closed forms are compared with the program on, and the comparing itself: over all cores, resumable.

The grid of a family: its small odd model under layouts of training and serving (all, or a few, evenly spaced), random
legal runs of any shape, a few runs in real ranks; and models of public size, traced.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

from hybridpar.check_theory import compare_measured, compare_traced
from hybridpar.legality import infeasible_reason
from hybridpar.parity_layouts import SCHEDULES, Layout, generation_layouts, parity_run, torch_layouts
from hybridpar.specs import RunSpec, SpecError, parse_run_spec

Tier = Literal["traced", "measured"]
PHASES = ("train", "prefill", "decode")

# One of each family at its public size, on as many devices as such a model takes; trained, and served.
FULL_SIZE: tuple[Mapping[str, Any], ...] = (
    {
        "model": {"preset": "llama-3-70b"},
        "strategy": {
            "dp": 8, "tp": 8, "pp": 8, "cp": 2, "sp": True, "zero": 1, "schedule": "interleaved", "virtual": 2
        },
        "workload": {"seq_len": 8192, "global_batch": 128, "micro_batch": 1, "precision": "bf16"},
    },
    {
        "model": {"preset": "llama-3-405b"},
        "strategy": {"dp": 128, "tp": 8, "pp": 16, "sp": True, "zero": 1},
        "workload": {"seq_len": 8192, "global_batch": 2048, "micro_batch": 1, "precision": "bf16"},
    },
    {
        "model": {"preset": "mixtral-8x7b"},
        "strategy": {"dp": 8, "tp": 2, "pp": 4, "ep": 8, "sp": True, "zero": 1},
        "workload": {"seq_len": 4096, "global_batch": 64, "micro_batch": 1, "precision": "bf16"},
    },
    {
        "model": {"preset": "mamba2-2.7b"},
        "strategy": {"dp": 16, "tp": 4, "zero": 3},
        "workload": {"seq_len": 2048, "global_batch": 64, "micro_batch": 2, "precision": "bf16"},
    },
    {
        "model": {"preset": "jamba-8b-like"},
        "strategy": {"dp": 4, "tp": 4, "pp": 2, "cp": 2, "zero": 1, "recompute": "selective"},
        "workload": {"seq_len": 8192, "global_batch": 16, "micro_batch": 1, "precision": "bf16"},
    },
    {
        "model": {"preset": "llama-3-70b"},
        "strategy": {"tp": 8, "pp": 2, "cp": 4},
        "workload": {
            "phase": "prefill", "seq_len": 32768, "global_batch": 4, "micro_batch": 1, "precision": "bf16", "steps": 2
        },
    },
    {
        "model": {"preset": "mixtral-8x7b"},
        "strategy": {"dp": 8, "tp": 2, "ep": 8},
        "workload": {
            "phase": "decode", "seq_len": 8192, "global_batch": 256, "micro_batch": 32, "precision": "bf16", "steps": 2
        },
    },
    {
        "model": {"preset": "jamba-8b-like"},
        "strategy": {"tp": 4, "cp": 2},
        "workload": {
            "phase": "decode", "seq_len": 32768, "global_batch": 8, "micro_batch": 8, "precision": "bf16", "steps": 2
        },
    },
)  # fmt: skip


@dataclass(frozen=True)
class Work:
    """One run to compare with the forms."""

    run: RunSpec
    tier: Tier

    @property
    def key(self) -> str:
        """Names it."""
        return f"{self.run.run_id} {self.tier}"

    @property
    def name(self) -> str:
        """For people."""
        workload = self.run.workload
        return f"{self.run.model.name} {self.run.strategy.label} {workload.phase} {workload.precision} {self.tier}"


def full_size_runs() -> list[RunSpec]:
    """`FULL_SIZE` as runs."""
    return [parse_run_spec(dict(one)) for one in FULL_SIZE]


def small_runs(family: str, phase: str, largest: int, precision: str) -> list[RunSpec]:
    """Every legal layout of a family's small model on up to `largest` devices; trained with AdamW.

    Layouts come in an order in which any few of them, evenly spaced, differ.
    """
    layouts: list[Layout] = torch_layouts(family, largest) if phase == "train" else generation_layouts(family, largest)
    runs = [parity_run(family, layout, precision=precision, workload=_workload(phase)) for layout in layouts]
    return [run for run in runs if not infeasible_reason(run, on_text=False)]


def _workload(phase: str) -> Mapping[str, Any]:
    if phase == "train":
        return {"optimizer": "adamw", "learning_rate": 1e-3}
    return {"phase": phase, "steps": 3, "micro_batch": 2}


def random_runs(family: str, number: int, largest: int, seed: int) -> list[RunSpec]:
    """Legal runs of any shape, option and phase, uneven ones too: `number` of them, the same for the same seed."""
    draw = random.Random(f"{family} {seed}")
    found: list[RunSpec] = []
    for _ in range(500 * number):
        if len(found) == number:
            break
        try:
            run = _drawn(draw, family)
        except SpecError:
            continue
        if run.strategy.devices <= largest and not infeasible_reason(run, on_text=False):
            found.append(run)
    return found


def _drawn(draw: random.Random, family: str) -> RunSpec:
    phase = draw.choice(("train", "train", "prefill", "decode"))
    strategy: dict[str, Any] = {axis: draw.choice((1, 1, 2, 3, 4)) for axis in ("dp", "tp", "pp", "cp")}
    strategy |= {"cp_kind": draw.choice(("ring", "ulysses"))}
    if family == "moe":
        strategy["ep"] = draw.choice((1, strategy["dp"]))
    if phase == "train":
        strategy |= {
            "zero": draw.choice((0, 1, 2, 3)),
            "sp": draw.choice((True, False)),
            "schedule": draw.choice(SCHEDULES),
            "recompute": draw.choice(("none", "selective", "full")),
            "offload": draw.choice(("none", "none", "optimizer")),
            "overlap": draw.choice((True, False)),
        }
    kv_heads = draw.choice((1, 2, 3, 4))
    heads = kv_heads * draw.choice((1, 2, 4))
    shape: dict[str, Any] = {"layers": draw.randint(2, 9), "vocab": draw.randint(11, 97), "hidden": 24 * heads}
    if family != "mamba2":
        shape |= {"heads": heads, "kv_heads": kv_heads, "head_dim": 2 * draw.randint(2, 12)}
        shape |= {"ffn_hidden": draw.randint(8, 90), "tied_embeddings": draw.choice((True, False))}
    if family in ("mamba2", "hybrid"):
        shape |= {"ssm_head_dim": draw.choice((4, 8)), "ssm_state": draw.randint(3, 9), "ssm_chunk": draw.randint(3, 9)}
        shape |= {"ssm_groups": draw.choice((1, 2, 3, 4))}
    if family == "moe":
        shape |= {"experts": draw.randint(3, 7), "top_k": draw.choice((1, 2)), "shared_experts": draw.choice((0, 1))}
    micro_batch = draw.choice((1, 2, 3))
    replicas = strategy["dp"] * micro_batch
    workload = {
        **_workload(phase),
        "seq_len": draw.choice((24, 48, 60)),
        "micro_batch": micro_batch,
        "global_batch": replicas * draw.choice((1, 2, 4, 6)),
    }
    return parity_run(family, strategy, precision=draw.choice(("fp32", "bf16")), model=shape, workload=workload)


def evenly(runs: Sequence[RunSpec], number: int) -> list[RunSpec]:
    """`number` of them, evenly spaced; all where there are no more."""
    if number >= len(runs):
        return list(runs)
    return [runs[place * len(runs) // number] for place in range(number)]


@dataclass(frozen=True)
class Amount:
    """How much of a family's grid: runs traced of each phase, random ones, and trained ones in real ranks."""

    layouts: int
    drawn: int
    measured: int
    devices: int
    seed: int = 0


EVERYTHING = 10**6


def grid(families: Iterable[str], precision: str, amount: Amount, *, full_size: bool) -> list[Work]:
    """Everything to compare, the slowest first, so that cores end together."""
    work = [Work(run, "traced") for run in full_size_runs() if full_size]
    for family in families:
        by_phase = {phase: small_runs(family, phase, amount.devices, precision) for phase in PHASES}
        for phase, share in zip(PHASES, (1, 3, 3), strict=True):
            work += [Work(run, "traced") for run in evenly(by_phase[phase], -(-amount.layouts // share))]
            work += [Work(run, "measured") for run in evenly(by_phase[phase], -(-amount.measured // share))]
        work += [Work(run, "traced") for run in random_runs(family, amount.drawn, amount.devices, amount.seed)]
    return list({one.key: one for one in work}.values())


@dataclass(frozen=True)
class Compared:
    """What came of one run: its rows, or why it could not be compared."""

    work: Work
    rows: Sequence[Mapping[str, Any]]
    failure: str = ""


def compare_all(work: Sequence[Work], jobs: int, journal: Path | None = None) -> Iterator[Compared]:
    """Compare everything, as it is done; what `journal` holds of the same code and run is not done again.

    A run that fails, or takes its process down, is a `Compared` with the reason; the others go on.
    """
    done = _read_journal(journal) if journal else {}
    for one in work:
        if one.key in done:
            yield Compared(one, done[one.key])
    waiting = [one for one in work if one.key not in done]
    # Real ranks are forked, and a process that has traced may not fork any more; they keep all cores busy themselves.
    measured = (_here(one) for one in waiting if one.tier == "measured")
    traced = _in_processes([one for one in waiting if one.tier == "traced"], jobs)
    for compared in itertools.chain(measured, traced):
        if journal and not compared.failure:
            _append(journal, compared)
        yield compared


def _here(work: Work) -> Compared:
    try:
        return Compared(work, _rows(work))
    except RuntimeError as error:
        return Compared(work, (), str(error))


Rows = list[dict[str, Any]]


def _in_processes(work: Sequence[Work], jobs: int) -> Iterator[Compared]:
    """One at a time to each process; after a process died, those that were under way are tried alone."""
    from hybridpar.launch.forked import preload

    preload()
    queue, suspects = list(work), []
    while queue:
        running: dict[Future[Rows], Work] = {}
        with _pool(min(jobs, len(queue))) as pool:
            try:
                while queue or running:
                    while queue and len(running) < jobs:
                        future = pool.submit(_traced_rows, queue[0])
                        running[future] = queue.pop(0)
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        compared = _outcome(running[future], future)
                        del running[future]
                        yield compared
            except BrokenProcessPool:
                suspects += list(running.values())
    for one in suspects:
        with _pool(1) as pool:
            try:
                yield _outcome(one, pool.submit(_traced_rows, one))
            except BrokenProcessPool:
                yield Compared(one, (), "its process ended without a word")


def _pool(jobs: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(jobs, mp_context=get_context("fork"))


def _outcome(work: Work, future: Future[Rows]) -> Compared:
    try:
        return Compared(work, future.result())
    except BrokenProcessPool:
        raise
    except Exception as error:
        return Compared(work, (), f"{type(error).__name__}: {error}")


def _traced_rows(work: Work) -> Rows:
    import torch

    torch.set_num_threads(1)
    return _rows(work)


def _rows(work: Work) -> list[dict[str, Any]]:
    compare = compare_measured if work.tier == "measured" else compare_traced
    return [comparison.row() for comparison in compare(work.run)]


def _read_journal(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Rows by key; none where it was written by other code."""
    if not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8").splitlines()
    if not lines or lines[0] != _code_digest():
        path.unlink()
        return {}
    found = {}
    for line in lines[1:]:
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue  # cut by an interruption
        found[entry["key"]] = entry["rows"]
    return found


def _append(path: Path, compared: Compared) -> None:
    is_new = not path.exists()
    with path.open("a", encoding="utf-8") as file:
        if is_new:
            file.write(_code_digest() + "\n")
        file.write(json.dumps({"key": compared.work.key, "rows": list(compared.rows)}) + "\n")


def _code_digest() -> str:
    """Of all Python of the package: what was compared by other code is compared again."""
    package = Path(__file__).parent
    content = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        content.update(str(path.relative_to(package)).encode() + path.read_bytes())
    return content.hexdigest()
