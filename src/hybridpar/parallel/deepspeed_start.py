"""DeepSpeed made ready in a rank that has joined its process group already."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
import torch.distributed as dist

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import deepspeed.ops
from deepspeed.utils import logger

from hybridpar.comm.process_group import ProcessMesh

# On CPUs DeepSpeed compiles a shared-memory all-reduce at its first start (half a minute, under a lock file that a
# killed process leaves behind), and sends through it instead of through the process group, unseen by the meter.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
logger.setLevel(logging.WARNING)


def adopt_process_group(mesh: ProcessMesh) -> None:
    """Let DeepSpeed use the group that `hybridpar.comm` started; it reads ranks from the environment."""
    os.environ["RANK"], os.environ["LOCAL_RANK"] = str(mesh.rank), str(mesh.device.index or 0)
    os.environ["WORLD_SIZE"] = str(mesh.grid.size)
    deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)


def initialize(**arguments: Any) -> Any:
    """deepspeed.initialize, its engine alone."""
    return deepspeed.initialize(**arguments)[0]
