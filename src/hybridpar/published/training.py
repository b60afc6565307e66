"""Training runs that others measured: rows of `data/published/training.csv`, checked, and as specs where they can be.

A row is what its source printed; what it leaves empty is None here, never a guess. `PublishedRun.model`, `.strategy`
and `.run` build what the rest of the package computes with, or return one sentence why not. Two things need a rule:

    mlp               the table has no column for it: family gpt with a width of 4*hidden is the ungated MLP of GPT (two
                      matrices), llama and moe are gated (three); anything else is not known
    tied embeddings   no column either: whichever count is within 1% of the parameters that the source states, else
                      tied for gpt (as in GPT-2 and Megatron-LM), untied for llama and moe

Units: seconds, tokens a second, GB as printed (10^9 or 2^30 bytes: see mem_def).
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from hybridpar.specs import ModelSpec, Recompute, RunSpec, Schedule, SpecError, Strategy, WorkloadSpec
from hybridpar.theory.gpu_memory import Mlp
from hybridpar.theory.parameters import parameter_count

TABLE = Path("data/published/training.csv")

_INTEGERS = (
    *("layers", "hidden", "ffn_hidden", "heads", "kv_heads", "head_dim", "vocab", "seq_len", "num_experts", "top_k"),
    *("moe_ffn_hidden", "shared_expert_ffn", "dense_layers", "num_devices", "devices_per_node"),
    *("dp", "tp", "pp", "cp", "ep", "vpp", "zero_stage", "global_batch", "grad_accum"),
)
_REALS = ("micro_batch", "params_b", "step_time_s", "step_time_s_derived", "tokens_per_s", "mfu", "peak_mem_gb")
_TEXTS = (
    *("row_id", "source_id", "task", "model_family", "model_name", "accelerator", "pp_schedule", "recompute"),
    *("precision", "attn_kernel", "framework", "mem_def", "status", "derived_fields", "notes"),
)
COLUMNS = (*_TEXTS, *_INTEGERS, *_REALS, "sp", "complete")

_SCHEDULES: Mapping[str, Schedule] = {
    "1f1b": "1f1b",
    "1F1B": "1f1b",
    "1f1b (DeepSpeed)": "1f1b",
    "interleaved-1f1b": "interleaved",
    "1f1b-interleaved": "interleaved",
    "zbb": "zero-bubble",
    "zbv": "zb-v",
}
# fp16 is as wide as bf16, which is all that memory and traffic ask.
_PRECISIONS = ("bf16", "BF16", "bf16 (not stated)", "fp16", "fp16/bf16", "fp16/bf16 (not stated)")


class PublishedDataError(ValueError):
    """A table that is missing, or not the table it should be; one sentence."""


@dataclass(frozen=True)
class PublishedRun:
    """One row. Numbers as in the table (see `data/published/README.md`), None where the source does not tell."""

    row_id: str
    source_id: str
    task: str
    model_family: str
    model_name: str
    accelerator: str
    pp_schedule: str
    recompute: str
    precision: str
    attn_kernel: str
    framework: str
    mem_def: str
    status: str
    derived_fields: str
    notes: str
    layers: int | None
    hidden: int | None
    ffn_hidden: int | None
    heads: int | None
    kv_heads: int | None
    head_dim: int | None
    vocab: int | None
    seq_len: int | None
    num_experts: int | None
    top_k: int | None
    moe_ffn_hidden: int | None
    shared_expert_ffn: int | None
    dense_layers: int | None
    num_devices: int | None
    devices_per_node: int | None
    dp: int | None
    tp: int | None
    pp: int | None
    cp: int | None
    ep: int | None
    vpp: int | None
    zero_stage: int | None
    global_batch: int | None
    grad_accum: int | None
    micro_batch: float | None  # below 1 where a sequence is split over devices
    params_b: float | None
    step_time_s: float | None
    step_time_s_derived: float | None
    tokens_per_s: float | None
    mfu: float | None
    peak_mem_gb: float | None
    sp: bool | None
    complete: bool

    @property
    def mlp(self) -> Mlp | None:
        """Gated or not, by the rule above; None where it is not known."""
        if self.model_family in ("llama", "moe"):
            return "swiglu"
        ungated = self.model_family == "gpt" and self.hidden is not None and self.ffn_hidden == 4 * self.hidden
        return "gelu" if ungated else None

    @property
    def seconds(self) -> float | None:
        """A step, as printed or else derived from what was."""
        return self.step_time_s if self.step_time_s is not None else self.step_time_s_derived

    def assuming(self, **fields: Any) -> PublishedRun:
        """The row with what it leaves empty filled in by the caller, who thereby says what is assumed; what it states
        stays.

        Raises:
            KeyError: a field that no row has.
        """
        empty = {name: value for name, value in fields.items() if vars(self)[name] in (None, "")}
        return replace(self, **empty)

    def model(self) -> ModelSpec | str:
        """The architecture, or why there is none. Its MLP is `mlp`, which a ModelSpec (always gated) does not say."""
        if self.mlp is None:
            return f"model_family={self.model_family!r} with ffn_hidden={self.ffn_hidden} is no known MLP"
        if "deepseek" in self.model_name.lower() or "kimi" in self.model_name.lower():
            return f"{self.model_name} has latent attention, which no ModelSpec describes"
        routed = self.model_family == "moe"
        if routed and (self.dense_layers or self.shared_expert_ffn):
            return f"{self.model_name} has dense layers or shared experts of another width than its experts'"
        missing = self._missing("layers", "hidden", "heads", "kv_heads", "vocab")
        width = self.moe_ffn_hidden if routed else self.ffn_hidden
        missing += ["moe_ffn_hidden" if routed else "ffn_hidden"] * (width is None)
        missing += self._missing("num_experts", "top_k") if routed else []
        if missing:
            return f"{', '.join(missing)} not stated"
        fields = {name: getattr(self, name) for name in ("layers", "hidden", "heads", "kv_heads", "vocab")}
        fields |= {"name": self.model_name, "family": "moe" if routed else "transformer", "ffn_hidden": width}
        fields |= {"head_dim": self.head_dim or fields["hidden"] // fields["heads"]}
        fields |= {"experts": self.num_experts, "top_k": self.top_k} if routed else {}
        try:
            models = {tied: ModelSpec(**fields, tied_embeddings=tied) for tied in (False, True)}
        except SpecError as error:
            return "; ".join(error.faults)
        return models[self._is_tied(models)]

    def strategy(self) -> Strategy | str:
        """The layout, or why there is none."""
        missing = self._missing("dp", "tp", "pp", "cp", "ep", "zero_stage")
        missing += ["sp"] if self.sp is None and (self.tp or 1) > 1 else []
        missing += ["pp_schedule"] if not self.pp_schedule and (self.pp or 1) > 1 else []
        missing += ["recompute"] if not self.recompute else []
        if missing:
            return f"{', '.join(missing)} not stated"
        if self.recompute not in get_args(Recompute):
            return f"recompute={self.recompute!r} is none of {', '.join(get_args(Recompute))}"
        if self.pp_schedule and self.pp_schedule not in _SCHEDULES:
            return f"pp_schedule={self.pp_schedule!r} is not known"
        fields: dict[str, Any] = {axis: getattr(self, axis) for axis in ("dp", "tp", "pp", "cp", "ep")}
        virtual = (self.vpp or 1) if self.pp != 1 else 1
        schedule = _SCHEDULES[self.pp_schedule] if self.pp_schedule else "1f1b"
        if schedule in ("1f1b", "interleaved"):
            schedule = "interleaved" if virtual > 1 else "1f1b"
        fields |= {"zero": self.zero_stage, "sp": bool(self.sp), "recompute": self.recompute}
        strategy = Strategy(**fields, schedule=schedule, virtual=virtual)
        if self.num_devices is not None and strategy.devices != self.num_devices:
            return f"dp*tp*pp*cp={strategy.devices} are not its {self.num_devices} devices"
        if strategy.dp % strategy.ep:
            return f"ep={strategy.ep} does not divide dp={strategy.dp}"
        return strategy

    def run(self) -> RunSpec | str:
        """Model, layout and batches together, or why not."""
        parts = (self.model(), self.strategy())
        reasons = [part for part in parts if isinstance(part, str)]
        missing = self._missing("seq_len", "micro_batch")
        if self.global_batch is None and self.grad_accum is None:
            missing.append("global_batch")
        reasons += [f"{', '.join(missing)} not stated"] * bool(missing)
        if self.micro_batch is not None and (self.micro_batch < 1 or self.micro_batch % 1):
            reasons.append(f"micro_batch={self.micro_batch} is no whole number of sequences")
        if self.precision not in _PRECISIONS:
            reasons.append(f"precision={self.precision!r} is not bf16 or fp16")
        if self.task != "pretrain":
            reasons.append(f"task={self.task} does not train all parameters")
        if reasons:
            return "; ".join(reasons)
        model, strategy = parts
        assert isinstance(model, ModelSpec)
        assert isinstance(strategy, Strategy)
        assert self.micro_batch is not None
        micro_batch = int(self.micro_batch)
        batch = self._batch(strategy.dp * micro_batch)
        if isinstance(batch, str):
            return batch
        workload = {"seq_len": self.seq_len, "micro_batch": micro_batch, "global_batch": batch, "precision": "bf16"}
        return RunSpec(model=model, strategy=strategy, workload=WorkloadSpec.model_validate(workload))

    def _batch(self, at_once: int) -> int | str:
        """Sequences a step, where the ways in which a row tells them agree; `at_once` are those of one micro-batch on
        every replica."""
        if self.global_batch is None:
            return at_once * (self.grad_accum or 1)
        rounds, left = divmod(self.global_batch, at_once)
        if left or (self.grad_accum is not None and self.grad_accum != rounds):
            told = f"dp*micro_batch={at_once}, grad_accum={self.grad_accum}"
            return f"global_batch={self.global_batch} does not agree with {told}"
        return self.global_batch

    def _missing(self, *names: str) -> list[str]:
        return [name for name in names if getattr(self, name) is None]

    def _is_tied(self, models: Mapping[bool, ModelSpec]) -> bool:
        if self.params_b is not None and self.mlp == "swiglu":
            off = {tied: abs(parameter_count(model) / 1e9 / self.params_b - 1) for tied, model in models.items()}
            best = min(off, key=lambda tied: off[tied])
            if off[best] < 0.01:
                return best
        return self.mlp == "gelu"


def read_training(path: Path = TABLE) -> tuple[PublishedRun, ...]:
    """All rows of the table, in its order.

    Raises:
        PublishedDataError: no such file, columns that are missing, or a cell that is no number where one should be.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise PublishedDataError(
                    f"{path} has no column {', '.join(missing)}; is it the table of training runs?"
                )
            return tuple(_row(cells, path, reader.line_num) for cells in reader)
    except OSError as error:
        raise PublishedDataError(f"{path} cannot be read: {error.strerror}") from None


def _row(cells: Mapping[str, str], path: Path, line: int) -> PublishedRun:
    where = f"{path} line {line}"
    fields: dict[str, Any] = {name: cells[name] for name in _TEXTS}
    fields |= {name: _integer(cells[name], name, where) for name in _INTEGERS}
    fields |= {name: _real(cells[name], name, where) for name in _REALS}
    fields["sp"] = _truth(cells["sp"], "sp", where)
    fields["complete"] = bool(_truth(cells["complete"], "complete", where))
    return PublishedRun(**fields)


def _integer(text: str, name: str, where: str) -> int | None:
    number = _real(text, name, where)
    if number is None:
        return None
    if number != int(number):
        raise PublishedDataError(f"{where}: {name}={text!r} is not a whole number")
    return int(number)


def _real(text: str, name: str, where: str) -> float | None:
    if not text:
        return None
    try:
        return float(text)
    except ValueError:
        raise PublishedDataError(f"{where}: {name}={text!r} is not a number") from None


def _truth(text: str, name: str, where: str) -> bool | None:
    known = {"": None, "true": True, "1": True, "y": True, "false": False, "0": False, "n": False}
    if text.lower() not in known:
        raise PublishedDataError(f"{where}: {name}={text!r} is not true or false")
    return known[text.lower()]
