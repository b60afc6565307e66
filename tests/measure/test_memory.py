"""Bytes held by category, against bytes counted by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from hybridpar.comm.process_group import ProcessMesh
from hybridpar.launch.forked import preload
from hybridpar.measure.memory import HeldBytes, MemoryAccountant, storage_bytes
from hybridpar.parallel.clip import local_tensor
from hybridpar.parallel.engine import Parts
from hybridpar.parallel.recompute import saves_less
from hybridpar.specs import Strategy
from tests.comm.world import in_world

FLOAT = 4


def _held(module: nn.Module, step: Callable[[], object], optimizer: Sequence[Tensor] = ()) -> HeldBytes:
    def parts() -> Parts:
        return Parts(
            parameters=tuple(p.detach() for p in module.parameters()),
            gradients=tuple(p.grad for p in module.parameters() if p.grad is not None),
            optimizer=tuple(optimizer),
            buffers=tuple(module.buffers()),
        )

    accountant = MemoryAccountant(parts)
    with accountant:
        step()
    return accountant.peak()


class _Stack(nn.Module):
    """x (T, 6) -> relu(x W1) W2 -> (T, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10, bias=False)
        self.second = nn.Linear(10, 4, bias=False)
        self.register_buffer("offset", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(functional.relu(self.first(x))) + self.offset


def test_a_stack_holds_the_bytes_that_one_counts_by_hand() -> None:
    module = _Stack()
    tokens = 3
    x = torch.ones(tokens, 6)
    held = _held(module, lambda: module(x).sum().backward())
    weights = (6 * 10 + 10 * 4) * FLOAT
    assert held.parameters == weights
    assert held.gradients == weights
    assert held.optimizer == 0
    assert held.buffers == 4 * FLOAT
    # the input of the first product, and the output of relu, which the second product saves as well
    assert held.activations == (tokens * 6 + tokens * 10) * FLOAT


def test_views_of_one_storage_count_once() -> None:
    scale = nn.Parameter(torch.ones(4))
    module = nn.ParameterList([scale])
    x = torch.ones(8)

    def step() -> None:
        (x[:4] * scale + x[4:] * scale + x.view(2, 4)[1] * scale).sum().backward()

    assert _held(module, step).activations == 8 * FLOAT


def test_views_of_parameters_are_no_activations() -> None:
    module = nn.Linear(6, 10, bias=False)
    x = torch.ones(3, 6, requires_grad=True)
    held = _held(module, lambda: (x @ module.weight.t()[:, :5]).sum().backward())
    assert held.activations == 3 * 6 * FLOAT


def test_copies_of_parameters_in_another_format_are_activations() -> None:
    module = nn.Linear(6, 10, bias=False)
    x = torch.ones(3, 6, dtype=torch.float64)
    held = _held(module, lambda: functional.linear(x, module.weight.double()).sum().backward())
    assert held.activations == 3 * 6 * 8
    x.requires_grad_()
    held = _held(module, lambda: functional.linear(x, module.weight.double()).sum().backward())
    assert held.activations == (3 * 6 + 6 * 10) * 8


def test_micro_batches_in_flight_add_up_and_finished_ones_are_let_go() -> None:
    module = _Stack()
    one = 3 * (6 + 10) * FLOAT

    def in_flight(count: int) -> int:
        def step() -> None:
            outputs: list[Tensor] = []
            for _ in range(6):  # a pipeline with `count` micro-batches in flight
                outputs.append(module(torch.ones(3, 6)).sum())
                if len(outputs) == count:
                    outputs.pop(0).backward()
            for output in outputs:
                output.backward()

        return _held(module, step).activations

    assert [in_flight(count) for count in (1, 2, 4)] == [one, 2 * one, 4 * one]


def test_what_is_never_differentiated_is_let_go_with_its_graph() -> None:
    module = _Stack()

    def step() -> None:
        for _ in range(4):
            module(torch.ones(3, 6))

    assert _held(module, step).activations <= 2 * 3 * (6 + 10) * FLOAT


def test_nothing_is_saved_without_gradients() -> None:
    module = _Stack()

    def step() -> None:
        with torch.no_grad():
            module(torch.ones(3, 6))

    assert _held(module, step).activations == 0


def test_recomputed_blocks_keep_their_inputs_and_one_inside_at_a_time() -> None:
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 10, bias=False), nn.ReLU(), nn.Linear(10, 6)) for _ in range(3))
    x = torch.ones(3, 6, requires_grad=True)

    def step(recompute: bool) -> Callable[[], None]:
        def run() -> None:
            out = x
            for block in blocks:
                out = saves_less(block, out) if recompute else block(out)
            out.sum().backward()

        return run

    assert _held(blocks, step(recompute=False)).activations == 3 * (3 * 6 + 3 * 10) * FLOAT
    assert _held(blocks, step(recompute=True)).activations == (3 * 3 * 6 + 3 * 10) * FLOAT


def test_the_step_computes_what_it_computes_unobserved() -> None:
    torch.manual_seed(0)
    module = _Stack()
    x = torch.randn(3, 6)
    module(x).square().sum().backward()
    expected = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    module.zero_grad()
    _held(module, lambda: module(x).square().sum().backward())
    assert all(torch.equal(p.grad, grad) for p, grad in zip(module.parameters(), expected, strict=True))


def test_storages_count_once_and_empty_tensors_not_at_all() -> None:
    x = torch.ones(6)
    assert storage_bytes([x, x[2:], x.view(2, 3), torch.empty(0)]) == 6 * FLOAT


def test_sharded_parameters_count_whole_while_they_are_gathered() -> None:
    preload()

    def body(mesh: ProcessMesh) -> tuple[HeldBytes, HeldBytes]:
        def stepped(reshard: bool) -> HeldBytes:
            module = nn.Sequential(nn.Linear(5, 3, bias=False), nn.Linear(3, 4, bias=False))
            for layer in module:
                fully_shard(layer, mesh=mesh.device_mesh["dp"], reshard_after_forward=reshard)

            def parts() -> Parts:
                return Parts(
                    parameters=tuple(local_tensor(p.detach()) for p in module.parameters()),
                    gradients=tuple(local_tensor(p.grad) for p in module.parameters() if p.grad is not None),
                    optimizer=(),
                    buffers=(),
                )

            accountant = MemoryAccountant(parts)
            with accountant:
                module(torch.ones(2, 5)).sum().backward()
            return accountant.peak()

        return stepped(reshard=True), stepped(reshard=False)

    shards, first, second = (2 * 5 + 2 * 3) * FLOAT, 4 * 5 * FLOAT, 4 * 3 * FLOAT  # 3 rows are stored as 2 + 2
    for resharded, kept in in_world(Strategy(dp=2), body):
        assert resharded.parameters == shards + max(first, second)
        assert kept.parameters == shards + first + second
        assert resharded.gradients == kept.gradients
        assert resharded.activations == kept.activations == (2 * 5 + 2 * 3) * FLOAT
