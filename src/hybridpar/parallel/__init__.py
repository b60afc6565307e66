"""Strategies applied to one-device models; `apply.py` is the one place and the one order."""
