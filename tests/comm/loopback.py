"""Bytes that four ranks really send for one call, read from the loopback interface of a network of their own.

Run by `unshare --map-root-user --net python -m tests.comm.loopback`; prints operation -> bytes as JSON.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybridpar.comm.process_group import ProcessMesh
from hybridpar.specs import Strategy
from tests.comm.world import in_world

RANKS = 4
WHOLE_BYTES = 8 << 20


def _calls() -> dict[str, Callable[[], Any]]:
    elements = WHOLE_BYTES // 4
    whole, part = torch.ones(elements), torch.ones(elements // RANKS)
    return {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(whole), whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
    }


def _sent() -> int:
    """Bytes the loopback interface has sent."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.strip().startswith("lo:"))


def _measured(mesh: ProcessMesh) -> dict[str, int]:
    sent = {}
    for name, call in _calls().items():
        call()  # connections are made
        dist.barrier()
        before = _sent()
        dist.barrier()
        call()
        dist.barrier()
        sent[name] = _sent() - before
        dist.barrier()
    return sent


if __name__ == "__main__":
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    print(json.dumps(in_world(Strategy(dp=RANKS), _measured)[0]))
