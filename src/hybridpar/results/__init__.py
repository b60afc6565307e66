"""Run folders -> tidy tables with a checked schema."""
