"""From tidy tables to what people read: figures, tables, sentences, notebooks, the paper and the report.

One function per figure (`figures`) and per table (`tables`); each takes the loaded study (`inputs`) and returns an
artifact (`artifact`), which `save` writes. Every sentence about results comes from `findings`, every number in the
paper from `numbers`. Nothing here starts a run or reads a run folder.
"""
