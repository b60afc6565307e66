"""One run and batches of runs: every end is a row, nothing finished is lost, nothing is done twice."""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from hybridpar.events import read_all_events, read_events
from hybridpar.launch import batch
from hybridpar.launch.batch import run_batch, run_one
from hybridpar.launch.folder import LaunchError, RunFolder
from hybridpar.specs import RunSpec, parse_run_spec
from tests.launch import doubles
from tests.launch.doubles import Fault, toy_run
from tests.launch.processes import lives, wait_for

WithFault = Callable[[Fault], None]
CONTRACT_KEYS = {
    *("schema", "run_id", "outcome", "reason", "evidence", "testbed", "tier", "model", "family", "strategy", "engine"),
    *(
        "world",
        "loss",
        "grad_norm",
        "step_time_s",
        "ttft_s",
        "tpot_s",
        "tokens_per_s",
        "mfu",
        "model_flops_per_step",
        "flop_convention",
    ),
    *("peak_flops_per_s", "parameters", "peak_bytes", "comm", "wall_s", "started_at", "attempt", "repeat", "seed"),
}


def test_a_finished_run_leaves_its_files_and_its_numbers(tmp_path: Path, text: Path, with_fault: WithFault) -> None:
    with_fault(doubles.sound)
    run = toy_run(text)
    result = run_one(run, tmp_path / "run")
    assert (result["outcome"], result["reason"], result["evidence"]) == ("ok", "", [])
    assert result["loss"] == [5.5, 5.5 / 2, 5.5 / 3]
    assert result["grad_norm"] == [2.0, 2.0, 2.0]
    assert result["step_time_s"]["n"] == 2, "the warm-up step is left out"
    assert result["step_time_s"]["min"] <= result["step_time_s"]["median"] <= result["step_time_s"]["max"]
    assert result["tokens_per_s"] == run.tokens_per_step / result["step_time_s"]["median"]
    assert 0 < result["wall_s"]["start_up"] < result["wall_s"]["total"]
    assert result["testbed"] == "local-cpu"
    assert set(result) == CONTRACT_KEYS
    assert json.loads((tmp_path / "run/result.json").read_text()) == result
    assert parse_run_spec(json.loads((tmp_path / "run/spec.json").read_text())) == run
    assert json.loads((tmp_path / "run/environment.json").read_text())["testbed"] == "local-cpu"
    for rank in range(2):
        kinds = [event["kind"] for event in read_events(tmp_path / f"run/events-{rank}.jsonl")]
        assert kinds[0] == "start"
        assert kinds[-1] == "end"
        assert kinds.count("step") == 3
        assert kinds.count("memory") == 1


def test_a_rank_that_raises_is_a_crash_with_its_words(tmp_path: Path, text: Path, with_fault: WithFault) -> None:
    with_fault(doubles.raises)
    result = run_one(toy_run(text), tmp_path)
    assert result["outcome"] == "crash"
    assert result["reason"] == "rank 1: ValueError: the weights went for a walk"
    assert "last sign of rank 1: phase train, steps done: 1" in result["evidence"]
    assert any("doubles.py" in piece for piece in result["evidence"])
    assert set(result) == CONTRACT_KEYS
    assert result["loss"] is None
    assert result["step_time_s"] is None


def test_a_rank_killed_by_force_is_a_crash_at_once(tmp_path: Path, text: Path, with_fault: WithFault) -> None:
    with_fault(doubles.killed)
    result = run_one(toy_run(text), tmp_path)
    assert (result["outcome"], result["reason"]) == ("crash", "rank 1 was ended by signal 9 (SIGKILL)")
    last_sign = read_events(tmp_path / "events-1.jsonl")[-1]["t"]
    ended = result["started_at"] + result["wall_s"]["total"]
    assert ended - last_sign < 4


def test_a_hang_is_a_timeout_with_stacks(tmp_path: Path, text: Path, with_fault: WithFault) -> None:
    with_fault(doubles.hangs)
    result = run_one(toy_run(text, deadline_s=4.0), tmp_path)
    assert result["outcome"] == "timeout"
    assert "cluster.deadline_s=4 s" in result["reason"]
    stacks = "\n".join(result["evidence"])
    assert "in hangs" in stacks, "the rank at fault tells where it slept"
    assert "in all_reduce" in stacks, "its victim tells that it waited"
    assert 4.0 <= result["wall_s"]["total"] < 12


def test_memory_that_cannot_be_had_is_oom(tmp_path: Path, text: Path, with_fault: WithFault) -> None:
    with_fault(doubles.out_of_memory)
    result = run_one(toy_run(text), tmp_path)
    assert result["outcome"] == "oom"
    assert "rank 1" in result["reason"]
    assert "allocate" in result["reason"]


def test_a_loss_that_is_no_number_is_a_crash_that_names_the_step(
    tmp_path: Path, text: Path, with_fault: WithFault, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_fault(doubles.sound)
    monkeypatch.setattr(doubles, "LARGEST_LOSS", float("nan"))
    result = run_one(toy_run(text), tmp_path)
    assert result["outcome"] == "crash"
    assert "loss is nan at step 0" in result["reason"]


def test_an_illegal_run_is_a_row_that_starts_nothing(tmp_path: Path, text: Path) -> None:
    result = run_one(toy_run(text, dp=3), tmp_path)
    assert result["outcome"] == "infeasible"
    assert "strategy.dp=3: does not divide workload.global_batch=8" in result["reason"]
    assert set(result) == CONTRACT_KEYS
    assert result["wall_s"] is None
    assert not list(tmp_path.glob("events-*"))


def test_data_that_cannot_be_had_is_a_row(tmp_path: Path, with_fault: WithFault) -> None:
    with_fault(doubles.sound)
    result = run_one(toy_run(tmp_path / "nowhere.txt"), tmp_path / "run")
    assert result["outcome"] == "crash"
    assert "nowhere.txt" in result["reason"]


def test_one_bad_run_does_not_lose_the_others(tmp_path: Path, text: Path, with_fault: WithFault) -> None:
    with_fault(doubles.killed)  # rank 1, which dp=1 does not have
    told: list[str] = []
    runs = [toy_run(text, dp=dp) for dp in (1, 2, 3, 1)]
    results = run_batch(runs, tmp_path, progress=told.append)
    assert [result["outcome"] for result in results] == ["ok", "crash", "infeasible", "ok"]
    assert [result["run_id"] for result in results] == [run.run_id for run in runs]
    assert any("tried again" in line for line in told)
    assert any(line.startswith("[2/4] llama-toy dp2: crash: ") and "s left" in line for line in told)
    assert results[1]["attempt"] == 2
    assert any(piece.startswith("attempt 1 ended crash: ") for piece in results[1]["evidence"])


def test_a_second_batch_runs_only_what_is_missing_torn_or_foreign(
    tmp_path: Path, text: Path, with_fault: WithFault
) -> None:
    with_fault(doubles.sound)
    runs = [toy_run(text, dp=1, seed=seed) for seed in range(4)]
    first = run_batch(runs, tmp_path, progress=lambda line: None)
    torn, foreign = (tmp_path / runs[index].run_id / "result.json" for index in (1, 2))
    torn.write_bytes(torn.read_bytes()[:-40])
    foreign.write_text(json.dumps({**first[2], "run_id": "0" * 16}))
    told: list[str] = []
    second = run_batch(runs, tmp_path, progress=told.append)
    assert [result["outcome"] for result in second] == ["ok"] * 4
    assert [": kept (" in line for line in told] == [True, False, False, True]
    assert (second[0], second[3]) == (first[0], first[3])
    assert second[1]["started_at"] > first[3]["started_at"]


def test_tries_are_counted_over_calls(tmp_path: Path, text: Path, with_fault: WithFault) -> None:
    with_fault(doubles.raises)
    run = toy_run(text)
    (first,) = run_batch([run], tmp_path, retries=0)
    (second,) = run_batch([run], tmp_path, retries=0)
    assert first == second
    (third,) = run_batch([run], tmp_path, retries=1)
    assert (third["attempt"], third["outcome"]) == (2, "crash")
    with_fault(doubles.sound)
    (fourth,) = run_batch([run], tmp_path, retries=1)
    assert fourth == third


def test_the_ceiling_is_measured_once_a_batch_and_precision_in_a_process_of_its_own(
    tmp_path: Path, text: Path, with_fault: WithFault, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_fault(doubles.sound)

    def measure(device: str, precision: str) -> float:
        with (tmp_path / "measured").open("a") as file:
            file.write(f"{device} {precision} {os.getpid()}\n")
        return 2e9

    monkeypatch.setattr(batch, "_measure", measure)
    run = toy_run(text, dp=1)
    double = run.model_copy(update={"workload": run.workload.model_copy(update={"precision": "fp64"})})
    results = run_batch([run, toy_run(text, dp=1, seed=1), double], tmp_path)
    lines = [line.split() for line in (tmp_path / "measured").read_text().splitlines()]
    assert [(device, precision) for device, precision, _ in lines] == [("cpu", "fp32"), ("cpu", "fp64")]
    assert str(os.getpid()) not in {process for _, _, process in lines}
    assert [result["peak_flops_per_s"] for result in results] == [2e9] * 3
    told = json.loads((tmp_path / run.run_id / "environment.json").read_text())["peak_flops"]
    assert told["measured_flops_per_s_per_core"] == 2e9
    assert "cores share them" in told["note"]


def test_force_runs_again_and_leaves_nothing_of_the_first(tmp_path: Path, text: Path, with_fault: WithFault) -> None:
    with_fault(doubles.sound)
    first = run_one(toy_run(text, dp=4), tmp_path)
    assert run_one(toy_run(text, dp=4), tmp_path) == first
    assert run_one(toy_run(text, dp=4), tmp_path, force=True)["started_at"] > first["started_at"]
    run_one(toy_run(text, dp=1), tmp_path)
    assert [path.name for path in tmp_path.glob("events-*")] == ["events-0.jsonl"]


def test_a_folder_that_cannot_be_used_is_one_sentence(tmp_path: Path, text: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LaunchError, match=r"file cannot be used: (File exists|Not a directory)"):
        run_one(toy_run(text), tmp_path / "file")
    with pytest.raises(LaunchError, match="cannot be used: Not a directory"):
        run_one(toy_run(text), tmp_path / "file" / "run")


def test_a_folder_that_cannot_be_used_does_not_stop_the_batch(
    tmp_path: Path, text: Path, with_fault: WithFault
) -> None:
    with_fault(doubles.sound)
    runs = [toy_run(text, dp=1, seed=seed) for seed in range(2)]
    (tmp_path / runs[0].run_id).write_text("")
    with pytest.raises(LaunchError, match="1 of 2 runs could not be kept"):
        run_batch(runs, tmp_path)
    assert json.loads((tmp_path / runs[1].run_id / "result.json").read_text())["outcome"] == "ok"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_is_one_sentence(tmp_path: Path, text: Path) -> None:
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with pytest.raises(LaunchError, match="Permission denied"):
        run_one(toy_run(text), tmp_path / "run")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_sentence_and_leaves_no_torn_result(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".spec.json.tmp").symlink_to("/dev/full")
    monkeypatch.setattr(RunFolder, "clear", lambda self: None)
    with pytest.raises(LaunchError, match="No space left on device"):
        run_one(toy_run(text), tmp_path)
    assert not (tmp_path / "spec.json").exists()


def test_two_launchers_never_share_a_folder(tmp_path: Path, text: Path) -> None:
    with RunFolder(tmp_path).locked(wait=False), pytest.raises(LaunchError, match="in use by another launcher"):
        run_one(toy_run(text), tmp_path)


def _launcher(runs: Sequence[RunSpec], folder: Path, lines: Path) -> BaseProcess:
    """A process that runs a batch, forked from this warm one; it writes what it tells to `lines`."""

    def work() -> None:
        with lines.open("w", buffering=1) as file:
            try:
                run_batch(runs, folder, progress=lambda line: print(line, file=file))
            except KeyboardInterrupt:
                sys.exit(130)

    launcher = get_context("fork").Process(target=work)
    launcher.start()
    return launcher


def _ranks_of(folder: Path, run: RunSpec) -> list[int]:
    return [
        event["pid"]
        for rank in range(run.strategy.devices)
        for event in read_events(folder / run.run_id / f"events-{rank}.jsonl")
        if event["kind"] == "start"
    ]


def _hang(folder: Path, run: RunSpec) -> bool:
    """Whether both ranks have passed the only step that they can pass."""
    told = read_all_events(folder / run.run_id, 2)
    return all(any(event["kind"] == "step" for event in events) for events in told)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_batch_that_is_ended_in_the_middle_goes_on_where_it_was(
    tmp_path: Path, text: Path, number: signal.Signals, with_fault: WithFault
) -> None:
    with_fault(doubles.hangs)  # rank 1, which the first run does not have
    runs = [toy_run(text, dp=dp) for dp in (1, 2, 4)]
    launcher = _launcher(runs, tmp_path, tmp_path / "lines")
    assert wait_for(lambda: _hang(tmp_path, runs[1]), 30)
    ranks = _ranks_of(tmp_path, runs[1])
    os.kill(launcher.pid, number)
    launcher.join(10)
    assert launcher.exitcode == (-signal.SIGKILL if number == signal.SIGKILL else 130)
    assert wait_for(lambda: not any(lives(rank) for rank in ranks), 2)
    finished = (tmp_path / runs[0].run_id / "result.json").read_bytes()
    assert not (tmp_path / runs[1].run_id / "result.json").exists()

    with_fault(doubles.sound)
    results = run_batch(runs, tmp_path)
    assert [result["outcome"] for result in results] == ["ok", "ok", "ok"]
    assert (tmp_path / runs[0].run_id / "result.json").read_bytes() == finished


def test_two_batches_at_once_share_the_work(tmp_path: Path, text: Path, with_fault: WithFault) -> None:
    with_fault(doubles.sound)
    runs = [toy_run(text, dp=dp) for dp in (1, 2, 4)]
    told = [tmp_path / "told-0", tmp_path / "told-1"]
    launchers = [_launcher(runs, tmp_path / "runs", lines) for lines in told]
    for launcher in launchers:
        launcher.join(60)
        assert launcher.exitcode == 0
    lines = [line for file in told for line in file.read_text().splitlines()]
    assert sum("s a step (" in line for line in lines) == 3, "each run was executed once"
    assert sum(": kept (" in line for line in lines) == 3, "and found done by the other"


def test_ranks_of_a_warm_parent_meet_in_under_a_second(tmp_path: Path, text: Path, with_fault: WithFault) -> None:
    with_fault(doubles.sound)
    results = [run_one(toy_run(text, dp=4, seed=seed), tmp_path / str(seed)) for seed in range(4)]
    assert [result["outcome"] for result in results] == ["ok"] * 4
    # the best of those after the first: what else the machine does must not decide
    assert min(result["wall_s"]["start_up"] for result in results[1:]) < 1.0
