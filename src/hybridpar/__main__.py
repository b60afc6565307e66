"""`python -m hybridpar`: the command line where the package is on the path but not installed."""

from hybridpar.cli import app

app()
