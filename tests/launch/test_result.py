"""Who failed first decides the outcome; numbers are maxima over ranks in time and memory, means in communication."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from hybridpar.events import Event
from hybridpar.launch.forked import RankExit
from hybridpar.launch.result import Circumstances, assemble, is_result, outcome_of
from tests.launch.doubles import toy_run

RUN = toy_run(Path("any.txt"), dp=2, steps=3)
OK = {"exit_code": 0, "signal": None}
FAILED = {"exit_code": 1, "signal": None}
VICTIM = {"exit_code": None, "signal": 9, "killed_by_launcher": True}


def _exit(rank: int, **fields: Any) -> RankExit:
    return RankExit(**{"rank": rank, "killed_by_launcher": False, "log_tail": "", "stacks": "", **fields})


def _event(kind: str, t: float = 0.0, **fields: Any) -> Event:
    return {"t": t, "rank": 0, "kind": kind, **fields}


def _error(name: str, message: str, t: float) -> Event:
    return _event("error", t, type=name, message=message, traceback=f"Traceback\n{name}: {message}")


def _steps(seconds: list[float]) -> list[Event]:
    return [
        _event("step", 2.0 + step, step=step, loss=5.0 - step, grad_norm=1.0, seconds=value, warmup=step == 0)
        for step, value in enumerate(seconds)
    ]


def _comm(step: int, op: str, calls: int, size: int) -> Event:
    group = {"group": "dp", "group_size": 2}
    times = {"seconds": 0.5, "exposed_seconds": 0.25}
    return _event("comm", 4.0, step=step, op=op, calls=calls, bytes=size, wire_bytes=size, **group, **times)


def test_the_first_error_is_the_cause_and_those_who_lost_a_peer_are_not() -> None:
    events = [[_error("RuntimeError", "Connection closed by peer", 2.0)], [_error("KeyError", "wq", 1.9)]]
    outcome = outcome_of(RUN, [_exit(0, **FAILED), _exit(1, **FAILED)], events, oom_kills=0)
    assert (outcome.kind, outcome.reason) == ("crash", "rank 1: KeyError: wq")


def test_a_killed_rank_is_the_cause_though_its_peers_complained_before_it_was_seen() -> None:
    events = [[_error("RuntimeError", "Connection closed by peer", 1.0)], []]
    exits = [_exit(0, **FAILED, ended_at=1.1), _exit(1, exit_code=None, signal=signal.SIGKILL, ended_at=1.2)]
    outcome = outcome_of(RUN, exits, events, oom_kills=0)
    assert (outcome.kind, outcome.reason) == ("crash", "rank 1 was ended by signal 9 (SIGKILL)")


def test_a_kill_by_the_kernel_for_want_of_memory_is_oom() -> None:
    exits = [_exit(0, **VICTIM), _exit(1, exit_code=None, signal=signal.SIGKILL)]
    outcome = outcome_of(RUN, exits, [[], []], oom_kills=1)
    assert (outcome.kind, outcome.reason) == ("oom", "the kernel ended rank 1 for want of memory")
    assert any("out-of-memory kills during the run: 1" in piece for piece in outcome.evidence)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 20.00 GiB"),
        ("MemoryError", ""),
        ("RuntimeError", "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
    ],
)
def test_errors_of_allocators_are_oom(name: str, message: str) -> None:
    outcome = outcome_of(RUN, [_exit(0, **FAILED), _exit(1, **VICTIM)], [[_error(name, message, 1.0)], []], 0)
    assert outcome.kind == "oom"
    assert name in outcome.reason


def test_ranks_that_all_had_to_be_ended_are_a_timeout() -> None:
    exits = [_exit(0, **VICTIM, stacks="in all_reduce"), _exit(1, **VICTIM, stacks="in sleep")]
    events = [[_event("phase", name="train"), *_steps([1.0])], [_event("phase", name="train")]]
    outcome = outcome_of(RUN, exits, events, 0)
    assert outcome.kind == "timeout"
    assert "cluster.deadline_s=60 s" in outcome.reason
    assert "last sign of rank 1: phase train, steps done: 0" in outcome.evidence
    assert "stacks of rank 1:\nin sleep" in outcome.evidence


def test_a_rank_that_left_without_a_word_tells_its_exit_code_and_last_line() -> None:
    outcome = outcome_of(
        RUN, [_exit(0, exit_code=3, signal=None, log_tail="a\nlast words\n"), _exit(1, **OK)], [[], []], 0
    )
    assert outcome.reason == "rank 0 left with exit code 3: last words"


def test_leaving_early_with_code_zero_is_no_success() -> None:
    done = [*_steps([1, 1, 1]), _event("end")]
    outcome = outcome_of(RUN, [_exit(0, **OK), _exit(1, **OK)], [done, done[:2]], 0)
    assert (outcome.kind, outcome.reason) == ("crash", "ranks 1 left before their work was done")


def _finished() -> dict[str, Any]:
    memory = {"gradients": 10, "optimizer": 20, "activations": 5, "buffers": 0, "host": 7, "cache": 0}
    first = [
        _event("phase", 1.0, name="build"),
        _event("model", parameters=1000),
        _event("memory", parameters=10, **memory),
        *_steps([9.0, 1.0, 2.0]),
        *(_comm(step, "all_reduce", 2, 100) for step in (1, 2)),
        _event("end", 6.0),
    ]
    second = [
        _event("phase", 1.5, name="build"),
        _event("memory", parameters=30, **(memory | {"optimizer": 1})),
        *_steps([9.0, 1.5, 1.0]),
        *(_comm(step, "all_reduce", 4, 300) for step in (1, 2)),
        _event("end", 6.5),
    ]
    circumstances = Circumstances(
        testbed="local-cpu", peak_flops_per_s=1e9, started_at=0.5, total_s=7.0, attempt=1, earlier=()
    )
    return assemble(RUN, [_exit(0, **OK), _exit(1, **OK)], [first, second], circumstances)


def test_step_time_is_of_the_slowest_rank_without_warm_up() -> None:
    result = _finished()
    assert result["step_time_s"] == {"median": 1.75, "min": 1.5, "max": 2.0, "n": 2}
    assert result["tokens_per_s"] == RUN.tokens_per_step / 1.75
    assert result["mfu"] == pytest.approx(result["model_flops_per_step"] / 1.75 / 1e9)


def test_memory_is_of_the_fullest_rank() -> None:
    peak = _finished()["peak_bytes"]
    total = peak.pop("total")
    assert peak == {
        "parameters": 30,
        "gradients": 10,
        "optimizer": 20,
        "activations": 5,
        "buffers": 0,
        "host": 7,
        "cache": 0,
    }
    assert total == 46, "of rank 1, not the sum of the maxima"


def test_communication_is_per_timed_step_and_mean_over_ranks() -> None:
    (row,) = _finished()["comm"]
    assert (row["op"], row["group"], row["group_size"]) == ("all_reduce", "dp", 2)
    assert (row["calls"], row["bytes"], row["wire_bytes"]) == (3.0, 200.0, 200.0)
    assert (row["seconds"], row["exposed_seconds"]) == (0.5, 0.25)


def test_wall_time_is_split_where_the_last_rank_has_joined() -> None:
    assert _finished()["wall_s"] == {"start_up": 1.0, "training": 5.0, "total": 7.0}


def test_a_result_is_whole_or_none() -> None:
    result = _finished()
    assert is_result(result, RUN.run_id)
    assert not is_result(result, "0" * 16)
    assert not is_result({key: value for key, value in result.items() if key != "comm"}, RUN.run_id)
    assert not is_result({**result, "outcome": "fine"}, RUN.run_id)
    assert not is_result([result], RUN.run_id)
