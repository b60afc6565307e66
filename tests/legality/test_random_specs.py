"""Whatever a spec file holds, the answer is a run, its violations, or one sentence a fault: never anything else."""

from __future__ import annotations

import random
from typing import Any

import pytest

from hybridpar.legality import violations
from hybridpar.presets import MODELS
from hybridpar.specs import ClusterSpec, ModelSpec, RunSpec, SpecError, Strategy, WorkloadSpec, parse_run_spec

_SECTIONS = {"model": ModelSpec, "workload": WorkloadSpec, "strategy": Strategy, "cluster": ClusterSpec}
_JUNK: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        -1,
        0,
        1.5,
        10**30,
        -(10**30),
        1e308,
        float("nan"),
        float("inf"),
        "",
        "1",
        "1e3",
        "auto",
        "ring",
    ),
    *([], [1, 2], [[]], {}, {"a": 1}, {"preset": 3}, "\N{SNOWMAN}\n;rm", b"bytes", (1,)),
)
_GOOD: dict[str, tuple[Any, ...]] = {
    "family": ("transformer", "mamba2", "hybrid", "moe"),
    "preset": tuple(name for name in MODELS if name.endswith(("toy", "small"))),
    "pattern": ("A", "M", "E", "MA", "MMA", "AE"),
    "phase": ("train", "prefill", "decode"),
    "precision": ("fp64", "fp32", "bf16", "fp8"),
    "optimizer": ("adamw", "sgd"),
    "engine": ("torch", "deepspeed"),
    "zero": (0, 1, 2, 3),
    "schedule": ("gpipe", "1f1b", "interleaved", "zero-bubble", "zb-v", "dualpipe-v"),
    "cp_kind": ("ring", "ulysses"),
    "recompute": ("none", "selective", "full"),
    "offload": ("none", "optimizer", "parameters"),
    "launcher": ("forked", "torchrun"),
    "device": ("auto", "cpu"),
    "stage_layers": ([2, 2], [0, 4], [1, 1, 1, 1], [4, 0]),
    **dict.fromkeys(("sp", "overlap", "tied_embeddings"), (True, False)),
    **dict.fromkeys(("dp", "tp", "pp", "cp", "ep", "virtual"), (1, 2, 4, 8)),
    **dict.fromkeys(("learning_rate", "weight_decay", "grad_clip", "deadline_s", "rope_theta"), (0.5, 1, 2)),
    **dict.fromkeys(("capacity_factor", "aux_loss"), (0, 0.01, 1.0)),
    **dict.fromkeys(("name", "data", "start_from"), ("a", "shakespeare")),
}
_NUMBERS = (0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 64, 100, 128, 257)


def _value(draw: random.Random, field: str, junk: float) -> Any:
    return draw.choice(_JUNK) if draw.random() < junk else draw.choice(_GOOD.get(field, _NUMBERS))


def _spec(draw: random.Random) -> Any:
    """Anything from a plausible spec to nonsense: how much of it is junk is drawn too."""
    junk = draw.choice((0.0, 0.0, 0.02, 0.1, 0.5))
    if draw.random() < junk / 5:
        return draw.choice(_JUNK)
    content: dict[str, Any] = {"seed": draw.choice((0, 7))} if draw.random() < 0.3 else {}
    for section, kind in _SECTIONS.items():
        if section != "model" and draw.random() < 0.2:
            continue
        if draw.random() < junk / 5:
            content[section] = draw.choice(_JUNK)
            continue
        fields = draw.sample(sorted(kind.model_fields), draw.randint(0, min(8, len(kind.model_fields))))
        content[section] = {field: _value(draw, field, junk) for field in fields}
        if section == "model":
            preset = {"preset": draw.choice(_GOOD["preset"])}
            content[section] |= (
                preset if draw.random() < 0.6 else {"family": draw.choice(_GOOD["family"]), "layers": 4, "hidden": 64}
            )
        if draw.random() < junk:
            content[section][draw.choice(("lairs", "dpp", "", "preset"))] = draw.choice(_JUNK)
    if draw.random() < junk:
        content[draw.choice(("modle", "strategies"))] = draw.choice(_JUNK)
    return content


@pytest.mark.timeout(300)
def test_ten_thousand_random_specs_get_a_run_or_sentences() -> None:
    draw = random.Random(0)
    ends = {"legal": 0, "illegal": 0, "malformed": 0}
    told: list[str] = []
    for _ in range(10_000):
        content = _spec(draw)
        try:
            run = parse_run_spec(content)
        except SpecError as error:
            ends["malformed"] += 1
            told += error.faults or ("",)
            continue
        assert isinstance(run, RunSpec)
        found = violations(run)
        ends["illegal" if found else "legal"] += 1
        for violation in found:
            section, _, field = violation.field.partition(".")
            assert field in _SECTIONS[section].model_fields, violation
            assert str(violation).count("\n") == 0, violation
            assert "; legal: " in str(violation), violation
            assert violation.legal, violation
    assert all(fault and "\n" not in fault for fault in told)
    assert min(ends.values()) > 200, ends
