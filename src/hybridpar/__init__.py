"""hybridpar: a reproducible study of how to split large language models over devices."""

__version__ = "0.1.0"
