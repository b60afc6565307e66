"""What a run ran on, and what one rank of it could reach."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridpar.launch import environment
from hybridpar.specs import RunSpec
from tests.launch.doubles import toy_run


def _on(device: str, dp: int = 4, threads: int = 1) -> RunSpec:
    run = toy_run(Path("any.txt"), dp=dp)
    cluster = run.cluster.model_copy(update={"device": device, "threads_per_rank": threads})
    return run.model_copy(update={"cluster": cluster})


@pytest.mark.parametrize(("ranks", "threads", "cores_in_use"), [(1, 1, 1), (2, 1, 2), (2, 3, 6), (4, 1, 4), (8, 2, 8)])
def test_ranks_add_cores_until_the_machine_has_no_more(
    ranks: int, threads: int, cores_in_use: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "cores", lambda: 8)
    assert environment.peak_flops_per_s(_on("cpu", ranks, threads), "cpu", 1e9) == cores_in_use * 1e9


def test_every_gpu_adds_its_rate() -> None:
    assert environment.peak_flops_per_s(_on("cuda"), "cuda", 1e12) == 4e12


@pytest.mark.parametrize(("gpus", "device"), [((), "cpu"), (("H100",), "cuda")])
def test_auto_takes_cuda_where_there_are_gpus(
    gpus: tuple[str, ...], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "gpu_names", lambda: gpus)
    assert environment.resolve_device(_on("auto")) == device
    assert environment.resolve_device(_on("cpu")) == "cpu"


def test_more_ranks_than_gpus_are_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "gpu_names", lambda: ("H100", "H100"))
    assert environment.lacking(_on("cuda", dp=2), "cuda") is None
    reason = environment.lacking(_on("cuda", dp=4), "cuda")
    assert reason is not None
    assert "asks for 4 devices, and this machine has 2 GPUs" in reason


def test_the_testbed_names_the_kind_of_device() -> None:
    assert environment.testbed(_on("cpu"), "cpu") == "local-cpu"
    assert environment.testbed(_on("cuda"), "cuda") == "local-cuda"


def test_a_description_names_versions_processor_and_launcher() -> None:
    told = environment.describe(_on("cpu", threads=2), "cpu", None)
    assert told["torch"]
    assert told["cpu_model"]
    assert told["cores"] >= 1
    assert (told["threads_per_rank"], told["launcher"], told["device"]) == (2, "forked", "cpu")
