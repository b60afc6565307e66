"""From a RunSpec to a finished run folder: the only place that knows processes, ports and deadlines."""

from hybridpar.launch.batch import run_batch, run_one
from hybridpar.launch.folder import LaunchError

__all__ = ["LaunchError", "run_batch", "run_one"]
