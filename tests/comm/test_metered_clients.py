"""Nobody passes the meter unseen: the traffic of each client is exactly what its algorithm must send."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from hybridpar.comm.metered import meter
from hybridpar.comm.process_group import ProcessMesh
from hybridpar.launch.forked import preload
from hybridpar.specs import Strategy
from tests.comm.test_metered import counted
from tests.comm.world import in_world

TWO = Strategy(dp=2)
FLOAT = 4


def _layers() -> nn.Sequential:
    """(3, 5) and (4, 3) weights: 27 parameters, dim 0 of the first does not divide by two."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 3, bias=False), nn.Linear(3, 4, bias=False))


def test_ddp_all_reduces_each_gradient_once() -> None:
    def body(mesh: ProcessMesh) -> Any:
        module = DistributedDataParallel(_layers(), process_group=mesh.group("dp"))
        for _ in range(3):  # after the first step the order of the gradients is agreed on
            module.zero_grad()
            meter().drain()
            module(torch.full((2, 5), float(mesh.rank))).sum().backward()
        (row,) = meter().drain()
        gradient = module.module[0].weight.grad
        assert gradient is not None
        return counted([row]), row.seconds, row.exposed_seconds, gradient.sum().item()

    alone = _layers()
    (sum(alone(torch.full((2, 5), float(rank))).sum() for rank in range(2)) / 2).backward()  # type: ignore[union-attr]
    assert alone[0].weight.grad is not None
    for rows, seconds, exposed, gradient in in_world(TWO, body):
        assert rows == {("all_reduce", "dp", 2): (1, 27 * FLOAT, 27 * FLOAT)}
        assert 0 < exposed <= seconds
        assert torch.isclose(torch.tensor(gradient), alone[0].weight.grad.sum())


def test_fsdp2_gathers_padded_parameters_and_scatters_padded_gradients() -> None:
    def body(mesh: ProcessMesh) -> Any:
        module = _layers()
        for layer in module:
            fully_shard(layer, mesh=mesh.device_mesh["dp"], reshard_after_forward=True)
        fully_shard(module, mesh=mesh.device_mesh["dp"])
        module(torch.ones(2, 5)).sum().backward()
        meter().drain()
        module(torch.ones(2, 5)).sum().backward()
        return counted(meter().drain())

    padded = (4 * 5 + 4 * 3) * FLOAT  # 3 rows over two ranks are stored as 2 + 2
    for rows in in_world(TWO, body):
        # gathered for the forward and again for the backward
        assert rows == {
            ("all_gather", "dp", 2): (4, 2 * padded, padded),
            ("reduce_scatter", "dp", 2): (2, padded, padded // 2),
        }


def test_functional_collectives() -> None:
    def body(mesh: ProcessMesh) -> Any:
        group = mesh.group("dp")
        meter().drain()
        whole, half = torch.ones(6), torch.ones(3)
        results = [
            funcol.all_reduce(whole, "sum", group),
            funcol.all_gather_tensor(half, 0, group),
            funcol.reduce_scatter_tensor(whole, "sum", 0, group),
            funcol.all_to_all_single(whole, None, None, group),
            funcol.broadcast(whole, 0, group),
        ]
        results = [funcol.wait_tensor(result) for result in results]
        return [result.sum().item() for result in results], counted(meter().drain())

    whole = 6 * FLOAT
    for sums, rows in in_world(TWO, body):
        assert sums == [12, 6, 6, 6, 6]
        assert rows == {
            ("all_reduce", "dp", 2): (1, whole, whole),
            **{(op, "dp", 2): (1, whole, whole // 2) for op in ("all_gather", "reduce_scatter", "all_to_all")},
            ("broadcast", "dp", 2): (1, whole, whole // 2),
        }


def test_pipeline_stages_pass_each_micro_batch_forward_and_its_gradient_back() -> None:
    micro_batches, rows_each, width = 3, 2, 5

    def body(mesh: ProcessMesh) -> Any:
        torch.manual_seed(mesh.rank)
        stage = PipelineStage(
            nn.Linear(width, width),
            mesh.coordinate.pp,
            2,
            torch.device("cpu"),
            input_args=(torch.empty(rows_each, width, requires_grad=True),),
            output_args=(torch.empty(rows_each, width, requires_grad=True),),
            group=mesh.group("pp"),
        )
        schedule = Schedule1F1B(stage, micro_batches, loss_fn=lambda out, target: mse_loss(out, target))
        batch = torch.ones(micro_batches * rows_each, width)
        for _ in range(2):
            meter().drain()
            if mesh.coordinate.pp == 0:
                schedule.step(batch)
            else:
                schedule.step(target=batch)
        return counted(meter().drain())

    messages = (micro_batches, micro_batches * rows_each * width * FLOAT)
    for rows in in_world(Strategy(pp=2), body):
        assert rows == {("send", "pp", 2): (*messages, messages[1]), ("recv", "pp", 2): (*messages, 0)}


def test_zero1_of_torch_broadcasts_each_updated_parameter() -> None:
    def body(mesh: ProcessMesh) -> Any:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        module = _layers()
        optimizer = ZeroRedundancyOptimizer(
            module.parameters(), torch.optim.AdamW, process_group=mesh.group("dp"), lr=1e-3
        )
        module(torch.ones(2, 5)).sum().backward()
        meter().drain()
        optimizer.step()
        return counted(meter().drain())

    for rows in in_world(TWO, body):
        assert {op: size for (op, _, _), (_, size, _) in rows.items()} == {"broadcast": 27 * FLOAT}


def test_zero1_of_deepspeed_reduces_gradients_and_gathers_padded_parameters() -> None:
    preload(deepspeed=True)
    config = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    }

    def body(mesh: ProcessMesh) -> Any:
        import deepspeed

        os.environ["LOCAL_RANK"] = str(mesh.rank)
        for kernel in deepspeed.ops.__compatible_ops__:  # no C++ is compiled for a test
            deepspeed.ops.__compatible_ops__[kernel] = False
        module = _layers()
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config, dist_init_required=False)
        for _ in range(2):
            meter().drain()
            engine.backward(engine(torch.ones(2, 5)).sum())
            backward = counted(meter().drain())
            engine.step()
        return backward, counted(meter().drain())

    for backward, step in in_world(TWO, body):
        assert backward == {("all_reduce", "dp", 2): (1, 27 * FLOAT, 27 * FLOAT)}
        assert step == {
            ("all_gather", "dp", 2): (1, 28 * FLOAT, 14 * FLOAT),
            ("all_reduce", "dp", 2): (1, FLOAT, FLOAT),  # the gradient's norm
        }
