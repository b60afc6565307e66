"""What one rank of a run does, however it was started; as a module, the entry of torchrun's workers:

python -m torch.distributed.run ... -m hybridpar.launch.rank SPEC.json DIR DEVICE
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from hybridpar import corpus
from hybridpar.comm import process_group
from hybridpar.events import EventWriter
from hybridpar.infer import infer
from hybridpar.launch.folder import RunFolder
from hybridpar.launch.forked import die_with, leave_after, write_to_logs
from hybridpar.specs import RunSpec, load_run_spec
from hybridpar.train import train

# A collective gives up this much after the run's deadline [s]: a hang is then the launcher's to tell, with stacks.
_PATIENCE_S = 60.0


def run_rank(run: RunSpec, rank: int, directory: Path, device: str, data: Path, join: Callable[[], None]) -> None:
    """Join the world, train or infer, leave; everything worth knowing goes into events-<rank>.jsonl.

    Args:
        run: what to train.
        rank: this process.
        directory: the run's folder.
        device: "cpu" or "cuda".
        data: a prepared corpus.
        join: starts torch.distributed.
    """
    with EventWriter(directory, rank) as events:
        events.emit("start", pid=os.getpid(), host=socket.gethostname(), device=device)
        try:
            torch.set_num_threads(run.cluster.threads_per_rank)
            events.emit("phase", name="join")
            join()
            mesh = process_group.ProcessMesh.build(run.strategy)
            text = corpus.Corpus.open(data)
            if run.workload.phase == "train":
                train(run, mesh, text, events.emit, RunFolder(directory).checkpoints)
            else:
                infer(run, mesh, text, events.emit)
            events.emit("phase", name="leave")
            process_group.stop()
        except BaseException as error:
            events.emit("error", type=type(error).__name__, message=str(error), traceback=traceback.format_exc())
            raise
        events.emit("end")


def forked_body(run: RunSpec, folder: RunFolder, device: str, data: Path) -> Callable[[int], None]:
    """The body of a rank forked from a warm parent."""

    def body(rank: int) -> None:
        def join() -> None:
            process_group.start(rank, run.strategy.devices, folder.store, device, run.cluster.deadline_s + _PATIENCE_S)

        run_rank(run, rank, folder.path, device, data, join)

    return body


def main(spec: str, directory: str, device: str, data: str) -> None:
    """One worker of torchrun."""
    die_with(os.getppid())
    folder, rank = RunFolder(Path(directory)), int(os.environ["RANK"])
    write_to_logs(rank, folder.logs)
    run = load_run_spec(Path(spec))

    def join() -> None:
        process_group.start_from_environment(device, run.cluster.deadline_s + _PATIENCE_S)

    leave_after(lambda: run_rank(run, rank, folder.path, device, Path(data), join))


if __name__ == "__main__":
    main(*sys.argv[1:])
