"""Checkpoints: a run goes on bit for bit, in any layout; a kill while one is written leaves the last whole one."""

from __future__ import annotations

import io
import os
import pickle
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridpar import checkpoints
from hybridpar.checkpoints import CheckpointError, PastStep, latest, past_of, steps_done
from hybridpar.comm.process_group import ProcessMesh, start, stop
from hybridpar.launch.forked import fork_ranks, preload, values
from hybridpar.parallel import checkpoint
from hybridpar.parallel.apply import build_engine
from hybridpar.parallel.engine import Resumable
from hybridpar.parity_layouts import parity_run
from hybridpar.specs import RunSpec

_STEPS = 4
_KEPT = 2
_PAST = [PastStep(0, 4.0, 1.0, 0.1)]


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    preload()


def _batch(run: RunSpec, step: int, dp: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    shape = (run.workload.global_batch, run.workload.seq_len + 1)
    tokens = torch.randint(0, run.model.vocab, shape, generator=generator).chunk(run.strategy.dp)[dp]
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _losses(
    run: RunSpec,
    folder: Path,
    steps: range,
    *,
    load: Path | None = None,
    save: Path | None = None,
    before_saving: Callable[[], Any] = lambda: None,
) -> list[float]:
    """Losses of the given steps, from a checkpoint or from the start; a checkpoint at their end where asked."""
    folder.mkdir(parents=True)

    def rank(index: int) -> list[float]:
        torch.set_num_threads(1)
        start(index, run.strategy.devices, folder / "store", "cpu", 60.0)
        mesh = ProcessMesh.build(run.strategy)
        engine = build_engine(run, mesh)
        assert isinstance(engine, Resumable)
        if load is not None:
            assert engine.load(load) == steps.start
        losses = [engine.step(*_batch(run, step, mesh.coordinate.dp)).loss for step in steps]
        if save is not None:
            before_saving()
            engine.save(save, steps.stop, _PAST)
        stop()
        return losses

    found: list[float] = values(fork_ranks(run.strategy.devices, rank, deadline_s=90.0, log_dir=folder / "logs"))[0]
    return found


# Each kind of state once: whole, sharded by parameter (ZeRO-1) or by row (FSDP2), on the host, cut by tp, pp, ep; and a
# chain, so that each layout also starts from what another one wrote.
CHAINS: dict[str, tuple[str, dict[str, Any], list[dict[str, Any]]]] = {
    "dense": (
        "transformer",
        {},
        [
            {"dp": 2, "zero": 1},
            {"dp": 2, "zero": 3},
            {"tp": 2, "sp": True},
            {"pp": 2, "schedule": "zb-v"},
            {"dp": 2, "offload": "optimizer"},
            {},
        ],
    ),
    "tied embeddings": ("mamba2", {"tied_embeddings": True}, [{"pp": 2}, {"pp": 2, "schedule": "zb-v"}, {"cp": 2}]),
    "experts": ("moe", {}, [{"dp": 2, "ep": 2, "zero": 1}, {"dp": 2, "ep": 2}, {"tp": 2}]),
}


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_a_run_goes_on_bit_for_bit_and_so_does_another_layout_within_rounding(
    chain: tuple[str, dict[str, Any], list[dict[str, Any]]], tmp_path: Path
) -> None:
    family, model, layouts = chain
    runs = [parity_run(family, layout, model={**model, "layers": 3}) for layout in layouts]
    for number, run in enumerate(runs):
        here = tmp_path / str(number)
        whole = _losses(run, here / "whole", range(_STEPS))
        first = _losses(run, here / "first", range(_KEPT), save=here)
        kept = latest(here)
        assert kept is not None
        assert first + _losses(run, here / "again", range(_KEPT, _STEPS), load=kept) == whole
        other = runs[(number + 1) % len(runs)]
        moved = _losses(other, here / "moved", range(_KEPT, _STEPS), load=kept)
        assert moved == pytest.approx(whole[_KEPT:], rel=1e-12)


DEEPSPEED: dict[str, tuple[str, dict[str, Any], list[dict[str, Any]]]] = {
    "stages": ("mamba2", {}, [*({"dp": 2, "zero": zero} for zero in (0, 1, 2, 3))]),
    "offload": (
        "transformer",
        {},
        [
            {"dp": 2, "zero": 2, "offload": "optimizer"},
            {"dp": 2, "zero": 3, "offload": "parameters"},
            {"cp": 2, "cp_kind": "ulysses", "zero": 1},
        ],
    ),
    "pieces": ("transformer", {}, [{"tp": 4}, {"dp": 2, "pp": 2, "zero": 1}, {"dp": 2, "tp": 2, "zero": 3}]),
    "experts": ("moe", {"experts": 4, "aux_loss": 0.0}, [{"dp": 2, "ep": 2, "zero": 1}, {"dp": 2, "ep": 2, "zero": 2}]),
}


@pytest.mark.parametrize("chain", DEEPSPEED.values(), ids=DEEPSPEED)
def test_deepspeed_goes_on_bit_for_bit_and_either_engine_from_the_others_checkpoint(
    chain: tuple[str, dict[str, Any], list[dict[str, Any]]], tmp_path: Path
) -> None:
    preload(deepspeed=True)
    family, model, layouts = chain
    adamw = {"optimizer": "adamw", "learning_rate": 1e-3}

    def of(layout: dict[str, Any]) -> RunSpec:
        return parity_run(family, layout, precision="fp32", model={**model, "layers": 2}, workload=adamw)

    torchs = of({"dp": 2})
    for number, layout in enumerate(layouts):
        here, run = tmp_path / str(number), of({"engine": "deepspeed", **layout})
        whole = _losses(run, here / "whole", range(_STEPS))
        first = _losses(run, here / "first", range(_KEPT), save=here / "kept")
        kept = latest(here / "kept")
        assert kept is not None
        assert first + _losses(run, here / "again", range(_KEPT, _STEPS), load=kept) == whole
        moved = _losses(torchs, here / "to torch", range(_KEPT, _STEPS), load=kept)
        assert moved == pytest.approx(whole[_KEPT:], rel=1e-5)
        _losses(torchs, here / "torch", range(_KEPT), save=here / "torch kept")
        back = _losses(run, here / "from torch", range(_KEPT, _STEPS), load=latest(here / "torch kept"))
        assert back == pytest.approx(whole[_KEPT:], rel=1e-5)


def test_a_kill_while_saving_leaves_the_last_whole_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = parity_run("transformer", {"dp": 2}, model={"layers": 1})
    first = _losses(run, tmp_path / "first", range(2), save=tmp_path)
    assert len(first) == 2

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(checkpoint, "write_about", die)  # all tensors are written, the name is not yet the final one
    with pytest.raises(RuntimeError, match="rank"):
        _losses(run, tmp_path / "killed", range(2, 3), load=tmp_path / "step-2", save=tmp_path)
    assert latest(tmp_path) == tmp_path / "step-2"
    monkeypatch.undo()
    again = _losses(run, tmp_path / "again", range(2, 3), load=tmp_path / "step-2", save=tmp_path)
    assert len(again) == 1
    assert latest(tmp_path) == tmp_path / "step-3"
    assert not list(tmp_path.glob("*.part"))


def test_the_steps_behind_a_checkpoint_are_known(tmp_path: Path) -> None:
    run = parity_run("transformer", {}, model={"layers": 1})
    _losses(run, tmp_path / "run", range(1), save=tmp_path)
    assert steps_done(tmp_path / "step-1", run) == 1
    assert past_of(tmp_path / "step-1") == _PAST


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model": {"vocab": 68}}, r"model.vocab=68 does not fit checkpoint .*; legal: 67"),
        ({"workload": {"optimizer": "sgd"}}, r"workload.optimizer='sgd' does not fit checkpoint .*; legal: 'adamw'"),
        ({"workload": {"precision": "fp32"}}, r"workload.precision='fp32' does not fit"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_by_the_field(
    change: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    path = tmp_path / "step-1"
    path.mkdir()
    checkpoints.write_about(path, parity_run("transformer", {}), 1, [])
    with pytest.raises(CheckpointError, match=sentence):
        steps_done(path, parity_run("transformer", {}, **change))


@pytest.mark.parametrize("content", [None, "", "[]", "{}", '{"format": 99}'])
def test_what_is_no_checkpoint_is_refused_in_a_sentence(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "checkpoint.json").write_text(content)
    with pytest.raises(CheckpointError, match="is no checkpoint"):
        steps_done(tmp_path, parity_run("transformer", {}))


def _cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("damage", [Path.unlink, _cut_short], ids=["lost", "cut short"])
def test_tensors_that_are_lost_or_cut_short_are_told_in_a_sentence(
    damage: Callable[[Path], Any], tmp_path: Path
) -> None:
    run = parity_run("transformer", {}, model={"layers": 1})
    _losses(run, tmp_path / "first", range(1), save=tmp_path)
    for file in (tmp_path / "step-1").glob("*.distcp"):
        damage(file)
    with pytest.raises(RuntimeError, match=r"checkpoint .*step-1 cannot be read"):
        _losses(run, tmp_path / "again", range(1, 2), load=tmp_path / "step-1")


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("true",)


@pytest.mark.parametrize("index", [pickle.dumps(_Evil()), b"", b"\x80\x04junk", pickle.dumps({"a": 1})])
def test_an_index_that_is_not_ours_runs_nothing(index: bytes, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(index)
    with pytest.raises(CheckpointError, match="is damaged or not ours"):
        checkpoint._Reader(tmp_path).read_metadata()


def test_the_unpickler_knows_no_class_that_could_do_harm() -> None:
    for module, name in (("os", "system"), ("builtins", "eval"), ("torch", "load"), ("subprocess", "Popen")):
        with pytest.raises(pickle.UnpicklingError):
            checkpoint._IndexUnpickler(io.BytesIO()).find_class(module, name)
