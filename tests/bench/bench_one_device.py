"""Training throughput on one device: our Llama and Mamba-2 against those of transformers, side by side.

    python tests/bench/bench_one_device.py --out FILE [--repeats 9]

Both models have the same configuration and start from the same weights; a sample is one step (forward, backward,
AdamW) on the same batch in float32 on one thread. Samples alternate, and each round starts with another one, so
that a slow moment of the machine hits all. A second copy of our model is the control: its ratio to the first is one
but for noise, and a ratio to transformers within the control's range says nothing. Wall time is the headline;
processor time beside it leaves out what other processes took. Times are those of this CPU; they say nothing about a
GPU. Of transformers' Mamba-2 this is the plain torch path, the only one that runs on a CPU: its fused kernels need
CUDA.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.models.transformers_twin import twin_of

from hybridpar.measure.ceiling import matmul_flops_per_s
from hybridpar.models.init import initialise
from hybridpar.models.lm import LanguageModel
from hybridpar.models.loss import next_token_loss
from hybridpar.specs import ModelSpec
from hybridpar.theory.model_flops import FLOP_CONVENTION, forward_flops

BATCH, LENGTH, THREADS = 4, 256, 1
STEPS_PER_REPEAT = 2
# The presets at fewer layers, and a Mamba-2 with the state and the chunk of the public 2.7B model (one chunk per
# sequence here): how far the two implementations of Mamba-2 are apart depends on both.
MODELS = {
    "llama": {"preset": "llama-medium", "layers": 4},
    "mamba2": {"preset": "mamba2-medium", "layers": 4},
    "mamba2-N128-C256": {"preset": "mamba2-medium", "layers": 4, "ssm_state": 128, "ssm_chunk": 256},
}


@dataclass(frozen=True)
class Sample:
    """Seconds of one training step."""

    wall_s: float
    processor_s: float


def main() -> None:
    """Measure, write the JSON, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--repeats", type=int, default=9, help="rounds of samples per model (at least 1)")
    arguments = parser.parse_args()
    if arguments.repeats < 1:
        parser.error(f"--repeats={arguments.repeats} must be at least 1")
    torch.set_num_threads(THREADS)
    models = {name: compare(ModelSpec.model_validate(fields), arguments.repeats) for name, fields in MODELS.items()}
    report = {"tier": "measured", "environment": environment(), "workload": workload(arguments.repeats)}
    report["models"] = models
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=2) + "\n")
    print(table(models))


def compare(model: ModelSpec, repeats: int) -> dict[str, Any]:
    """Interleaved samples of both implementations of one configuration, and the matmul ceiling around them.

    Raises:
        SystemExit: the two do not compute the same loss, so that a comparison of their speed means nothing.
    """
    ours, control = (initialised(model) for _ in range(2))
    theirs = twin_of(ours, model).train()
    window = torch.randint(model.vocab, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    tokens, targets = window[:, :-1].contiguous(), window[:, 1:].contiguous()
    steps = {
        "ours": training_step(ours, lambda: next_token_loss(ours(tokens), targets)),
        "control": training_step(control, lambda: next_token_loss(control(tokens), targets)),
        "transformers": training_step(
            theirs, lambda: next_token_loss(theirs(input_ids=tokens, use_cache=False).logits, targets)
        ),
    }
    losses = {name: step() for name, step in steps.items()}  # the warm-up
    if abs(losses["ours"] - losses["transformers"]) > 1e-4:
        raise SystemExit(f"the two models differ before any update: losses {losses}")
    ceilings = [matmul_flops_per_s(THREADS, "fp32", "cpu")]
    samples: dict[str, list[Sample]] = {name: [] for name in steps}
    for repeat in range(repeats):
        first = repeat % len(steps)
        for name in [*steps, *steps][first : first + len(steps)]:
            samples[name].append(timed(steps[name]))
    ceilings.append(matmul_flops_per_s(THREADS, "fp32", "cpu"))
    return summary(model, sum(p.numel() for p in ours.parameters()), losses, samples, ceilings)


def initialised(model: ModelSpec) -> LanguageModel:
    """Our model with its initial parameters."""
    lm = LanguageModel(model)
    initialise(lm, model, seed=0)
    return lm


def training_step(model: nn.Module, loss_of: Callable[[], Tensor]) -> Callable[[], float]:
    """One step of training, as a call that returns the loss before it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def timed(step: Callable[[], float]) -> Sample:
    """Time per step, over a few."""
    wall, processor = time.perf_counter(), time.process_time()
    for _ in range(STEPS_PER_REPEAT):
        step()
    return Sample(
        wall_s=(time.perf_counter() - wall) / STEPS_PER_REPEAT,
        processor_s=(time.process_time() - processor) / STEPS_PER_REPEAT,
    )


def summary(
    model: ModelSpec,
    parameters: int,
    losses: dict[str, float],
    samples: dict[str, list[Sample]],
    ceilings: list[float],
) -> dict[str, Any]:
    """Medians with their ranges, the ratio in each round, and the fraction of the ceiling."""
    flops = 3 * forward_flops(model, BATCH, LENGTH)
    ceiling = max(ceilings)
    wall = {name: [sample.wall_s for sample in series] for name, series in samples.items()}
    return {
        "spec": model.model_dump(),
        "parameters": parameters,
        "initial_loss": losses,
        "model_flops_per_step": flops,
        "ceiling_flops_per_s": {"used": ceiling, "measured": ceilings},
        "samples": {name: [asdict(sample) for sample in series] for name, series in samples.items()},
        "tokens_per_s": {name: spread([BATCH * LENGTH / s for s in times]) for name, times in wall.items()},
        "ceiling_fraction": {name: spread([flops / s / ceiling for s in times]) for name, times in wall.items()},
        "speed_over_transformers": ratios(samples["ours"], samples["transformers"]),
        "speed_over_control": ratios(samples["ours"], samples["control"]),
    }


def ratios(ours: list[Sample], others: list[Sample]) -> dict[str, dict[str, float]]:
    """Time of the other over ours, round by round: above one, ours is faster."""
    rounds = list(zip(ours, others, strict=True))
    return {
        "wall": spread([other.wall_s / own.wall_s for own, other in rounds]),
        "processor": spread([other.processor_s / own.processor_s for own, other in rounds]),
    }


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and greatest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def workload(repeats: int) -> dict[str, Any]:
    """What a sample is."""
    return {
        "batch": BATCH,
        "seq_len": LENGTH,
        "precision": "fp32",
        "step": "forward, backward, AdamW",
        "steps_per_repeat": STEPS_PER_REPEAT,
        "repeats": repeats,
        "flop_convention": FLOP_CONVENTION,
    }


def environment() -> dict[str, Any]:
    """What the numbers depend on."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg(),
    }


def cpu_model() -> str:
    """The processor's name as the kernel gives it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def table(models: dict[str, dict[str, Any]]) -> str:
    """Tokens per second, fraction of the ceiling and ratios, median (min-max)."""
    lines = [f"{'model':17} {'':13} {'tokens/s':>20} {'of matmul ceiling':>22}"]
    for model, results in models.items():
        for name in ("ours", "transformers"):
            speed = ranged(results["tokens_per_s"][name], "{:.0f}")
            fraction = ranged(results["ceiling_fraction"][name], "{:.0%}")
            lines.append(f"{model:17} {name:13} {speed:>20} {fraction:>22}")
        for other in ("transformers", "control"):
            speeds = [f"{ranged(ratio, '{:.2f}')} {clock}" for clock, ratio in results[f"speed_over_{other}"].items()]
            lines.append(f"{model:17} ours / {other}: {', '.join(speeds)} time")
    return "\n".join(lines)


def ranged(values: dict[str, float], form: str) -> str:
    """`median (min-max)`."""
    return f"{form.format(values['median'])} ({form.format(values['min'])}-{form.format(values['max'])})"


if __name__ == "__main__":
    main()
