"""Closed forms of what a run holds, computes and sends. No torch here."""
