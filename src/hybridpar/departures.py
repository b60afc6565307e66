"""Where DeepSpeed departs from training on one device, as experiments that anyone can run again.

A departure is a setting with which DeepSpeed trains another model than one device does, or does not train at all, next
to the setting that is right. `measure` runs both for real, each against one device, and tells by how much they deviate
(relative, as `hybridpar.parity` does). Nothing here is a recorded number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from hybridpar.launch.environment import describe
from hybridpar.launch.forked import preload
from hybridpar.parity import Parity, ParityReport
from hybridpar.parity_layouts import Layout, parity_run
from hybridpar.specs import RunSpec

_ENGINE = "hybridpar.parallel.deepspeed_engine"
_PIPELINE = "hybridpar.parallel.deepspeed_pipeline"
_ERROR = re.compile(r"^(?:\w+\.)*(\w*(?:Error|Exception)): (.+)$", re.MULTILINE)
_KINDS = ("loss", "grad_norm", "gradient", "parameter")

Change = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Trial:
    """A tiny training run, and what is changed in the process while its ranks are forked."""

    run: RunSpec
    change: Change = nullcontext


@dataclass(frozen=True)
class Departure:
    """A setting that departs from one device, and the one that does not.

    `setting` and `right` say in words what `departing` and `correct` run; `differs` says what happens.
    """

    name: str
    setting: str
    differs: str
    right: str
    departing: Trial
    correct: Trial


def departures() -> tuple[Departure, ...]:
    """All that are known."""
    return (
        *_of_pipelines(),
        *_of_ulysses(),
        *_of_experts(),
        *_of_offload(),
    )


def measure(departure: Departure, parity: Parity | None = None) -> dict[str, Any]:
    """Run both trials, and tell how far each is from one device.

    Args:
        departure: what to run; its ranks are forked, so that the calling process computes no tensor.
        parity: keeps the trajectories of one device between calls.

    Returns:
        name, setting, differs and right in words; for `departing` and `correct` each a verdict (equal, differs, or
        refused by DeepSpeed itself), deviations of loss, grad_norm, gradient and parameter (None where refused) and
        the reason of a refusal, as `departing_loss` and so on; and `reproduced`, whether the departing trial departed
        and the correct one did not.
    """
    against = parity or Parity()
    seen = {side: _compare(getattr(departure, side), against) for side in ("departing", "correct")}
    row: dict[str, Any] = {name: getattr(departure, name) for name in ("name", "setting", "differs", "right")}
    for side, report in seen.items():
        row |= {f"{side}_{key}": value for key, value in _outcome(report).items()}
    row["reproduced"] = seen["departing"].verdict != "equal" and seen["correct"].verdict == "equal"
    return row


def recorded(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The content of departures.json: the rows, their tier and what they ran on."""
    run = departures()[0].departing.run
    return {"tier": "measured", "environment": describe(run, "cpu", None), "departures": rows}


def _compare(trial: Trial, parity: Parity) -> ParityReport:
    preload(deepspeed=True)  # before anything is changed in it
    with (
        trial.change(),
        patch("hybridpar.parity.infeasible_reason", return_value=None),  # it departs: that is the point
    ):
        return parity.compare(trial.run)


def _outcome(report: ParityReport) -> Mapping[str, Any]:
    refused = report.verdict == "failed"
    return {
        "layout": report.run.strategy.label,
        "verdict": "refused" if refused else report.verdict,
        **{kind: report.deviations.get(kind) for kind in _KINDS},
        "reason": _last_error(str(report.failed)) if refused else None,
    }


def _last_error(log: str) -> str:
    """The first sentence of the last exception of a log."""
    found = _ERROR.findall(log)
    last = ": ".join(found[-1]) if found else log.strip().splitlines()[-1]
    return last.partition(". ")[0]


def _trial(
    layout: Layout,
    change: Change = nullcontext,
    *,
    family: str = "transformer",
    model: Mapping[str, Any] | None = None,
    workload: Mapping[str, Any] | None = None,
    precision: str = "fp32",
) -> Trial:
    """DeepSpeed on a model of two layers."""
    layout = {"engine": "deepspeed", **layout}
    return Trial(
        parity_run(family, layout, precision=precision, model={"layers": 2, **(model or {})}, workload=workload), change
    )


def _of_pipelines() -> tuple[Departure, ...]:
    clipped = {"grad_clip": 0.1}
    return (
        Departure(
            "pipeline clips by stage",
            "PipelineModule at ZeRO-0 with gradient_clipping",
            "each stage clips by the norm of its own gradients, not by the global norm",
            "ZeRO-1, or gradient_clipping 0",
            _trial({"pp": 2}, workload=clipped),
            _trial({"pp": 2, "dp": 2, "zero": 1}, workload=clipped),
        ),
        Departure(
            "pipeline activation checkpointing",
            "PipelineModule with activation_checkpoint_interval and no checkpointable_layers",
            "layers whose input is tokens, or that are not named, break the backward pass",
            "checkpointable_layers names the blocks",
            _trial({"pp": 2, "dp": 2, "zero": 1}, _pipeline_module(activation_checkpoint_interval=1)),
            _trial(
                {"pp": 2, "dp": 2, "zero": 1},
                _pipeline_module(activation_checkpoint_interval=1, checkpointable_layers=["AttentionBlock"]),
            ),
        ),
        *(
            Departure(
                f"pipeline with ZeRO-{zero}",
                f"PipelineModule at ZeRO-{zero}",
                "the pipeline engine refuses gradients that are sharded",
                "ZeRO-1",
                _trial({"pp": 2, "dp": 2, "zero": zero}),
                _trial({"pp": 2, "dp": 2, "zero": 1}),
            )
            for zero in (2, 3)
        ),
    )


def _of_ulysses() -> tuple[Departure, ...]:
    def layout(zero: int) -> Layout:
        return {"cp": 2, "cp_kind": "ulysses", "zero": zero}

    too_large = (
        Departure(
            f"Ulysses loss at ZeRO-{zero}",
            f"Ulysses at ZeRO-{zero}, loss the mean over a rank's own tokens",
            "gradients of the sequence-parallel ranks are added, not averaged: cp times too large",
            "the loss is divided by cp",
            _trial(layout(zero), _loss_scale(1.0)),
            _trial(layout(zero)),
        )
        for zero in (0, 1, 2)
    )
    return (
        *too_large,
        Departure(
            "Ulysses loss at ZeRO-3",
            "Ulysses at ZeRO-3, loss divided by cp as ZeRO-0 to 2 want it",
            "gradients are averaged over the sequence-parallel ranks: cp times too small",
            "the loss is the mean over a rank's own tokens",
            _trial(layout(3), _loss_scale(0.5)),
            _trial(layout(3)),
        ),
        *(
            Departure(
                f"Ulysses by degrees at ZeRO-{zero}",
                f"Ulysses at ZeRO-{zero} from data_parallel_size and sequence_parallel_size in the configuration",
                "gradients are averaged over replicas alone: sequence-parallel ranks drift apart",
                "mpu: deepspeed.runtime.sequence_parallel.parallel_state_sp",
                _trial(layout(zero), _groups_from_configuration),
                _trial(layout(zero)),
            )
            for zero in (0, 1)
        ),
    )


def _of_experts() -> tuple[Departure, ...]:
    def trial(
        zero: int, dp: int = 2, model: Mapping[str, Any] | None = None, workload: Mapping[str, Any] | None = None
    ) -> Trial:
        model = {"experts": 4, "aux_loss": 0.0, **(model or {})}
        return _trial({"dp": dp, "ep": 2, "zero": zero}, family="moe", model=model, workload=workload)

    # A gradient that experts have a large share in, and a clip that is always at work.
    clipped = {"grad_clip": 0.05, "learning_rate": 20.0, "steps": 4}
    return (
        *(
            Departure(
                f"experts clip at ZeRO-0, dp={dp}",
                f"MoE over ep=2 of dp={dp} at ZeRO-0 with gradient_clipping",
                "the norm is the mean over ranks of what each holds, where experts of other ranks are missing",
                "ZeRO-1 or 2, or gradient_clipping 0",
                trial(0, dp, workload=clipped),
                trial(1, dp, workload=clipped),
            )
            for dp in (2, 4)
        ),
        Departure(
            "experts balance for top-2",
            "MoE with k=2 and its l_aux as load-balancing loss",
            "the share of an expert counts first choices alone",
            "k of 1 or of 3 and more, or no such loss",
            trial(1, model={"aux_loss": 0.1, "top_k": 2}),
            trial(1, model={"aux_loss": 0.1, "top_k": 3}),
        ),
        Departure(
            "experts with ZeRO-3",
            "MoE at ZeRO-3",
            "the engine refuses it",
            "ZeRO-1 or 2",
            trial(3),
            trial(2),
        ),
    )


def _of_offload() -> tuple[Departure, ...]:
    adamw = {"optimizer": "adamw", "learning_rate": 1e-3}
    offloaded: Layout = {"dp": 2, "zero": 2, "offload": "optimizer"}
    return (
        Departure(
            "offload with torch's optimizer",
            "offload_optimizer with torch.optim.AdamW and zero_force_ds_cpu_optimizer left at true",
            "the engine refuses any optimizer but DeepSpeedCPUAdam",
            "zero_force_ds_cpu_optimizer: false",
            _trial(offloaded, _configuration(zero_force_ds_cpu_optimizer=True), workload=adamw),
            _trial(offloaded, workload=adamw),
        ),
    )


def _loss_scale(scale: float) -> Change:
    return lambda: patch(f"{_ENGINE}.loss_scale", lambda _zero, _cp: scale)


def _configuration(**changes: Any) -> Change:
    def change() -> AbstractContextManager[Any]:
        from hybridpar.parallel.deepspeed_config import deepspeed_config

        return patch(f"{_ENGINE}.deepspeed_config", lambda run: deepspeed_config(run) | changes)

    return change


def _groups_from_configuration() -> AbstractContextManager[Any]:
    """DeepSpeed makes its groups itself, of degrees that its configuration names."""
    from contextlib import ExitStack

    stack = ExitStack()
    stack.enter_context(_configuration(data_parallel_size=1, sequence_parallel_size=2)())
    stack.enter_context(patch(f"{_ENGINE}.sequence_groups", return_value=None))
    return stack


def _pipeline_module(**changes: Any) -> Change:
    def change() -> AbstractContextManager[Any]:
        from deepspeed.pipe import PipelineModule

        return patch(f"{_PIPELINE}.PipelineModule", lambda **given: PipelineModule(**(given | changes)))

    return change
