"""Which layouts are compared with one device, and on which models. No torch here."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hybridpar.specs import RunSpec, Strategy, parse_run_spec

# Small odd models: vocabulary, layers and experts that do not divide evenly, fewer key/value heads than ranks, a ragged
# last chunk.
_ATTENTION: Mapping[str, Any] = {"hidden": 32, "heads": 8, "kv_heads": 2, "ffn_hidden": 48, "vocab": 67}
_MAMBA: Mapping[str, Any] = {"hidden": 32, "ssm_state": 8, "ssm_head_dim": 8, "ssm_chunk": 7, "vocab": 67}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "transformer": {**_ATTENTION, "layers": 9},
    "mamba2": {**_MAMBA, "layers": 9},
    "hybrid": {**_ATTENTION, **_MAMBA, "layers": 9, "pattern": "MMA", "ssm_groups": 4},
    "moe": {**_ATTENTION, "layers": 9, "ffn_hidden": 24, "experts": 5, "top_k": 2, "shared_experts": 1},
}
_SGD: Mapping[str, Any] = {"optimizer": "sgd", "learning_rate": 0.1}  # large enough that an update shows
WORKLOAD: Mapping[str, Any] = {"seq_len": 48, "global_batch": 8, "micro_batch": 1, "steps": 2, "grad_clip": 0.5}

# DeepSpeed deals out whole experts, and its own load-balancing loss departs for two experts a token.
_FOR_DEEPSPEED: Mapping[str, Mapping[str, Any]] = {"moe": {"experts": 8, "aux_loss": 0.0}}

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero-bubble", "zb-v", "dualpipe-v")
_AXES = ("dp", "tp", "pp", "cp")

Layout = dict[str, Any]


def single_strategies() -> list[Layout]:
    """Every strategy alone, with each of its options."""
    layouts: list[Layout] = [{"dp": n, "zero": zero} for n in (2, 4) for zero in (0, 1, 2, 3)]
    layouts += [{"dp": 4, "zero": zero, "zero_group": 2} for zero in (2, 3)]
    layouts += [{"dp": 2, "overlap": False}, {"cp": 2, "overlap": False}]
    layouts += [{"dp": 2, "zero": zero, "offload": "optimizer"} for zero in (0, 2, 3)]
    layouts += [{"dp": 2, "zero": 3, "offload": "parameters"}]
    layouts += [{"recompute": recompute} for recompute in ("selective", "full")]
    layouts += [{"tp": n, "sp": sp} for n in (2, 4, 8) for sp in (False, True)]
    layouts += [{"pp": n, "schedule": schedule} for n in (2, 4) for schedule in SCHEDULES]
    layouts += [{"pp": 2, "schedule": "zero-bubble", "virtual": 2}, {"pp": 2, "schedule": "zb-v", "recompute": "full"}]
    layouts += [{"cp": n, "cp_kind": kind} for n in (2, 4, 8) for kind in ("ring", "ulysses")]
    layouts += [{"cp": 2, "zero": 1}, {"cp": 2, "zero": 3}]
    return layouts


def expert_strategies() -> list[Layout]:
    """Experts dealt out over data replicas, alone and under every ZeRO stage."""
    layouts: list[Layout] = [{"dp": n, "ep": n} for n in (2, 4)]
    layouts += [{"dp": 4, "ep": 2, "zero": zero} for zero in (0, 1, 2, 3)]
    layouts += [{"dp": 4, "ep": 4, "zero": 3}, {"dp": 2, "ep": 2, "overlap": False}]
    return layouts


def hybrids(devices: int, variants: int = 3) -> list[Layout]:
    """Every product of two or more of dp, tp, pp and cp on so many devices, each with `variants` choices of the other
    options; the choices rotate, so that over all products every option meets every other."""
    turn = itertools.count()
    layouts = []
    for degrees in _factorisations(devices, len(_AXES)):
        layout = {axis: degree for axis, degree in zip(_AXES, degrees, strict=True) if degree > 1}
        if len(layout) > 1:
            layouts += [layout | _options(layout, next(turn)) for _ in range(variants)]
    return layouts


def _factorisations(n: int, factors: int) -> Iterator[tuple[int, ...]]:
    if factors == 1:
        yield (n,)
        return
    for first in (k for k in range(1, n + 1) if n % k == 0):
        yield from ((first, *rest) for rest in _factorisations(n // first, factors - 1))


def _options(layout: Mapping[str, int], turn: int) -> Layout:
    """Choices number `turn`, of periods that share no factor; zero=3 is not paired with a backward pass in parts."""
    options: Layout = {"recompute": ("none", "none", "selective", "none", "full")[turn % 5]}
    if "pp" in layout:
        options["schedule"] = (*SCHEDULES, "1f1b")[turn % 7]
    if "tp" in layout:
        options["sp"] = turn % 2 == 0
    if "cp" in layout:
        options["cp_kind"] = ("ring", "ring", "ulysses")[turn % 3]
    if "dp" in layout or "cp" in layout:
        splits = options.get("schedule") in ("zero-bubble", "zb-v", "dualpipe-v")
        options["zero"] = (0, 1, 2)[turn % 3] if splits else (0, 3, 1, 2)[turn % 4]
    return options


def with_experts(layouts: Iterable[Layout]) -> list[Layout]:
    """The same layouts with the experts of a block of replicas dealt out over it: every other one of them all."""
    found = []
    for number, layout in enumerate(layouts):
        dp = layout.get("dp", 1)
        ep = 2 if number % 2 and dp % 2 == 0 else dp
        found.append({**layout, "ep": ep} if dp > 1 and "zero_group" not in layout else layout)
    return found


def torch_layouts(family: str, largest: int = 8) -> list[Layout]:
    """Everything the torch engine offers a family on up to `largest` devices (powers of two)."""
    products = [layout for n in (4, 8, 16) for layout in hybrids(n, variants=1 if n == 16 else 3)]
    layouts = single_strategies() + (expert_strategies() + with_experts(products) if family == "moe" else products)
    return [layout for layout in layouts if _devices(layout) <= largest]


def generation_layouts(family: str, largest: int = 8) -> list[Layout]:
    """How a model is served: every axis alone, and products of them."""
    layouts: list[Layout] = [{axis: n} for axis in _AXES for n in (2, 4)]
    layouts += [{"cp": n, "cp_kind": "ulysses"} for n in (2, 4)]
    layouts += [{a: 2, b: 2} for a, b in itertools.combinations(_AXES, 2)]
    layouts += [{a: 2, b: 2, c: 2} for a, b, c in itertools.combinations(_AXES, 3)]
    layouts += [{"tp": 8}, {"tp": 4, "pp": 2}, {"tp": 2, "cp": 4}, {"tp": 2, "cp": 2, "pp": 2, "cp_kind": "ulysses"}]
    if family == "moe":
        layouts = [{"dp": 4, "ep": 2}, *with_experts(layouts)]
    return [layout for layout in layouts if _devices(layout) <= largest]


def deepspeed_layouts(family: str, largest: int = 8) -> list[Layout]:
    """What the second engine offers: ZeRO-0 to 3 over replicas, offload, PipelineModule; AutoTP and Ulysses for
    attention, and experts over replicas."""
    layouts: list[Layout] = [{"dp": n, "zero": zero} for n in (2, 4) for zero in (0, 1, 2, 3)]
    layouts += [{"dp": 2, "zero": zero, "offload": "optimizer"} for zero in (1, 2, 3)]
    layouts += [{"dp": 2, "zero": 3, "offload": "parameters"}, {"dp": 2, "zero": 1, "recompute": "full"}]
    layouts += [{"dp": 2, "pp": 2, "zero": 1}, {"dp": 2, "pp": 4, "zero": 1}, {"dp": 4, "pp": 2, "zero": 1}]
    layouts += [{"pp": 2, "dp": 1}, {"pp": 4, "dp": 1}]
    if family == "transformer":
        layouts += [{"tp": 2}, {"tp": 4}, *({"tp": 2, "dp": 2, "zero": zero} for zero in (1, 2, 3))]
        layouts += [{"cp": n, "cp_kind": "ulysses", "zero": zero} for n in (2, 4) for zero in (0, 1, 2, 3)]
        layouts += [{"cp": 2, "cp_kind": "ulysses", "dp": 2, "zero": zero} for zero in (1, 3)]
    if family == "moe":
        layouts += [{"dp": n, "ep": ep, "zero": zero} for n, ep in ((2, 2), (4, 2), (4, 4)) for zero in (0, 1, 2, 3)]
    return [{"engine": "deepspeed", **layout} for layout in layouts if _devices(layout) <= largest]


def runs_to_compare(
    families: Iterable[str], engine: str, phase: str, *, precision: str = "fp64", largest: int = 8
) -> list[RunSpec]:
    """Everything an engine offers in a phase; neighbours have the same number of devices, to share a world of ranks."""
    layouts = deepspeed_layouts if engine == "deepspeed" else torch_layouts
    if phase == "decode":
        layouts = generation_layouts
    workload = {} if phase == "train" else {"phase": "decode", "steps": 6, "micro_batch": 2}
    model = _FOR_DEEPSPEED if engine == "deepspeed" else {}
    return [
        parity_run(family, layout, precision=precision, model=model.get(family), workload=workload)
        for family in families
        for layout in sorted(layouts(family, largest), key=_devices)
    ]


def _devices(layout: Mapping[str, Any]) -> int:
    return Strategy.model_validate(layout).devices


def parity_run(
    family: str,
    layout: Mapping[str, Any],
    *,
    precision: str = "fp64",
    model: Mapping[str, Any] | None = None,
    workload: Mapping[str, Any] | None = None,
) -> RunSpec:
    """One layout of a family's small model, with changes to the model or the workload."""
    optimizer = {} if precision == "fp64" else _SGD
    return parse_run_spec(
        {
            "model": {"name": f"parity-{family}", "family": family, **MODELS[family], **(model or {})},
            "workload": {**WORKLOAD, **optimizer, "precision": precision, **(workload or {})},
            "strategy": dict(layout),
            "cluster": {"device": "cpu"},
        }
    )
