"""Rows of a table of training runs as numbers for the cost model, or one sentence why not. No torch here.

Any table with columns as in `data/published/training.csv` can be read; of columns that it lacks every cell counts as
empty. What a row leaves empty is filled in by rules that hold for all rows alike, and named in `Case.assumed`:

    dp                what is left of the devices
    cp, ep, vpp, zero 1, 1, 1, 0 (zero: 1 with NeMo and Megatron-Bridge, whose recipes shard the optimizer)
    sp                off
    micro_batch       the batch of a replica over its accumulation steps
    vocab             50,304 (GPT-2's, padded)
    recompute         none; "selective" where a TPU program names what it saves
    attention         in one kernel, but stored in programs before 2023 and in Megatron-DeepSpeed
    node              as the accelerator's nodes usually are; 72 or more in one fabric count as one node

Programs reduce gradients beside the backward pass, but Megatron before 2023, Megatron-DeepSpeed and nanotron's ZeRO-1
do it afterwards. Fused attention kernels are as new as their accelerator where they are named TE, cuDNN, splash, FA3.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hybridpar.cost import space
from hybridpar.cost.hardware import Accelerator, HardwareError, accelerator
from hybridpar.cost.shape import Load, Machine, Shape, Software, machine_of, software_of, stack
from hybridpar.published.memory import DEEPSPEED_BF16
from hybridpar.published.training import PublishedDataError
from hybridpar.theory.gpu_memory import DEEPSPEED_FP16, FSDP2, MEGATRON, NANOTRON, Recipe

NEEDED = ("accelerator", "layers", "hidden", "heads", "seq_len", "tp", "pp")
VOCAB = 50304
_WHOLE = (
    *("layers", "hidden", "ffn_hidden", "heads", "kv_heads", "head_dim", "vocab", "seq_len", "num_experts", "top_k"),
    *("moe_ffn_hidden", "shared_expert_ffn", "dense_layers", "ssm_state", "num_devices", "devices_per_node"),
    *("dp", "tp", "pp", "cp", "ep", "vpp", "zero_stage", "global_batch", "grad_accum"),
)
_REAL = (
    *("micro_batch", "params_b", "step_time_s", "step_time_s_derived", "tokens_per_s", "tokens_per_s_per_device"),
    *("peak_mem_gb", "year"),
)
_MAY_BE_ZERO = (
    "zero_stage",
    "dense_layers",
    "shared_expert_ffn",
    "num_experts",
    "top_k",
    "moe_ffn_hidden",
    "ssm_state",
)
# Operators that a program launches for the forward pass of a layer, counted in its source: Megatron-LM fuses bias with
# activation and dropout, scale with mask and softmax; nanotron runs norm, rotation and SwiGLU operator by operator and
# tensor parallelism through Python.
_KERNELS, _KERNELS_UNFUSED = 24.0, 40.0
# Collectives that move a layer's gradients or weights: nanotron one for each parameter, FSDP one a layer, others join
# several layers in a bucket.
_CALLS, _CALLS_BUCKETED = {"nanotron": 7.0, "fsdp2": 1.0}, 0.25
_FUSED = re.compile(r"flash|\bTE\b|cudnn|sdpa|flex|splash", re.IGNORECASE)
_ETHERNET = re.compile(r"\bEFA\b|\bTCP|\bDCN\b", re.IGNORECASE)
_NEW_ATTENTION = re.compile(r"\bTE\b|cudnn|splash|flash ?3|fa3", re.IGNORECASE)
_NEW_DEVICES = ("H100", "H200", "H800", "GH", "B200", "B300", "GB")
_INFINIBAND = re.compile(r"\bIB\b|Infini ?band|NDR|HDR|XDR", re.IGNORECASE)
_GBPS = r"(\d+(?:\.\d+)?)\s*Gb(?:ps|/s)"
_CARDS = re.compile(rf"(\d+)\s*x\s*[^,;:\d]*(?:[-\w]*\d?[^,;:]{{0,40}}?)\b{_GBPS}", re.IGNORECASE)
_PER_NODE = re.compile(rf"{_GBPS}\s*(per node|node-node)", re.IGNORECASE)
_PER_DEVICE = re.compile(rf"{_GBPS}\s*per (GPU|device|chip)", re.IGNORECASE)


@dataclass(frozen=True)
class Case:
    """One row that can be computed. `seconds` and `bytes` are measured, None where not."""

    row_id: str
    source_id: str
    group: tuple[str, ...]
    accelerator: str
    status: str
    shape: Shape
    load: Load
    machine: Machine
    software: Software
    candidate: Mapping[str, float]
    seconds: float | None
    bytes: float | None
    complete: bool
    assumed: str
    told: bool  # recomputation, and the network where the run spans nodes: without them a row is not fitted on


@dataclass(frozen=True)
class Refused:
    """One row that cannot be."""

    row_id: str
    source_id: str
    status: str
    complete: bool
    reason: str
    seconds: float | None = None


def read_cells(path: Path) -> list[dict[str, str]]:
    """All cells of a table as text, one dict a row; empty where a column or a cell is missing.

    Raises:
        PublishedDataError: the file cannot be read, or lacks every column that a prediction needs.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, restkey="_more", restval="")
            lacking = [name for name in NEEDED if name not in (reader.fieldnames or ())]
            if lacking:
                raise PublishedDataError(f"{path} has no column {', '.join(lacking)}; is it a table of training runs?")
            return [{name: _text(cell) for name, cell in row.items() if name} for row in reader]
    except OSError as error:
        raise PublishedDataError(f"{path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise PublishedDataError(f"{path} is no CSV table in UTF-8: {error}") from None


def _text(cell: Any) -> str:
    return cell.strip() if isinstance(cell, str) else ""


def case_of(cells: Mapping[str, str], number: int) -> Case | Refused:
    """One row; `number` names it where it has no row_id."""
    row_id = cells.get("row_id") or f"row-{number}"
    source_id, status = cells.get("source_id") or "table", cells.get("status") or "ok"
    complete = cells.get("complete", "y").lower() in ("y", "true", "1")
    try:
        return _Row(cells).case(row_id, source_id, status, complete=complete)
    except (PublishedDataError, HardwareError) as error:
        return Refused(row_id, source_id, status, complete, reason=str(error))


class _Row:
    """The cells of one row as numbers, checked."""

    def __init__(self, cells: Mapping[str, str]) -> None:
        self.cells = cells
        self.assumed: list[str] = []
        self.numbers: dict[str, float | None] = {}
        faults = []
        for name in (*_WHOLE, *_REAL):
            value = _number(cells.get(name, ""), name)
            if isinstance(value, str):
                faults.append(value)
            else:
                self.numbers[name] = value
        if faults:
            raise PublishedDataError("; ".join(faults))

    def text(self, name: str) -> str:
        return self.cells.get(name, "")

    def need(self, *names: str) -> list[float]:
        missing = [name for name in names if self.numbers[name] is None]
        if missing:
            raise PublishedDataError(f"{', '.join(missing)} not stated")
        return [float(self.numbers[name] or 0.0) for name in names]

    def get(self, name: str, otherwise: float, *, quiet: bool = False) -> float:
        value = self.numbers[name]
        if value is None:
            if not quiet:
                self.assumed.append(f"{name}={otherwise:g}")
            return otherwise
        return value

    def case(self, row_id: str, source_id: str, status: str, *, complete: bool) -> Case:
        task = self.text("task") or "pretrain"
        if task not in ("pretrain", "sft", "lora"):
            raise PublishedDataError(f"task={task!r} is none of pretrain, sft, lora")
        device = accelerator(self.text("accelerator"))
        (seq,) = self.need("seq_len")
        shape = self._shape()
        candidate, batch = self._candidate()
        load = Load(seq, batch, 0.0 if task == "lora" else 1.0)
        devices = candidate["dp"] * candidate["tp"] * candidate["pp"] * candidate["cp"]
        group = (source_id, self._model_key(shape), device.name, f"{devices:g}", f"{batch:g}", f"{seq:g}", task)
        return Case(
            row_id=row_id,
            source_id=source_id,
            group=(*group, self._precision(device)),
            accelerator=device.name,
            status=status,
            shape=shape,
            load=load,
            machine=self._machine(device),
            software=self._software(),
            candidate=candidate,
            seconds=self._seconds(batch * seq, devices),
            bytes=self._bytes(),
            complete=complete,
            assumed="; ".join(self.assumed),
            told=self._told(devices, device),
        )

    def _told(self, devices: float, device: Accelerator) -> bool:
        node = device.node if device.node >= 64 else self.get("devices_per_node", device.node, quiet=True)
        network = devices <= node or bool(self.text("interconnect_inter"))
        return network and not any(one.startswith("recompute") for one in self.assumed)

    def _model_key(self, shape: Shape) -> str:
        return f"{shape.layers:g}x{shape.hidden:g}x{shape.heads:g}x{shape.ffn:g}x{shape.experts:g}"

    def _shape(self) -> Shape:
        family = self.text("model_family")
        if family not in ("gpt", "llama", "moe"):
            raise PublishedDataError(f"model_family={family!r} has no layers here; legal: gpt, llama, moe")
        name = self.text("model_name").lower()
        if any(word in name for word in ("deepseek", "kimi")):
            raise PublishedDataError(f"{self.text('model_name')} has latent attention, which the cost model lacks")
        layers, hidden, heads = self.need("layers", "hidden", "heads")
        kv_heads = self.get("kv_heads", heads)
        head_dim = self.get("head_dim", hidden / heads, quiet=True)
        vocab = self.get("vocab", VOCAB)
        routed = family == "moe"
        dense_layers = self.get("dense_layers", 0, quiet=True) if routed else layers
        if dense_layers > layers:
            raise PublishedDataError(f"dense_layers={dense_layers:g} are more than layers={layers:g}")
        experts = top_k = width = shared = 0.0
        if routed:
            experts, top_k, width = self.need("num_experts", "top_k", "moe_ffn_hidden")
            shared = self.get("shared_expert_ffn", 0, quiet=True)
        ffn = self.need("ffn_hidden")[0] if dense_layers else 0.0
        plain = family == "gpt" and ffn == 4 * hidden
        fused = self._fused()
        return Shape(
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            ffn=ffn,
            vocab=vocab,
            dense=dense_layers,
            routed=layers - dense_layers,
            scan=0.0,
            expert_ffn=width,
            experts=experts,
            top_k=top_k,
            shared_ffn=shared,
            tied=float(family == "gpt"),
            matrices=2.0 if plain else 3.0,
            norm_vectors=2.0 if plain else 1.0,
            biases=float(plain),
            dropout=float(plain and not fused),
            positions=self.need("seq_len")[0] if plain else 0.0,
            fused=float(fused),
            **dict.fromkeys(_SCANS, 0.0),
        )

    def _fused(self) -> bool:
        kernel = self.text("attn_kernel")
        if kernel:
            return bool(_FUSED.search(kernel)) and "unfused" not in kernel
        fused = self._modern() and self.text("framework") != "Megatron-DeepSpeed"
        self.assumed.append("attention in one kernel" if fused else "attention scores stored")
        return fused

    def _modern(self) -> bool:
        return (self.numbers["year"] or 2026) >= 2023

    def _candidate(self) -> tuple[dict[str, float], float]:
        tp, pp = self.need("tp", "pp")
        cp, ep = self.get("cp", 1), self.get("ep", 1)
        dp = self.numbers["dp"]
        if dp is None:
            (devices,) = self.need("num_devices")
            dp = devices / (tp * pp * cp)
            self.assumed.append(f"dp={dp:g}")
        if dp < 1 or dp % 1:
            raise PublishedDataError(f"dp={dp:g} is no whole number of replicas")
        devices_told = self.numbers["num_devices"]
        if devices_told is not None and devices_told != dp * tp * pp * cp:
            raise PublishedDataError(f"dp*tp*pp*cp={dp * tp * pp * cp:g} are not its num_devices={devices_told:g}")
        micro, batch = self._batches(dp)
        schedule, virtual = self._schedule(pp)
        framework = self.text("framework")
        sharded = 1.0 if framework.startswith(("NVIDIA NeMo", "Megatron-Bridge")) else 0.0
        if "fsdp" in self.text("fsdp").lower() and self.numbers["zero_stage"] is None:
            sharded = 3.0
        zero = self.get("zero_stage", sharded)
        if zero > 3:
            raise PublishedDataError(f"zero_stage={zero:g} is none of 0, 1, 2, 3")
        words = {"schedule": space.SCHEDULES.index(schedule), "recompute": space.RECOMPUTES.index(self._recompute())}
        switches = {"sp": self._sp(tp), "overlap": self._overlap(), "cp_kind": self._cp_kind(), "offload": 0.0}
        degrees = {"dp": dp, "tp": tp, "pp": pp, "cp": cp, "ep": ep, "zero": zero, "virtual": virtual}
        uneven = {"most_layers": 0.0, "last_layers": 0.0}
        return {**degrees, **words, **switches, **uneven, "micro_batch": micro}, batch

    def _batches(self, dp: float) -> tuple[float, float]:
        micro, batch, rounds = (self.numbers[name] for name in ("micro_batch", "global_batch", "grad_accum"))
        if batch is None:
            if micro is None:
                raise PublishedDataError("micro_batch and global_batch not stated")
            batch = dp * micro * (rounds or 1)
            self.assumed.append(f"global_batch={batch:g}")
        if micro is None:
            if rounds is None:
                raise PublishedDataError("micro_batch not stated")
            micro = batch / dp / rounds
            self.assumed.append(f"micro_batch={micro:g}")
        if batch / (dp * micro) < 1 - 1e-9:
            raise PublishedDataError(f"global_batch={batch:g} is less than dp*micro_batch={dp * micro:g}")
        return micro, batch

    def _schedule(self, pp: float) -> tuple[str, float]:
        told = self.text("pp_schedule").lower()
        virtual = self.numbers["vpp"] or 1.0
        if pp == 1:
            return "1f1b", 1.0
        if told.startswith(("zbv", "zb-v")):
            return "zb-v", 2.0
        if told.startswith("dualpipe"):
            return "dualpipe-v", 2.0
        if told.startswith("zb") or "zero-bubble" in told:
            return "zero-bubble", 1.0
        if "gpipe" in told:
            return "gpipe", 1.0
        if told and "1f1b" not in told and "interleaved" not in told:
            raise PublishedDataError(f"pp_schedule={self.text('pp_schedule')!r} is not known")
        return ("interleaved", virtual) if virtual > 1 else ("1f1b", 1.0)

    def _recompute(self) -> str:
        told = self.text("recompute").lower()
        if told in ("", "none"):
            self.assumed += [] if told else ["recompute=none"]
            return "none"
        if told.startswith("full") or told in ("true", "block", "uniform"):
            return "full"
        if told.startswith(("selective", "custom", "save_", "minimal", "attn")):
            self.assumed += [] if told == "selective" else ["recompute=selective"]
            return "selective"
        raise PublishedDataError(f"recompute={self.text('recompute')!r} is none of none, selective, full")

    def _sp(self, tp: float) -> float:
        told = self.text("sp").lower()
        if told in ("true", "1", "y"):
            return 1.0
        if told in ("false", "0", "n", ""):
            self.assumed += ["sp=false"] if not told and tp > 1 else []
            return 0.0
        raise PublishedDataError(f"sp={self.text('sp')!r} is not true or false")

    def _overlap(self) -> float:
        told = self.text("overlap").lower()
        if told.startswith("none"):
            return 0.0
        framework = self.text("framework")
        return float(
            not (framework == "Megatron-DeepSpeed" or (framework.startswith("Megatron") and not self._modern()))
        )

    def _cp_kind(self) -> float:
        words = (self.text("notes") + self.text("fsdp")).lower()
        return float(space.CP_KINDS.index("ulysses" if "a2a" in words or "ulysses" in words else "ring"))

    def _precision(self, device: Accelerator) -> str:
        told = self.text("precision").lower()
        for word, name in (("fp4", "fp4"), ("fp8", "fp8"), ("int8", "fp8")):
            if word in told:
                device.peak(name)
                return name
        if told and not any(word in told for word in ("bf16", "fp16", "half")):
            if "fp32" in told:
                return "fp32"
            raise PublishedDataError(f"precision={self.text('precision')!r} is none of bf16, fp16, fp8, fp4, fp32")
        return "bf16"

    def _machine(self, device: Accelerator) -> Machine:
        node = int(self.get("devices_per_node", device.node, quiet=True))
        node = device.node if device.node >= 64 else node
        inter = self.text("interconnect_inter")
        slow = bool(_ETHERNET.search(inter)) and not _INFINIBAND.search(inter)
        kernel = self.text("attn_kernel")
        old = device.name.startswith(_NEW_DEVICES) and bool(kernel) and not _NEW_ATTENTION.search(kernel)
        found = machine_of(device, self._precision(device), node, slow_fabric=slow, old_attention=old)
        cards = int(self.get("devices_per_node", node, quiet=True))
        rate = node_rate(inter, cards)
        return found if rate is None else replace(found, nic=rate / cards)

    def _software(self) -> Software:
        framework, overlap = self.text("framework"), self.text("overlap").lower()
        hides = any(word in overlap for word in ("tp_comm_overlap", "async", "mc_tp_overlap"))
        recipe = self._recipe(framework)
        return software_of(
            recipe,
            kernels=_KERNELS_UNFUSED if recipe is NANOTRON else _KERNELS,
            hides_tp=0.0 if not self._overlap() else 1.0 if hides else 0.5,
            shards_pipe=framework.startswith("Megatron"),
            calls=_CALLS.get(recipe.name, _CALLS_BUCKETED),
        )

    def _recipe(self, framework: str) -> Recipe:
        if framework.startswith("nanotron"):
            return NANOTRON
        if framework == "Megatron-DeepSpeed":
            return DEEPSPEED_BF16 if self.text("precision").lower().startswith("bf16") else DEEPSPEED_FP16
        if "torchtitan" in framework or "FSDP" in framework or "MaxText" in framework:
            return FSDP2
        return MEGATRON

    def _seconds(self, tokens: float, devices: float) -> float | None:
        for name in ("step_time_s", "step_time_s_derived"):
            if self.numbers[name] is not None:
                return self.numbers[name]
        if self.numbers["tokens_per_s"] is not None:
            return tokens / float(self.numbers["tokens_per_s"])
        if self.numbers["tokens_per_s_per_device"] is not None:
            return tokens / float(self.numbers["tokens_per_s_per_device"]) / devices
        return None

    def _bytes(self) -> float | None:
        peak, told = self.numbers["peak_mem_gb"], self.text("mem_def")
        if peak is None:
            return None
        return peak * (1e9 if "convert" in told or "=> GB" in told else 2**30)


_SCANS = ("inner", "scan_heads", "scan_state", "scan_groups", "scan_conv", "scan_chunk", "scan_width")


def _number(text: str, name: str) -> float | str | None:
    """The number of a cell, None where empty, or what is wrong with it."""
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        return f"{name}={text!r} is not a number"
    least = 0.0 if name in _MAY_BE_ZERO else 1e-12
    if not math.isfinite(value) or value < least:
        return f"{name}={text} is not legal; it must be {'at least' if least == 0 else 'above'} 0"
    if name in _WHOLE and value != int(value):
        return f"{name}={text} is not a whole number"
    if value > 1e15:
        return f"{name}={text} is not legal; it must be at most 1e15"
    return value


def node_rate(told: str, node: int) -> float | None:
    """Bytes a second of all network cards of a node, one direction, from words like "8x200Gb/s HDR IB per node", "8x
    ConnectX-7 NDR 400Gb/s", "800 Gb/s per node" or "400 Gb/s per GPU"; None where they tell no such rate. Of several
    the largest counts: slow ports are for management and storage."""
    rates = [float(many) * float(rate) for many, rate in _CARDS.findall(told)]
    rates += [float(rate) for rate, _ in _PER_NODE.findall(told)]
    rates += [float(rate) * node for rate, _ in _PER_DEVICE.findall(told)]
    return max(rates) * 1e9 / 8 if rates else None


def batch_of(cases: Sequence[Case]) -> tuple[Shape, Load, Machine, Software, space.Candidates]:
    """All cases as arrays."""
    columns = {name: np.array([one.candidate[name] for one in cases]) for name in space.FIELDS}
    return (
        stack([one.shape for one in cases]),
        stack([one.load for one in cases]),
        stack([one.machine for one in cases]),
        stack([one.software for one in cases]),
        space.Candidates(**columns),
    )
