"""The metered group counts every call exactly and computes what the plain one computes."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybridpar.comm.metered import CommRow, Meter, meter
from hybridpar.comm.process_group import ProcessMesh
from hybridpar.mesh import RankGrid
from hybridpar.specs import Strategy
from tests.comm.world import in_world

FOUR = Strategy(dp=4)


def counted(rows: list[CommRow]) -> dict[tuple[str, str, int], tuple[int, int, int]]:
    """(op, group, group size) -> (calls, bytes, wire bytes)."""
    return {(row.op, row.group, row.group_size): (row.calls, row.bytes, row.wire_bytes) for row in rows}


def _calls() -> dict[str, Callable[[], Any]]:
    """One call of each collective over four ranks; the whole tensor has 8 float32 elements, 32 bytes."""
    whole, quarter = torch.ones(8), torch.ones(2)
    return {
        "all_reduce": lambda: dist.all_reduce(whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "reduce": lambda: dist.reduce(whole, 0),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, quarter),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(quarter, whole),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty(8), whole),
        "gather": lambda: dist.gather(quarter, [torch.empty(2)] * 4 if dist.get_rank() == 0 else None),
        "scatter": lambda: dist.scatter(quarter, [torch.ones(2)] * 4 if dist.get_rank() == 0 else None),
        "barrier": lambda: dist.barrier(),
    }


def test_each_collective_is_one_call_of_its_bytes() -> None:
    def body(mesh: ProcessMesh) -> dict[str, Any]:
        seen = {}
        for name, call in _calls().items():
            meter().drain()
            call()
            seen[name] = counted(meter().drain())
        return seen

    for seen in in_world(FOUR, body):
        assert seen.pop("barrier") == {("barrier", "dp", 4): (1, 0, 0)}
        assert seen.pop("all_reduce") == {("all_reduce", "dp", 4): (1, 32, 48)}
        assert seen == {name: {(name, "dp", 4): (1, 32, 24)} for name in seen}


def test_lists_of_tensors_count_as_the_tensors() -> None:
    def body(mesh: ProcessMesh) -> Any:
        meter().drain()
        dist.all_gather([torch.empty(2) for _ in range(4)], torch.ones(2))
        dist.reduce_scatter(torch.empty(2), [torch.ones(2) for _ in range(4)])
        dist.all_to_all([torch.empty(2) for _ in range(4)], [torch.ones(2) for _ in range(4)])
        return counted(meter().drain())

    expected = {(op, "dp", 4): (1, 32, 24) for op in ("all_gather", "reduce_scatter", "all_to_all")}
    assert in_world(FOUR, body) == [expected] * 4


def test_a_message_counts_where_it_is_sent_and_belongs_to_the_axis_between_its_ends() -> None:
    def body(mesh: ProcessMesh) -> Any:
        meter().drain()
        other = (mesh.rank + 2) % 4  # same tp, other pp
        ops = [dist.P2POp(dist.isend, torch.ones(5), other), dist.P2POp(dist.irecv, torch.empty(5), other)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return counted(meter().drain())

    expected = {("send", "pp", 2): (1, 20, 20), ("recv", "pp", 2): (1, 20, 0)}
    assert in_world(Strategy(pp=2, tp=2), body) == [expected] * 4


def test_rows_tell_groups_apart() -> None:
    def body(mesh: ProcessMesh) -> Any:
        meter().drain()
        for axes in (("dp",), ("tp",), ("tp",), ("dp", "tp"), ("cp",)):
            dist.all_reduce(torch.ones(4), group=mesh.group(*axes))
        return counted(meter().drain())

    expected = {
        ("all_reduce", "dp", 2): (1, 16, 16),
        ("all_reduce", "tp", 2): (2, 32, 32),
        ("all_reduce", "dp+tp", 4): (1, 16, 24),
    }
    assert in_world(Strategy(dp=2, tp=2), body) == [expected] * 4


@pytest.mark.parametrize(
    ("ranks", "label"),
    [
        ((0, 1), "tp"),
        ((0, 2), "dp"),
        ((0, 4), "pp"),
        ((0, 1, 2, 3), "dp+tp"),
        ((1, 3, 5, 7), "pp+dp"),
        (tuple(range(8)), "pp+dp+tp"),
    ],
)
def test_a_group_is_named_by_the_axes_on_which_its_ranks_differ(ranks: tuple[int, ...], label: str) -> None:
    assert RankGrid(pp=2, dp=2, cp=1, tp=2).label(ranks) == label


def test_paused_traffic_and_drained_traffic_do_not_count() -> None:
    def body(mesh: ProcessMesh) -> Any:
        meter().drain()
        with meter().paused():
            dist.all_reduce(torch.ones(4))
        dist.all_reduce(torch.ones(4))
        return len(meter().drain()), len(meter().drain())

    assert in_world(Strategy(dp=2), body) == [(1, 0)] * 2


def test_no_call_is_lost_among_threads_and_a_call_costs_microseconds() -> None:
    collecting, drained, eight_bytes = Meter(), [], torch.ones(2)
    threads = [
        Thread(target=lambda: [collecting.begin("all_reduce", (0, 1), [eight_bytes]) for _ in range(2000)])
        for _ in range(4)
    ]
    start = time.process_time()
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        drained += collecting.drain()
        time.sleep(1e-3)
    drained += collecting.drain()
    spent = time.process_time() - start
    assert sum(row.calls for row in drained) == 8000
    assert sum(row.bytes for row in drained) == 64000
    assert spent / 8000 < 100e-6


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("operation", ["SUM", "AVG", "MAX", "MIN"])
def test_reduce_scatter_is_the_own_part_of_an_all_reduce(operation: str, dtype: torch.dtype) -> None:
    def body(mesh: ProcessMesh) -> bool:
        # sums of small whole numbers are exact in every format
        whole = ((torch.arange(12) * 7 + mesh.rank * 5) % 8).to(dtype).view(3 * 4, 1)
        reduced = whole.clone()
        dist.all_reduce(reduced, getattr(dist.ReduceOp, "SUM" if operation == "AVG" else operation))
        expected = (reduced / 4 if operation == "AVG" else reduced).chunk(4)[mesh.rank]
        own = torch.empty(3, 1, dtype=dtype)
        dist.reduce_scatter_tensor(own, whole, getattr(dist.ReduceOp, operation))
        return torch.equal(own, expected)

    assert all(in_world(FOUR, body))


def test_reduce_scatter_of_uneven_parts() -> None:
    sizes = (3, 0, 5, 2)

    def body(mesh: ProcessMesh) -> Any:
        meter().drain()
        parts = [torch.full((size,), float(10 * owner + mesh.rank)) for owner, size in enumerate(sizes)]
        own = torch.empty(sizes[mesh.rank])
        dist.reduce_scatter(own, parts)
        return own.tolist(), counted(meter().drain())

    for rank, (own, rows) in enumerate(in_world(FOUR, body)):
        assert own == [40.0 * rank + 6] * sizes[rank]
        assert rows == {("reduce_scatter", "dp", 4): (1, 40, 30)}


def test_reduce_scatter_refuses_what_it_does_not_know() -> None:
    def body(mesh: ProcessMesh) -> str:
        with pytest.raises(NotImplementedError) as refused:
            dist.reduce_scatter_tensor(torch.empty(1), torch.ones(2), dist.ReduceOp.BAND)
        return str(refused.value)

    assert "SUM, AVG, MAX or MIN" in in_world(Strategy(dp=2), body)[0]


def test_works_and_futures_wait_for_the_result() -> None:
    def body(mesh: ProcessMesh) -> list[float]:
        first, second, third = torch.ones(2), torch.ones(1), torch.ones(2)
        dist.all_reduce(first, async_op=True).wait()
        dist.reduce_scatter_tensor(second, third, async_op=True).get_future().wait()
        return [first[0].item(), second.item()]

    assert in_world(Strategy(dp=2), body) == [[2.0, 2.0]] * 2


def test_exposed_time_is_that_of_waiting_and_seconds_end_with_the_transfer() -> None:
    def body(mesh: ProcessMesh) -> tuple[CommRow, CommRow]:
        dist.barrier()
        meter().drain()
        work = dist.all_reduce(torch.ones(4), async_op=True)
        time.sleep(0.5)  # the transfer ends meanwhile
        work.wait()
        behind_work = meter().drain()[0]
        if mesh.rank == 0:
            time.sleep(0.5)
        dist.all_reduce(torch.ones(4))  # rank 1 waits for rank 0
        return behind_work, meter().drain()[0]

    ranks = in_world(Strategy(dp=2), body)
    for behind_work, _ in ranks:
        assert behind_work.seconds < 0.4
        assert behind_work.exposed_seconds < 0.1
    waited = ranks[1][1]
    assert 0.3 < waited.exposed_seconds <= waited.seconds < 1.5
