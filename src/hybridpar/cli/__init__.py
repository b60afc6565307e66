"""The command line. Thin: each command reads its input, calls one function, prints what came of it."""

from hybridpar.cli import checking, planning, results, running, theory
from hybridpar.cli.application import app

__all__ = ["app", "checking", "planning", "results", "running", "theory"]
