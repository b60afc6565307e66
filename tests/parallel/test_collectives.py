"""The borders of a tensor-parallel region: values and gradients against the same sum on one device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hybridpar.comm.metered import meter
from hybridpar.comm.process_group import ProcessMesh
from hybridpar.parallel.collectives import TensorRegion, sum_in_place
from hybridpar.specs import Strategy
from tests.parallel.ranks import on_ranks

RANKS, SHAPE = 2, (3, 4, 5)


def _inputs(rank: int) -> torch.Tensor:
    return torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def _weight(rank: int) -> torch.Tensor:
    return _inputs(10 + rank)


def _enter_and_leave(mesh: ProcessMesh, *, sequence_parallel: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """out = leave(enter(x) * w_rank), loss = sum(out^2); the output and the gradient of x."""
    region = TensorRegion(mesh.group("tp"), sequence_parallel=sequence_parallel)
    x = _inputs(0)
    if sequence_parallel:
        x = x.chunk(RANKS, dim=1)[mesh.coordinate.tp].contiguous()
    x.requires_grad_()
    out = region.leave(region.enter(x) * _weight(mesh.coordinate.tp))
    out.square().sum().backward()
    assert x.grad is not None
    return out.detach(), x.grad


def _on_one_device() -> tuple[torch.Tensor, torch.Tensor]:
    x = _inputs(0).requires_grad_()
    out = sum(x * _weight(rank) for rank in range(RANKS))
    assert isinstance(out, torch.Tensor)
    out.square().sum().backward()
    assert x.grad is not None
    return out.detach(), x.grad


def test_whole_activations_enter_and_leave(tmp_path: Path) -> None:
    # The expectation is computed in the ranks as well: a process that ran autograd cannot fork where GPUs exist.
    def body(mesh: ProcessMesh) -> tuple[torch.Tensor, ...]:
        return *_enter_and_leave(mesh, sequence_parallel=False), *_on_one_device()

    for out, grad, expected_out, expected_grad in on_ranks(Strategy(tp=RANKS), tmp_path, body):
        torch.testing.assert_close(out, expected_out, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(grad, expected_grad, rtol=1e-12, atol=1e-12)


def test_shards_of_the_sequence_enter_and_leave(tmp_path: Path) -> None:
    def body(mesh: ProcessMesh) -> tuple[torch.Tensor, ...]:
        return *_enter_and_leave(mesh, sequence_parallel=True), *_on_one_device()

    found = on_ranks(Strategy(tp=RANKS), tmp_path, body)
    _, _, expected_out, expected_grad = found[0]
    torch.testing.assert_close(torch.cat([part[0] for part in found], dim=1), expected_out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat([part[1] for part in found], dim=1), expected_grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shapes", [[(2, 3), (4,)], [(1,), (2, 2, 2), (3,)]])
def test_several_tensors_are_summed_by_one_all_reduce(tmp_path: Path, shapes: list[tuple[int, ...]]) -> None:
    def body(mesh: ProcessMesh) -> tuple[list[torch.Tensor], int]:
        meter().drain()
        tensors = [torch.full(shape, float(mesh.rank + 1)) for shape in shapes]
        sum_in_place(tensors, mesh.group("tp"))
        return tensors, sum(row.calls for row in meter().drain())

    for tensors, calls in on_ranks(Strategy(tp=RANKS), tmp_path, body):
        assert calls == 1
        assert all(torch.equal(tensor, torch.full(shape, 3.0)) for tensor, shape in zip(tensors, shapes, strict=True))
