"""The world of ranks: process groups, and what passes through them."""
